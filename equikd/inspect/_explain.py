"""Why a call compiles: what differs between its arguments and those of a call that has compiled already.

    print(ek.inspect.explain((trainer.in_step, state, batch), (other.in_step, state, other_batch)))

`explain` compares two calls and runs neither; `watch` keeps the arguments of those calls of a function that have
compiled, and tells by the nearest of them why another one did. The trainer watches its own step.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.monitoring
import numpy as np

from equikd._compat import is_weak
from equikd.train._differences import Difference as Difference
from equikd.train._differences import Explanation as Explanation
from equikd.train._differences import differences, place_of
from equikd.train._differences import explain as explain

_LOG = logging.getLogger("equikd")
_TRACES = "/jax/core/compile/jaxpr_trace_duration"
_COMPILES = "/jax/core/compile/backend_compile_duration"


class _Counts:
    """How often JAX has traced and compiled in this process, by the name of the function."""

    def __init__(self) -> None:
        self.traces: dict[str, int] = {}
        self.compiles = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: Any) -> None:
        del duration_secs
        if event == _TRACES:
            name = str(details.get("fun_name"))
            self.traces[name] = self.traces.get(name, 0) + 1
        elif event == _COMPILES:
            self.compiles += 1


@functools.cache
def _counts() -> _Counts:
    return _Counts()


def trace_counts() -> dict[str, int]:
    """How often each jitted function has been traced in this process, since this was first asked.

    Example:
        >>> import jax
        >>> before = trace_counts()
        >>> double = jax.jit(lambda x: 2 * x)
        >>> _ = double(1.0), double(2.0), double(3)
        >>> trace_counts()["<lambda>"] - before.get("<lambda>", 0)
        2
    """
    return dict(_counts().traces)


def watch(function: Callable[..., Any], *, name: str | None = None) -> "Watched":
    """A jitted function that tells, through `logging`, why it compiles again.

    The first compilation is expected. Each further one is a warning of the logger `equikd`, with the differences to the
    nearest of the calls that have compiled. A call that compiles nothing costs two reads of a counter besides.

    Args:
        function: the result of `jax.jit` or `eqx.filter_jit`.
        name: what to call it; its own name by default.

    Returns:
        A function of the same arguments, whose `explanations` is the list of what was told.

    Example:
        >>> import equinox as eqx, jax.numpy as jnp
        >>> double = watch(eqx.filter_jit(lambda x: 2 * x))
        >>> _ = double(jnp.ones(3)), double(jnp.zeros(3)), double(jnp.ones(4))
        >>> [str(difference.kind) for explanation in double.explanations for difference in explanation]
        ['shape']
    """
    return Watched(function, name or getattr(function, "__qualname__", type(function).__name__))


class Watched:
    """A jitted function whose further compilations are explained; see `watch`.

    Attributes:
        explanations: what has been told, in order.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        functools.update_wrapper(self, function)
        self.explanations: list[Explanation] = []
        self._function, self._name, self._counts = function, name, _counts()
        self._compiled: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self._counts.compiles
        out = self._function(*args, **kwargs)
        if self._counts.compiles != before:
            self._note(_abstract((args, kwargs)))
        return out

    def _note(self, call: Any) -> None:
        found = [Explanation(tuple(_of_call(earlier, call))) for earlier in self._compiled]
        nearest = min(found, key=len, default=None)
        if nearest is not None and not nearest:
            return  # it has compiled something else, on the way
        self._compiled.append(call)
        if nearest is not None:
            self.explanations.append(nearest)
            _LOG.warning("%s compiles again\n%s", self._name, nearest)


def _of_call(before: Any, after: Any) -> Iterator[Difference]:
    yield from differences(before[0], after[0], ())
    yield from differences(before[1], after[1], ())


def _abstract(tree: Any) -> Any:
    """The same tree with shapes in place of its arrays, so that no array is kept."""

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return leaf
        sharding = place_of(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=is_weak(leaf))

    return jax.tree.map(spec, tree)
