"""What the loop hands out: results to the writers, and states to the checkpoints.

Results are read from the device in one place, `read`. A `Pending` holds those that are still there, so that the loop
can go on before they are computed. A state that is saved is read as a whole.
"""

import dataclasses
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from equikd.metrics import Aux, Summary
from equikd.metrics._aux import Results
from equikd.train._checkpoint import CheckpointStore
from equikd.train._constant import parted
from equikd.train._ending import Ending
from equikd.train._failure import refuse_bad, refuse_failed
from equikd.train._guard import Counts, SkipNonFinite, guard_of
from equikd.train._in_step import InStep
from equikd.train._source import model_facts
from equikd.train._stepper import Stepper
from equikd.train._throughput import Throughput
from equikd.train._writers import Record, Writers


class Pending(NamedTuple):
    """Results that are still on the device."""

    step: int
    split: str
    aux: Aux
    guard: Any = None
    """What the guard knew at that step; None: there is no guard."""


def read(pending: Pending) -> tuple[Results, Counts | None]:
    """Named results of merged states, and what the guard knew: the only place where they are read from the device."""
    counts = None if pending.guard is None else Counts.on_host(pending.guard)
    leaves, structure = jax.tree.flatten(pending.aux)  # a third of what `jax.device_get` takes for a few scalars
    host = structure.unflatten([np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves])
    with np.errstate(all="ignore"):  # the mean over no rows is nan, which is the answer
        results = host.computed()
    return results._replace(scalars={name: float(value) for name, value in results.scalars.items()}), counts


@dataclasses.dataclass
class Output:
    """Where results go.

    Attributes:
        writers: the open writers.
        config: `trainer.in_step`.
        stepper: whose results these are.
        ending: is told of each row.
        throughput: is told of each dispatch and each pause.
        seconds: of earlier sessions of this run.
        latest, summaries: the newest value and the newest summary of each result, by `split/name`.
        history: all rows of this session, without summaries: those of a long run would fill the memory.
    """

    writers: Writers
    config: InStep
    stepper: Stepper
    ending: Ending
    throughput: Throughput
    seconds: float = 0.0
    latest: dict[str, float] = dataclasses.field(default_factory=dict)
    summaries: dict[str, Summary] = dataclasses.field(default_factory=dict)
    history: list[Record] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        """Seconds since the run began, over all its sessions."""
        return self.seconds + time.monotonic() - self.started

    def tick(self, step: int) -> None:
        """`step` updates have been dispatched; compilations among them that were not expected are told."""
        self.throughput.tick(step)
        self.writers.tick(step)
        untold = self.stepper.compilations.untold
        if untold:
            for one in untold:
                self.writers.write(one.record(step, self.elapsed()))
            untold.clear()

    def write(self, pending: Pending | None) -> None:
        """Read results from the device and hand them to the writers.

        Raises:
            NonFiniteError: training has failed; nothing is written.
        """
        if pending is not None:
            speed = self.throughput.finished(pending.step) if pending.split == "train" else {}
            (scalars, summaries), counts = read(pending)
            refuse_failed(self.config, counts, lambda: self.stepper.state)
            if pending.split == "train" and counts is not None and isinstance(guard_of(self.config), SkipNonFinite):
                scalars["skipped_steps"] = float(counts.skipped)
            self.latest |= {f"{pending.split}/{name}": value for name, value in scalars.items()}
            self.summaries |= {f"{pending.split}/{name}": one for name, one in summaries.items()}
            self.history.append(Record(pending.step, pending.split, scalars, self.elapsed()))
            self.ending.observe(self.history[-1])
            self.writers.write(dataclasses.replace(self.history[-1], summaries=summaries, speed=speed))


@dataclasses.dataclass(frozen=True)
class Saving:
    """Where and when checkpoints are saved; the seed stands in them, so that a resume sees that it has changed."""

    store: CheckpointStore
    every: int | None
    seed: int

    def due(self, step: int) -> bool:
        """Whether to save after `step` updates."""
        return self.every is not None and step % self.every == 0

    def save(self, step: int, stepper: Stepper, output: Output) -> None:
        """Save state and accumulators; rows up to here are on disk before the checkpoint is published.

        Args:
            step: updates made.
            stepper: holds both.
            output: where results go.

        Raises:
            NonFiniteError: there are numbers in the state that are not finite; nothing is saved.
        """
        state, aux = stepper.borrow()
        refuse_bad(output.config, state)
        output.writers.flush()
        changing, constant = parted(eqx.filter(state, eqx.is_array), stepper.changed)
        arrays = {"state": changing, "accumulators": eqx.filter(aux, eqx.is_array)}
        facts = {"step": step, "seconds": output.elapsed(), "seed": self.seed, "model": model_facts(state)}
        self.store.save(step, arrays, facts | output.ending.facts(), constant={"state": constant})
