"""What is trained in the races of `benchmarks.step` and `benchmarks.startup`, by equikd and by all its peers.

Three tasks, each a model, a batch size and random data. Nothing here imports equikd, so that a peer's process is not
charged for it.

`TINY`   64-128-128-10, batch 32: 0.1 ms a step, so that what is measured is everything but the arithmetic
`WIDE`   784-1024-1024-10, batch 256: nearly all arithmetic
`DEEP`   a transformer of 12 blocks with about 200 parameter leaves, small in all else: a long list of leaves
"""

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

RATE = 1e-3
"""Of adam."""


class Task(NamedTuple):
    """A model and its data.

    Attributes:
        name: `tiny`, `wide` or `deep`.
        shape: of one example.
        width: units of a hidden layer.
        batch: rows in a batch.
        rows: rows of the data.
        log_every: steps in a logging interval.
        blocks: of a transformer; 0: a multilayer perceptron with two hidden layers.
        heads: of its attention.
        classes: to tell apart.
    """

    name: str
    shape: tuple[int, ...]
    width: int
    batch: int
    rows: int
    log_every: int
    blocks: int = 0
    heads: int = 0
    classes: int = 10

    @property
    def features(self) -> int:
        """Numbers in one example."""
        return math.prod(self.shape)


TINY = Task("tiny", (64,), 128, 32, rows=1024, log_every=100)
WIDE = Task("wide", (784,), 1024, 256, rows=2048, log_every=10)  # ten steps take as long as thousands of the tiny model
DEEP = Task("deep", (8, 8), 32, 8, rows=64, log_every=100, blocks=12, heads=4)
TASKS = {task.name: task for task in (TINY, WIDE, DEEP)}


def load(name: str = "tiny") -> dict[str, np.ndarray]:
    """Random rows for a task: `image` float32 `rows *shape`, `label` int32 `rows`."""
    task, draw = TASKS[name], np.random.default_rng(0)
    images = draw.normal(size=(task.rows, *task.shape)).astype(np.float32)
    return {"image": images, "label": draw.integers(0, task.classes, task.rows).astype(np.int32)}


def shuffled(task: Task) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Training batches without end, as one would write them: a permutation an epoch, and two `take`s a batch."""
    images, labels = load(task.name).values()
    for epoch in itertools.count():
        order = np.random.default_rng((0, epoch)).permutation(task.rows)
        for start in range(0, task.rows - task.batch + 1, task.batch):
            picks = order[start : start + task.batch]
            yield images.take(picks, 0), labels.take(picks, 0)


class Clock:
    """Notes the time in the middle of each logging interval, from the second one on.

    Attributes:
        every: steps in an interval.
        marks: `(seconds on the wall, seconds of the CPU by all threads)` of each.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.marks: list[tuple[float, float]] = []

    def tick(self, step: int) -> None:
        """`step` updates have been dispatched."""
        if step % self.every == self.every // 2 and step > self.every:
            self.marks.append((time.perf_counter(), time.process_time()))

    def write(self, record: Any) -> None:
        """A writer is given rows, too."""

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing is open."""

    def seconds_per_step(self) -> tuple[float, float]:
        """The median over the intervals, wall and CPU."""
        wall, cpu = np.median(np.diff(self.marks, axis=0), axis=0) / self.every
        return float(wall), float(cpu)
