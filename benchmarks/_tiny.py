"""The experiments of the benchmarks as equikd writes them, the tiny one (64-128-128-10, batch 32, adam) before all.

Its parts are importable, so that a run directory can describe it: an experiment that cannot be written down would make
each run print why.
"""

import itertools
import os
import pty
import threading
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax

import equikd as ek
from benchmarks._models import Transformer
from benchmarks._task import RATE, TINY, Clock, Task, load

FEATURES, WIDTH, CLASSES, BATCH, LOG_EVERY = TINY.features, TINY.width, TINY.classes, TINY.batch, TINY.log_every

OPENED: list[Clock] = []


@ek.config.config
class ClockWriter:
    """The clock as a writer of a trainer; it is kept in `OPENED`."""

    every: int = LOG_EVERY

    def open(self, run: Any) -> Clock:
        """A clock for this run."""
        OPENED.append(Clock(self.every))
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


def make_trainer(num_steps: int, task: Task = TINY) -> ek.Trainer:
    """The experiment, with loss and accuracy."""
    mlp = ek.lazy(eqx.nn.MLP)(task.features, task.classes, task.width, 2)
    return ek.Trainer(
        model=ek.lazy(Transformer)() if task.blocks else mlp,
        inputs={"x": "batch.image"},
        losses={"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label")},
        metrics={"accuracy": ek.metrics.Accuracy(preds="preds", labels="batch.label")},
        optimizer=ek.lazy(optax.adam)(RATE),
        train_data=ek.data.InMemory(ek.lazy(load)(task.name), batch_size=task.batch),
        num_steps=num_steps,
        log_every=task.log_every,
        checkpoints=None,
        writers=(ClockWriter(task.log_every),),
    )


def stepping(trainer: ek.Trainer, batch: ek.data.Batch, steps: int) -> Callable[[], None]:
    """`steps` steps of the stepper on one batch, its accumulators swapped every `LOG_EVERY` of all steps made."""
    stepper, numbers = ek.train.Stepper(trainer, trainer.init()), itertools.count(1)

    def work() -> None:
        aux = None
        for number in itertools.islice(numbers, steps):
            stepper.step(batch)
            if number % LOG_EVERY == 0:
                aux = stepper.swap()
        jax.block_until_ready((aux, stepper.borrow()))

    return work
