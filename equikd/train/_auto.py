"""`steps_per_call="auto"`: whether steps are faster one by one or many in a dispatch, tried once for each program."""

import logging
import time
from typing import Any

import jax
import numpy as np

from equikd.data import batch_size
from equikd.train._feed import fits
from equikd.train._program import Kind
from equikd.train._setup import Setup
from equikd.train._stepper import Fed, Stepper, stepper_for

_LOG = logging.getLogger("equikd")
_MANY = 64
_SLOW = 5e-3  # seconds of a step that nothing is gained on: a dispatch takes some 50 us
_SECONDS = 0.05  # that a way is tried for


def steps_per_call(setup: Setup, stepper: Stepper) -> int:
    """The steps of a dispatch that the trainer asks for.

    Args:
        setup: the checked experiment.
        stepper: of it; it makes no step.
    """
    if setup.steps_per_call != "auto":
        return int(setup.steps_per_call)
    gathered = fits(setup.data, stepper.device)
    intervals = [setup.log_every, setup.num_steps, *(one.settings.every or _MANY for one in setup.evals)]
    many = min(_MANY, *intervals)
    known = stepper.measured
    if (gathered, many) not in known:
        known[gathered, many] = _fastest(setup, stepper, gathered, many)
    return known[gathered, many]


def _fastest(setup: Setup, stepper: Stepper, gathered: bool, many: int) -> int:
    with stepper.compilations.expected():
        alone = _seconds(setup, stepper, Kind(1, gathered))
        if alone > _SLOW or many == 1:
            return 1
        together = _seconds(setup, stepper, Kind(many, gathered))
    chosen = many if together < alone else 1
    figures = f"{1e6 * alone:.0f} us a step one by one, {1e6 * together:.0f} us {many} at a time"
    _LOG.info("steps_per_call: auto takes %d (%s)", chosen, figures)
    return chosen


def _seconds(setup: Setup, stepper: Stepper, kind: Kind) -> float:
    """Seconds of a step, on zeros; the state stays as it is."""
    trial = stepper_for(setup, stepper.state)
    lead = () if kind.most == 1 else (kind.most,)
    zeros = lambda leaf: np.zeros((*lead, *leaf.shape), leaf.dtype)
    mask: Any = np.ones((*lead, batch_size(setup.spec)), bool)
    table: Any = None
    data = jax.tree.map(zeros, setup.spec.data)
    if kind.gathered:
        in_memory: Any = setup.data
        table, data = in_memory.table.on_device(stepper.device), np.zeros(mask.shape, np.int32)
    fed = Fed(kind, kind.most, data, mask, table)
    trial.run(fed)  # compiles
    jax.block_until_ready(trial.borrow()[0].step)
    calls, started = 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - started < _SECONDS:
        trial.run(fed)
        calls += 1
        if calls % 3 == 0:
            jax.block_until_ready(trial.borrow()[0].step)
    jax.block_until_ready(trial.borrow()[0].step)
    return (time.perf_counter() - started) / (calls * kind.most)
