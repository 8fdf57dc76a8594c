"""Compilations of the step: the first is expected, each further one is told as it happens, with what made it necessary.

A step is compiled where it is traced, so the traced function itself says so (`tell_traced`): steps that compile nothing
pay nothing for it. What is traced is compared with what has been traced before in this process, and the differences to
the nearest of these are the reason. Of values that follow from others only the cause is told: another width is one line
of the config, not one for each parameter.

    the step compiles again (2nd time in this run)
    batch.x: shape [32, 8] -> [20, 8]
        fix: pad to one shape and mask the rest ...
"""

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from equikd._compat import CONFIG, is_weak
from equikd.errors import EquikdError, message
from equikd.train._cache import is_array
from equikd.train._differences import Explanation, difference, differences
from equikd.train._rows import Record

_LOG = logging.getLogger("equikd")
COMPILATION = "compilation"  # the split of their rows
_MOST = 8  # differences that a message lists


class CompilationError(EquikdError, RuntimeError):
    """The step would be compiled more often than `max_compilations` allows."""


class Call(NamedTuple):
    """What makes a program of the step.

    Attributes:
        config: `trainer.in_step`.
        state: the train state.
        batch: `(data, mask)`; None where the program takes the rows itself.
        table: the data that it takes them from.
        most: steps in a dispatch.
        device: where it runs.
        settings: those of JAX.
    """

    config: Any
    state: Any
    batch: Any
    table: Any
    most: int
    device: str
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compilation that was not the first.

    Attributes:
        number: the how manieth it is in this run.
        explanation: the differences to the nearest call that was compiled before.
    """

    number: int
    explanation: Explanation

    def __str__(self) -> str:
        found = self.explanation.differences
        if not found:
            return "nothing differs from a call that was compiled before: JAX's caches were cleared, or were full"
        more = f"\n... and {len(found) - _MOST} more" if len(found) > _MOST else ""
        return "\n".join(map(str, found[:_MOST])) + more

    def record(self, step: int, seconds: float) -> Record:
        """The row that tells of it."""
        found = tuple(dataclasses.asdict(one) for one in self.explanation.differences)
        return Record(step, COMPILATION, {"number": float(self.number)}, seconds, differences=found)


class Compilations:
    """Those of one run.

    Attributes:
        most: how many are allowed; None: any number.
        count: how many there were.
        untold: those that no writer has been told of.
        calls: what has been compiled.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most, self.count = most, 0
        self.untold: list[Compilation] = []
        self.calls: list[Call] = []

    def note(self, explanation: Explanation | None) -> None:
        """Take notice of one that is about to happen; None: it is the first of the process.

        Raises:
            CompilationError: it is one too many.
        """
        self.count += 1
        one = Compilation(self.count, explanation or Explanation(()))
        if self.most is not None and self.count > self.most:
            what = f"the step would be compiled, {self.count} times in all, but max_compilations is {self.most}"
            got = str(one) if explanation is not None else "the first compilation of this process"
            fix = "avoid the difference, or raise max_compilations"
            raise CompilationError(message(what, got=got, fix=fix))
        if explanation is None:
            return
        again = self.count > 1  # else it is another experiment's program that came first
        _LOG.log(logging.WARNING if again else logging.INFO, "the step compiles again\n%s", one)
        if again:  # the rows of a run do not depend on what else the process has done
            self.untold.append(one)

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Inside, compilations are neither counted nor told."""
        before, _WATCHING.quiet = getattr(_WATCHING, "quiet", False), True
        try:
            yield
        finally:
            _WATCHING.quiet = before


class _Watching(threading.local):
    """Whose step is running in this thread."""

    compilations: Compilations | None = None
    quiet: bool = False


_WATCHING = _Watching()
_KNOWN: "collections.deque[Call]" = collections.deque(maxlen=64)  # shapes and static values, no arrays


def watched_by(compilations: Compilations | None) -> None:
    """From here on, what is traced in this thread belongs to a run."""
    _WATCHING.compilations = compilations


def tell_traced(call: Callable[[], Call]) -> None:
    """Called inside the trace of the step, which is about to be compiled.

    Raises:
        CompilationError: the run allows no more; nothing has been compiled or donated.
    """
    found = _abstract(call())
    watching = _WATCHING.compilations
    before = _KNOWN if watching is None or not watching.calls else watching.calls  # of the run itself, if there are any
    nearest = min((explained(known, found) for known in before), key=len, default=None)
    if watching is not None:
        if not _WATCHING.quiet:
            watching.note(nearest)
        watching.calls.append(found)
    _KNOWN.append(found)


def explained(before: Call, after: Call) -> Explanation:
    """The differences of two calls of the step that others do not follow from."""
    settings = [
        difference((), "jax setting", f"{name} = {before.settings.get(name)!r}", f"{value!r}")
        for name, value in after.settings.items()
        if before.settings.get(name) != value
    ]
    found = [*settings, *differences(before.config, after.config, ())]
    batches = before.batch, after.batch
    if None not in batches:
        found += differences(before.batch[0], after.batch[0], ("batch",))
        found += differences(before.batch[1], after.batch[1], ("mask",))
    elif batches != (None, None):
        ways = ["from the host" if batch is not None else "by row numbers" for batch in batches]
        found.append(difference(("train_data",), "feeding", *ways))
    if None not in (before.table, after.table):
        found += differences(before.table, after.table, ("train_data",))
    if before.most != after.most:
        found.append(difference(("steps_per_call",), "steps per call", str(before.most), str(after.most)))
    if before.device != after.device:
        found.append(difference((), "device", before.device, after.device))
    if settings:  # dtypes follow from them
        found = [one for one in found if one.kind not in ("dtype", "weak type")]
    return Explanation(tuple(found or differences(before.state, after.state, ("state",))))


_OF_TRACES = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_legacy_prng_key",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
)


def settings_of_jax() -> dict[str, Any]:
    """What JAX compiles for besides the arguments: its settings, and the mesh that is in force."""
    settings = {f"jax.config.{name}": getattr(CONFIG, name, None) for name in _OF_TRACES}
    return settings | {"jax.sharding.get_abstract_mesh()": str(jax.sharding.get_abstract_mesh())}


def _abstract(call: Call) -> Call:
    """The same call with shapes in place of its arrays and tracers."""

    def spec(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak(leaf))

    return call._replace(
        **{name: jax.tree.map(spec, getattr(call, name)) for name in ("config", "state", "batch", "table")}
    )
