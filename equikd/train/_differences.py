"""How two calls differ in what makes another program: behind `ek.inspect.explain` and the trainer's reports.

A jitted function compiles once for each structure of its arguments, for each shape, dtype and weak type of its arrays,
for each place of these, and for each value of what is static: functions, strings, sizes.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from equikd._compat import is_weak
from equikd.config._names import display_name
from equikd.config._values import Pin, is_node
from equikd.tree import Path, items, join, keys_of


@dataclasses.dataclass(frozen=True)
class Difference:
    """One way in which two calls differ.

    Attributes:
        path: where, as in overrides and key paths; empty for the arguments themselves.
        kind: "structure", "static value", "function", "shape", "dtype", "weak type", "sharding" or "argument"; of a
            step also "jax setting", "device", "feeding" or "steps per call".
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
    "jax setting": "set it once, before anything runs; JAX compiles for each value of it",
    "device": "put the model where the first one was; each device has a program of its own",
    "feeding": "feed all steps in one way; rows that lie on the device have a program of their own",
    "steps per call": "keep `steps_per_call`; each value has a program of its own",
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
    return Explanation(tuple(differences(before, after, ())))


def differences(a: Any, b: Any, at: Path) -> Iterator[Difference]:
    """Each way in which two trees differ, the paths beginning with `at`."""
    if a is b:
        return
    (parts_a, node_a), (parts_b, node_b) = _parts(a), _parts(b)
    if parts_a is None or parts_b is None:
        yield from _of_leaves(a, b, at)
    elif type(a) is not type(b):
        yield difference(at, "structure", _kind(a), _kind(b))
    elif isinstance(a, Pin):
        if a != b:
            yield difference(at, "static value", repr(a), repr(b))
    elif is_node(a) and a.__node_function__ != b.__node_function__:
        names = (display_name(one.__node_function__) for one in (a, b))
        yield difference(at, "static value", *names)  # their arguments differ because they do
    else:
        yield from _of_nodes((a, parts_a, node_a), (b, parts_b, node_b), at)


def _of_nodes(one: Any, other: Any, at: Path) -> Iterator[Difference]:
    (a, parts_a, node_a), (b, parts_b, node_b) = one, other
    gone, new = (
        [key for key in these if key not in those] for these, those in ((parts_a, parts_b), (parts_b, parts_a))
    )
    kind = "argument" if not at and isinstance(a, tuple | dict) else "structure"
    if isinstance(a, list | tuple) and not hasattr(a, "_fields") and len(parts_a) != len(parts_b):
        yield difference(at, kind, f"{len(parts_a)} items", f"{len(parts_b)} items")
    else:
        yield from (difference((*at, key), kind, _kind(parts_a[key]), "nothing") for key in gone)
        yield from (difference((*at, key), kind, "nothing", _kind(parts_b[key])) for key in new)
    static_a, static_b = ({k: v for k, v in items(x).items() if k not in p} for x, p in ((a, parts_a), (b, parts_b)))
    both = [key for key in static_a if key in static_b and key not in new and key not in gone]
    found = [d for key in both for d in _of_leaves(static_a[key], static_b[key], (*at, key))]
    for key in [*static_a, *(key for key in static_b if key not in static_a)]:
        if key not in both and key not in new and key not in gone:
            texts = [_spelt(static[key]) if key in static else "nothing" for static in (static_a, static_b)]
            found.append(difference((*at, key), "static value", *texts))
    yield from found
    if node_a != node_b and not (found or gone or new or len(parts_a) != len(parts_b)):
        yield difference(at, "structure", _short(node_a), _short(node_b))
    for key in parts_a:
        if key in parts_b:
            yield from differences(parts_a[key], parts_b[key], (*at, key))


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
            yield difference(at, "structure", _kind(a), _kind(b))
    elif not _equal(a, b):
        before, after = _spelt(a), _spelt(b)
        if before == after:  # of functions, which are equal if they are one
            yield difference(at, "function", before, f"another {after}")
        else:
            yield difference(at, "static value", before, after)


def _of_arrays(a: Any, b: Any, at: Path) -> Iterator[Difference]:
    keys = [jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key) for one in (a, b)]
    if a.shape != b.shape and keys[0] == keys[1]:  # a key of the old kind has an axis
        yield difference(at, "shape", str(list(a.shape)), str(list(b.shape)))
    dtypes = [jax.dtypes.canonicalize_dtype(one.dtype, allow_extended_dtype=True) for one in (a, b)]
    if dtypes[0] != dtypes[1]:
        yield difference(at, "dtype", *map(str, dtypes))
    elif is_weak(a) != is_weak(b):
        yield difference(at, "weak type", *(f"{'weak' if is_weak(one) else 'strong'} {one.dtype}" for one in (a, b)))
    places = [place_of(one) for one in (a, b)]
    if None not in places and places[0] != places[1] and a.ndim == b.ndim:
        yield difference(at, "sharding", *map(str, places))


def place_of(array: Any) -> Any:
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


def difference(at: Path, kind: str, before: str, after: str) -> Difference:
    """One difference, with what avoids it."""
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
