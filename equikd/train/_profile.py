"""A profile: some updates measured and traced, to see what a step spends its time on before training for days.

    print(trainer.profile("runs/digits"))

Three windows, each waited for at its end: the update that compiles and some more to warm up; updates that are timed; as
many that are traced. They are apart because tracing takes time itself, and what is measured should be the speed of
training: batches are drawn and steps dispatched as in the loop, without waiting in between. The host's share is
measured with it: where fetching data and dispatching take as long as the whole, the device waits for the host.

In the trace each update is a step named `train`, and inside of it the fetching of its batch is named `data`.
"""

import contextlib
import dataclasses
import datetime
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax

from equikd.data import Batch, batch_size
from equikd.errors import ConfigError, DataError, EquikdError, message, report
from equikd.train._costs import Costs, aligned, cost_rows, costs_of, scaled
from equikd.train._directory import RunDirectory, RunDirectoryError
from equikd.train._exhausted import memory_explained
from equikd.train._feed import batches_from
from equikd.train._program import program_for
from equikd.train._setup import Setup
from equikd.train._state import TrainState
from equikd.train._stepper import Stepper
from equikd.train._throughput import speed

STEP, DATA = "train", "data"  # names in the trace


@dataclasses.dataclass(frozen=True)
class Profile:
    """What `Trainer.profile` has measured; printed as a table.

    Attributes:
        directory: of the trace: an `.xplane.pb` for XProf, and a `.trace.json.gz` for Perfetto.
        steps: updates that were timed, and as many that were traced.
        rows: of a batch.
        seconds_per_step: of the updates that were timed, from the first fetch to the last result, by their number.
        data_seconds: of these, what the host spent on fetching a batch.
        dispatch_seconds: and on dispatching a step; the device may compute meanwhile.
        costs: of the compiled step.
    """

    directory: Path
    steps: int
    rows: int
    seconds_per_step: float
    data_seconds: float
    dispatch_seconds: float
    costs: Costs

    @property
    def speed(self) -> dict[str, float]:
        """`steps_per_second`, `examples_per_second`, and `model_flops_utilization` where the peak is known."""
        return speed(1, self.seconds_per_step, self.rows, self.costs.seconds_at_peak)

    def __str__(self) -> str:
        speed = self.speed
        rows = [
            ("a step", scaled(self.seconds_per_step, "s")),
            ("host, data", self._share(self.data_seconds)),
            ("host, dispatch", self._share(self.dispatch_seconds)),
            ("steps", f"{speed['steps_per_second']:.4g} a second"),
            ("examples", f"{speed['examples_per_second']:.4g} a second, {self.rows} in a batch"),
        ]
        if "model_flops_utilization" in speed:
            rows.append(("utilisation", f"{100 * speed['model_flops_utilization']:.3g}% of the peak, by its products"))
        rows += [*cost_rows(self.costs), ("trace", str(self.directory))]
        return "\n".join([f"Profile of {self.steps} steps", *aligned(rows)])

    def _share(self, seconds: float) -> str:
        return f"{scaled(seconds, 's')}, {100 * seconds / self.seconds_per_step:.0f}% of a step"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was asked for, checked.

    Attributes:
        directory: a run directory, or a place for one.
        steps: updates in each of the two windows that count.
        warmup: updates before them, besides the first.
    """

    directory: RunDirectory
    steps: int
    warmup: int

    @classmethod
    def of(cls, workdir: Any, steps: int, warmup: int) -> "Plan":
        """Refuse what cannot be; makes nothing.

        Raises:
            ConfigError: a number is none; all at once. Or there is no directory.
            RunDirectoryError: the directory cannot be used.
        """
        wrong = [
            message(f"profile: {name} must be an int of at least {least}", got=repr(value)[:100])
            for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0))
            if type(value) is not int or value < least
        ]
        if not isinstance(workdir, str | os.PathLike):
            got, fix = repr(workdir)[:100], 'profile("runs/a")'
            wrong.append(message("profile: a trace needs a directory", got=got, fix=fix))
        if wrong:
            raise ConfigError(report(f"profile: {len(wrong)} arguments are wrong", wrong))
        directory = RunDirectory.open(cast("str | os.PathLike[str]", workdir))
        directory.check()
        return cls(directory, steps, warmup)

    def run(self, setup: Setup, first: Callable[[], TrainState]) -> Profile:
        """Measure, and trace.

        Args:
            setup: the checked experiment.
            first: makes the train state.

        Raises:
            EquikdError: as `Trainer.profile`.
        """
        batches = self._drawn(batches_from(setup, 0))
        with memory_explained(setup):
            stepper = Stepper(setup.config, first(), spec=setup.spec)
            _run(stepper, batches, 1 + self.warmup)
            seconds, fetched, dispatched = _run(stepper, batches, self.steps)
            with _traced(self.directory) as folder:
                _run(stepper, batches, self.steps)
            costs = costs_of(program_for(setup.config, setup.state, setup.spec), setup)
        n = self.steps
        return Profile(folder, n, batch_size(setup.spec), seconds / n, fetched / n, dispatched / n, costs)

    def _drawn(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, of which there must be enough."""
        wanted = 1 + self.warmup + 2 * self.steps
        drawn = 0
        for drawn, batch in enumerate(batches, 1):  # noqa: B007  (read after the loop)
            yield batch
        raise DataError(
            message(
                f"train_data: the data ended after {drawn} batches, but the profile takes {wanted}",
                expected=f"1 that compiles, {self.warmup} to warm up, {self.steps} timed, {self.steps} traced",
                fix="fewer steps, or data that goes on, such as ek.data.Iterable(make, repeat=True)",
            )
        )


def _run(stepper: Stepper, batches: Iterator[Batch], steps: int) -> tuple[float, float, float]:
    """Make updates, and wait for the last: seconds in all, seconds in which data was fetched, and steps dispatched."""
    fetched = dispatched = 0.0
    began = time.perf_counter()
    for number in range(steps):
        with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
            before = time.perf_counter()
            with jax.profiler.TraceAnnotation(DATA):
                batch = next(batches)
            between = time.perf_counter()
            stepper.step(batch)
            fetched, dispatched = fetched + between - before, dispatched + time.perf_counter() - between
    jax.block_until_ready(stepper.borrow())
    return time.perf_counter() - began, fetched, dispatched


@contextlib.contextmanager
def _traced(directory: RunDirectory) -> Iterator[Path]:
    """Inside, JAX's profiler traces; what it writes stays only if all goes well. Gives the directory of the trace.

    Raises:
        EquikdError: a profile is being taken already.
        RunDirectoryError: the trace cannot be written.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python would take most of the trace, and of the time
    options.session_id, folder = _free(directory.profiles)
    try:
        jax.profiler.start_trace(directory.profiles, profiler_options=options)
    except RuntimeError as error:
        fix = "jax.profiler.stop_trace(), or let the other profile end"
        raise EquikdError(message("profile: JAX's profiler does not start", got=str(error), fix=fix)) from error
    try:
        try:
            yield folder
        finally:
            jax.profiler.stop_trace()
        if not any(folder.glob("*.xplane.pb")):
            raise OSError("the profiler wrote none")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            what = f"{folder}: the trace cannot be written"
            fix = "check the disk and the permissions, or name another directory"
            raise RunDirectoryError(message(what, got=str(error), fix=fix)) from error
        raise


def _free(profiles: Path) -> tuple[str, Path]:
    """A name for a trace that none has yet, and its directory, where XProf looks for it."""
    now = datetime.datetime.now().strftime("%Y_%m_%d_%H_%M_%S")
    names = itertools.chain([now], (f"{now}_{count}" for count in itertools.count(2)))
    found = ((name, profiles / "plugins" / "profile" / name) for name in names)
    return next((name, folder) for name, folder in found if not folder.exists())
