"""Why a call compiles: what differs between its arguments and those of a call that has compiled already.

    print(ek.inspect.explain((trainer.in_step, state, batch), (other.in_step, state, other_batch)))

A jitted function compiles once for each structure of its arguments, for each shape, dtype and weak type of its arrays,
for each place of these, and for each value of what is static: functions, strings, sizes. `explain` compares two calls
in all of these, and runs neither; `watch` keeps the arguments of the calls of a function that have compiled, and tells
by the nearest of them why another one did.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.monitoring
import numpy as np

from equikd._compat import is_weak
from equikd.config._names import display_name
from equikd.config._values import Pin, is_node
from equikd.tree import Path, items, join, keys_of

_LOG = logging.getLogger("equikd")
_TRACES = "/jax/core/compile/jaxpr_trace_duration"
_COMPILES = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One way in which two calls differ.

    Attributes:
        path: where, as in overrides and key paths; empty for the arguments themselves.
        kind: "structure", "static value", "function", "shape", "dtype", "weak type", "sharding" or "argument".
        before: what the first call has there.
        after: what the second one has.
        fix: what would avoid the compilation.
    """

    path: str
    kind: str
    before: str
    after: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path or 'the arguments'}: {self.kind} {self.before} -> {self.after}\n    fix: {self.fix}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """All differences of two calls; empty, and false, where the second call compiles nothing.

    Attributes:
        differences: in the order of the arguments.
    """

    differences: tuple[Difference, ...]

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    def __str__(self) -> str:
        if not self.differences:
            return "no difference: the second call compiles nothing"
        return "\n".join(map(str, self.differences))


_FIXES = {
    "structure": "give both calls the same containers, classes and keys; hold a place with an array, not with None",
    "static value": "another static value is another program; a number may be an array, or a float of a config",
    "function": "make the function once, outside of what is called again: a new lambda or closure is never equal",
    "shape": "pad to one shape and mask the rest (`ek.data.pad`), or leave out the rows that do not fill a batch",
    "dtype": "convert where the data is made: `np.asarray(x, np.float32)`",
    "weak type": "make it strong: `jnp.asarray(x, jnp.float32)`; Python numbers, and jnp.asarray(1.0), are weak",
    "sharding": "put it where the first call had it: `jax.device_put(x, sharding)`",
    "argument": "call it with the same arguments, those with defaults included",
}


def explain(before: Any, after: Any) -> Explanation:
    """Why a call with the arguments `after` compiles, although one with `before` has compiled.

    Args:
        before: arguments of `eqx.filter_jit`: a tuple, a dict, or any pytree. What is no array is static.
        after: likewise.

    Returns:
        Each difference that makes another program, with its path and what avoids it. Other values of arrays, and of
        floats in configs, are none.

    Example:
        >>> import numpy as np
        >>> print(explain({"x": np.ones((8, 3), np.float32)}, {"x": np.ones((5, 3), np.float32)}))
        x: shape [8, 3] -> [5, 3]
            fix: pad to one shape and mask the rest (`ek.data.pad`), or leave out the rows that do not fill a batch
    """
    return Explanation(tuple(_differences(before, after, ())))


def _differences(a: Any, b: Any, at: Path) -> Iterator[Difference]:
    if a is b:
        return
    (parts_a, node_a), (parts_b, node_b) = _parts(a), _parts(b)
    if parts_a is None or parts_b is None:
        yield from _of_leaves(a, b, at)
    elif type(a) is not type(b):
        yield _difference(at, "structure", _kind(a), _kind(b))
    elif isinstance(a, Pin):
        if a != b:
            yield _difference(at, "static value", repr(a), repr(b))
    elif is_node(a) and a.__node_function__ != b.__node_function__:
        names = (display_name(one.__node_function__) for one in (a, b))
        yield _difference(at, "static value", *names)  # their arguments differ because they do
    else:
        yield from _of_nodes((a, parts_a, node_a), (b, parts_b, node_b), at)


def _of_nodes(one: Any, other: Any, at: Path) -> Iterator[Difference]:
    (a, parts_a, node_a), (b, parts_b, node_b) = one, other
    gone, new = (
        [key for key in these if key not in those] for these, those in ((parts_a, parts_b), (parts_b, parts_a))
    )
    kind = "argument" if not at and isinstance(a, tuple | dict) else "structure"
    if isinstance(a, list | tuple) and not hasattr(a, "_fields") and len(parts_a) != len(parts_b):
        yield _difference(at, kind, f"{len(parts_a)} items", f"{len(parts_b)} items")
    else:
        yield from (_difference((*at, key), kind, _kind(parts_a[key]), "nothing") for key in gone)
        yield from (_difference((*at, key), kind, "nothing", _kind(parts_b[key])) for key in new)
    static_a, static_b = ({k: v for k, v in items(x).items() if k not in p} for x, p in ((a, parts_a), (b, parts_b)))
    both = [key for key in static_a if key in static_b and key not in new and key not in gone]
    found = [d for key in both for d in _of_leaves(static_a[key], static_b[key], (*at, key))]
    yield from found
    if node_a != node_b and not (found or gone or new or len(parts_a) != len(parts_b)):
        yield _difference(at, "structure", _short(node_a), _short(node_b))
    for key in parts_a:
        if key in parts_b:
            yield from _differences(parts_a[key], parts_b[key], (*at, key))


def _parts(value: Any) -> tuple[dict[Any, Any] | None, Any]:
    """One level of a pytree by key, and its treedef; None for a leaf."""
    parts, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    if len(parts) == 1 and not parts[0][0]:
        return None, treedef
    return {keys_of(path)[0]: part for path, part in parts}, treedef


def _of_leaves(a: Any, b: Any, at: Path) -> Iterator[Difference]:
    if _is_array(a) and _is_array(b):
        yield from _of_arrays(a, b, at)
    elif _is_array(a) or _is_array(b) or a is None or b is None or not _same_kind(a, b):
        if not (a is None and b is None):
            yield _difference(at, "structure", _kind(a), _kind(b))
    elif not _equal(a, b):
        before, after = _spelt(a), _spelt(b)
        if before == after:  # of functions, which are equal if they are one
            yield _difference(at, "function", before, f"another {after}")
        else:
            yield _difference(at, "static value", before, after)


def _of_arrays(a: Any, b: Any, at: Path) -> Iterator[Difference]:
    keys = [jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key) for one in (a, b)]
    if a.shape != b.shape and keys[0] == keys[1]:  # a key of the old kind has an axis
        yield _difference(at, "shape", str(list(a.shape)), str(list(b.shape)))
    dtypes = [jax.dtypes.canonicalize_dtype(one.dtype, allow_extended_dtype=True) for one in (a, b)]
    if dtypes[0] != dtypes[1]:
        yield _difference(at, "dtype", *map(str, dtypes))
    elif is_weak(a) != is_weak(b):
        yield _difference(at, "weak type", *(f"{'weak' if is_weak(one) else 'strong'} {one.dtype}" for one in (a, b)))
    places = [_place(one) for one in (a, b)]
    if None not in places and places[0] != places[1] and a.ndim == b.ndim:
        yield _difference(at, "sharding", *map(str, places))


def _place(array: Any) -> Any:
    """The sharding of an array that was put somewhere on purpose; others go where the rest is."""
    return array.sharding if isinstance(array, jax.Array) and getattr(array, "committed", False) else None


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _same_kind(a: Any, b: Any) -> bool:
    return type(a) is type(b) or (callable(a) and callable(b))


def _equal(a: Any, b: Any) -> bool:
    """As JAX compares what is static, but that nan equals nan, and -0.0 is not 0.0."""
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def _difference(at: Path, kind: str, before: str, after: str) -> Difference:
    return Difference(join(at), kind, before, after, _FIXES[kind])


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if _is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__qualname__}"


def _spelt(value: Any) -> str:
    return display_name(value) if hasattr(value, "__qualname__") else _short(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


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
    yield from _differences(before[0], after[0], ())
    yield from _differences(before[1], after[1], ())


def _abstract(tree: Any) -> Any:
    """The same tree with shapes in place of its arrays, so that no array is kept."""

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return leaf
        sharding = _place(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=is_weak(leaf))

    return jax.tree.map(spec, tree)
