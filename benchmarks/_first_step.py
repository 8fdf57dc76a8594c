"""What a fresh process of `benchmarks.imports` and `benchmarks.startup` does with equikd: a first step, or a compile.

The peer without equikd is `_first_step_by_hand.py`.
"""

import os
import sys
import time
from typing import Any

import jax

import equikd as ek
from benchmarks._task import TASKS


@ek.config.config
class FirstStep:
    """A writer that ends the process when the first update has been computed, and prints when that was."""

    def open(self, run: object) -> "FirstStep":
        """Needs nothing."""
        return self

    def tick(self, step: int) -> None:
        """The first step has been dispatched; wait for it."""
        jax.block_until_ready(jax.live_arrays())
        sys.stdout.write(f"{time.time()}\n")
        sys.stdout.flush()
        os._exit(0)  # the rest of the run is of no interest

    def write(self, record: object) -> None:
        """Never called."""

    def flush(self) -> None:
        """Never called."""

    def close(self) -> None:
        """Called where `train` fails before the first step."""


def main(name: str, **fields: Any) -> None:
    """The first step of a task in `trainer.train(workdir)`, with the writers that a trainer has by default."""
    from benchmarks._tiny import make_trainer

    writers = (ek.train.Console(), ek.train.TensorBoard(), FirstStep())
    ek.override(make_trainer(100, TASKS[name]), {"writers": writers} | fields).train("run")


def compile_step(name: str) -> None:
    """Print the seconds that the first step takes once the state is there: trace, compile, run."""
    from benchmarks._tiny import make_trainer
    from equikd.train._init import initial_state  # `trainer.init` checks the experiment, and so traces the step

    trainer = make_trainer(100, TASKS[name])
    state, config = initial_state(trainer.in_step, 0), trainer.in_step
    batch = next(trainer.batches(state))
    jax.block_until_ready(jax.live_arrays())
    start = time.perf_counter()
    stepper = ek.train.Stepper(config, state, spec=batch)
    stepper.step(batch)
    jax.block_until_ready(stepper.borrow())
    print(time.perf_counter() - start)
