"""The loop: feed, step, log, evaluate, save; to be read from top to bottom.

The device is read in one place, `Output.write`, and one interval late: when an interval ends its accumulators are set
aside, and read when the next one ends, by which time they have long been computed, so the loop never waits for a step
it has just dispatched. Before an eval or a checkpoint, and at the end, what was set aside is written at once.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np

from equikd.data import Batch, exhausted
from equikd.evals import evaluate
from equikd.metrics import Aux, Summary
from equikd.metrics._aux import Results
from equikd.train._check import view_of
from equikd.train._checkpoint import CheckpointStore
from equikd.train._padding import unpadded
from equikd.train._setup import PreparedEval, Setup
from equikd.train._state import TrainState
from equikd.train._stepper import Stepper
from equikd.train._writers import Record, Writers
from equikd.tree import join


class Pending(NamedTuple):
    """Results that are still on the device."""

    step: int
    split: str
    aux: Aux


def read(aux: Aux) -> Results:
    """Named results of merged states: the only place where the loop reads the device."""
    leaves, structure = jax.tree.flatten(aux)  # a third of what `jax.device_get` takes for a few scalars
    host = structure.unflatten([np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves])
    with np.errstate(all="ignore"):  # the mean over no rows is nan, which is the answer
        results = host.computed()
    return results._replace(scalars={name: float(value) for name, value in results.scalars.items()})


@dataclasses.dataclass
class Output:
    """Where results go.

    Attributes:
        writers: the open writers.
        seconds: of earlier sessions of this run.
        latest, summaries: the newest value and the newest summary of each result, by `split/name`.
        history: all rows of this session, without summaries: those of a long run would fill the memory.
    """

    writers: Writers
    seconds: float = 0.0
    latest: dict[str, float] = dataclasses.field(default_factory=dict)
    summaries: dict[str, Summary] = dataclasses.field(default_factory=dict)
    history: list[Record] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        """Seconds since the run began, over all its sessions."""
        return self.seconds + time.monotonic() - self.started

    def write(self, pending: Pending | None) -> None:
        """Read results from the device and hand them to the writers."""
        if pending is not None:
            scalars, summaries = read(pending.aux)
            self.latest |= {f"{pending.split}/{name}": value for name, value in scalars.items()}
            self.summaries |= {f"{pending.split}/{name}": one for name, one in summaries.items()}
            self.history.append(Record(pending.step, pending.split, scalars, self.elapsed()))
            self.writers.write(dataclasses.replace(self.history[-1], summaries=summaries))


@dataclasses.dataclass(frozen=True)
class Saving:
    """Where and when checkpoints are saved; the seed stands in them, so that a resume sees that it has changed."""

    store: CheckpointStore
    every: int | None
    seed: int

    def due(self, step: int, last: bool) -> bool:
        """Whether to save after `step` updates."""
        return last or (self.every is not None and step % self.every == 0)

    def save(self, step: int, stepper: Stepper, output: Output) -> None:
        """Save state and accumulators; rows up to here are on disk before the checkpoint is published."""
        output.writers.flush()
        state, aux = stepper.borrow()
        arrays = eqx.filter({"state": state, "accumulators": aux}, eqx.is_array)
        self.store.save(step, arrays, {"step": step, "seconds": output.elapsed(), "seed": self.seed})


def loop(
    setup: Setup, stepper: Stepper, batches: Iterator[Batch], output: Output, saving: Saving | None, start: int
) -> None:
    """Train from update number `start` to `setup.num_steps`.

    Args:
        setup: the checked experiment.
        stepper: holds the state after `start` updates.
        batches: the training batches from number `start` on.
        output: where results go.
        saving: where checkpoints go, or None.
        start: updates already made.

    Raises:
        DataError: the data ends before `num_steps`.
    """
    pending: Pending | None = None
    batches = unpadded(batches, setup.config, "")
    for one in (one for one in setup.evals if start == 0 and one.settings.due(0, last=False)):
        output.write(Pending(0, one.name, run_eval(one, stepper.borrow()[0])))
    for step in range(start + 1, setup.num_steps + 1):
        batch = next(batches, None)
        if batch is None:
            output.write(pending)
            raise exhausted(step - 1, setup.num_steps)
        stepper.step(batch)
        output.writers.tick(step)

        last = step == setup.num_steps
        if last or step % setup.log_every == 0:
            output.write(pending)  # of the interval before this one
            pending = Pending(step, "train", stepper.swap())
        evals = [one for one in setup.evals if one.settings.due(step, last)]
        save = saving is not None and saving.due(step, last)
        if evals or save:
            output.write(pending)
            pending = None
        for one in evals:
            output.write(Pending(step, one.name, run_eval(one, stepper.borrow()[0])))
        if save and saving is not None:
            saving.save(step, stepper, output)
    output.write(pending)


def run_eval(one: PreparedEval, state: TrainState) -> Aux:
    """An eval of a state."""
    batches = itertools.islice(one.data.epoch(), one.settings.num_batches)
    batches = unpadded(batches, one.config, join(("evals", one.name)) + ".")
    return evaluate(one.config, view_of(state), batches, one.empty)
