"""What a peer offers, and the loop by hand around those that have none of their own."""

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks._task import Clock, Task, load, shuffled

Training = Callable[[Iterable[Any]], Iterator[Any]]
"""A training loop: it makes a step for each batch, and yields what there is to wait for, such as the loss."""


def on_device(images: Any, labels: Any) -> Any:
    """A batch as most want it."""
    return jnp.asarray(images), jnp.asarray(labels)


class Peer(NamedTuple):
    """One way to write the training of a task.

    Attributes:
        start: makes the training; each call of it begins with fresh parameters, and compiles nothing again. None: there
            is no step apart from the loop.
        batches: shuffled batches without end, for `start`.
        place: makes a batch of numpy arrays, in the form and the place that the step is fastest to get it from.
        wait: until what the training yields has been computed.
        fit: the peer's own loop: `(task, num_steps, clock, folder)`, to log every interval to files in the folder, and
            call the clock after each step. None: the loop by hand.
    """

    start: Callable[[Task], Training] | None
    batches: Callable[[Task], Iterator[Any]] = shuffled
    place: Callable[[Any, Any], Any] = on_device
    wait: Callable[[Any], Any] = jax.block_until_ready
    fit: Callable[[Task, int, Clock, Path], None] | None = None


def one_batch(peer: Peer, task: Task) -> Any:
    """The first rows of the data, placed."""
    images, labels = load(task.name).values()
    return peer.place(images[: task.batch], labels[: task.batch])


def steps_of(peer: Peer, task: Task, steps: int) -> Callable[[], None] | None:
    """Work that makes `steps` steps on one batch and waits for them; None where there is no step apart."""
    if peer.start is None:
        return None
    results = peer.start(task)(itertools.repeat(one_batch(peer, task)))

    def work() -> None:
        result = None
        for result in itertools.islice(results, steps):  # noqa: B007  the last one counts
            pass
        peer.wait(result)

    return work


def loop_of(peer: Peer, task: Task, num_steps: int) -> Callable[[], tuple[float, float]]:
    """Work that trains from the start; gives the seconds of a step, wall and CPU."""
    fit = peer.fit or by_hand(peer, task)

    def work() -> tuple[float, float]:
        clock = Clock(task.log_every)
        with tempfile.TemporaryDirectory() as folder:
            fit(task, num_steps, clock, Path(folder))
        return clock.seconds_per_step()

    return work


def by_hand(peer: Peer, task: Task) -> Callable[[Task, int, Clock, Path], None]:
    """A loop that reads the loss every interval, and logs it as a line of JSON and to TensorBoard."""
    from tensorboardX import SummaryWriter  # not charged to a process that only makes a step

    if peer.start is None:
        raise ValueError("a peer has a step or a loop of its own")
    training = peer.start(task)

    def fit(task: Task, num_steps: int, clock: Clock, folder: Path) -> None:
        started = time.monotonic()
        batches = itertools.islice(peer.batches(task), num_steps)
        with (folder / "metrics.jsonl").open("a") as log, SummaryWriter(str(folder)) as board:
            for number, loss in enumerate(training(batches), 1):
                clock.tick(number)
                if number % task.log_every == 0:
                    row = {"step": number, "loss": float(loss), "seconds": time.monotonic() - started}
                    log.write(json.dumps(row) + "\n")
                    log.flush()
                    board.add_scalar("loss", row["loss"], number)

    return fit
