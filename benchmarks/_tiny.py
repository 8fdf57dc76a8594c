"""The tiny experiment of the benchmarks (64-128-128-10, batch 32, adam), and the clock that both sides of a race call.

Its parts are importable, so that a run directory can describe it: an experiment that cannot be written down would make
each run print why.
"""

import os
import pty
import threading
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import equikd as ek

ROWS, FEATURES, WIDTH, CLASSES, BATCH = 1024, 64, 128, 10, 32
RATE, LOG_EVERY = 1e-3, 100


def load() -> dict[str, np.ndarray]:
    """Random rows: `image` float32 `n 64`, `label` int32 `n`."""
    draw = np.random.default_rng(0)
    images = draw.normal(size=(ROWS, FEATURES)).astype(np.float32)
    return {"image": images, "label": draw.integers(0, CLASSES, ROWS).astype(np.int32)}


class Clock:
    """Notes the time in the middle of each logging interval, from the second one on.

    Attributes:
        marks: `(seconds on the wall, seconds of the CPU by all threads)` of each.
    """

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def tick(self, step: int) -> None:
        """`step` updates have been dispatched."""
        if step % LOG_EVERY == LOG_EVERY // 2 and step > LOG_EVERY:
            self.marks.append((time.perf_counter(), time.process_time()))

    def write(self, record: Any) -> None:
        """A writer is given rows, too."""

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing is open."""

    def seconds_per_step(self) -> tuple[float, float]:
        """The median over the intervals, wall and CPU."""
        wall, cpu = np.median(np.diff(self.marks, axis=0), axis=0) / LOG_EVERY
        return float(wall), float(cpu)


OPENED: list[Clock] = []


@ek.config.config
class ClockWriter:
    """The clock as a writer of a trainer; it is kept in `OPENED`."""

    def open(self, run: Any) -> Clock:
        """A clock for this run."""
        OPENED.append(Clock())
        return OPENED[-1]


class Terminal:
    """A pseudo-terminal whose output is read and thrown away."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        self.file = os.fdopen(slave, "w")
        self.reader = threading.Thread(target=self.drain, daemon=True)
        self.reader.start()

    def drain(self) -> None:
        """Read until the other end is closed."""
        try:
            while os.read(self.master, 65536):
                pass
        except OSError:
            pass


@ek.config.config
class OnTerminal:
    """`Console` on a terminal of its own."""

    def open(self, run: Any) -> Any:
        """The display."""
        from rich.console import Console

        file = Terminal().file
        return ek.train.Console().open(run, console=Console(file=file, force_terminal=True, width=120))


def make_trainer(num_steps: int) -> ek.Trainer:
    """The experiment, with loss and accuracy."""
    return ek.Trainer(
        model=ek.lazy(eqx.nn.MLP)(FEATURES, CLASSES, WIDTH, 2),
        inputs={"x": "batch.image"},
        losses={"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label")},
        metrics={"accuracy": ek.metrics.Accuracy(preds="preds", labels="batch.label")},
        optimizer=ek.lazy(optax.adam)(RATE),
        train_data=ek.data.InMemory(ek.lazy(load)(), batch_size=BATCH),
        num_steps=num_steps,
        log_every=LOG_EVERY,
        checkpoints=None,
        writers=(ClockWriter(),),
    )


def stepping(trainer: ek.Trainer, batch: ek.data.Batch, steps: int) -> Callable[[], None]:
    """`steps` steps of the stepper on one batch, its accumulators swapped every `LOG_EVERY`."""
    stepper = ek.train.Stepper(trainer, trainer.init())

    def work() -> None:
        aux = None
        for number in range(1, steps + 1):
            stepper.step(batch)
            if number % LOG_EVERY == 0:
                aux = stepper.swap()
        jax.block_until_ready((aux, stepper.borrow()))

    return work
