"""Annotated functions: every feature of the annotation language, alone and nested, for properties over all of them.

`CORPUS` maps a name to a function; a function's body is trivial (it returns an argument, or None), so that a test is
about its annotations. `EXAMPLES` gives for each one call that fits, and calls that do not.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, TypedDict, TypeVar, Union

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Complex, Float16, Float32, Int8, Int32, Key, Real, UInt8

from equikd.typing import (
    Array,
    ArrayLike,
    Bool,
    Float,
    Inexact,
    Int,
    Integer,
    Num,
    PRNGKeyArray,
    PyTree,
    Scalar,
    Shaped,
    UInt,
)

CORPUS: dict[str, Any] = {}
EXAMPLES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
"""Name -> (arguments that fit, [changes of these with which they do not])."""


def entry(good: dict[str, Any], *bad: dict[str, Any]) -> Any:
    """Add a function, with a call that fits and changes that break it."""

    def add(function: Any) -> Any:
        CORPUS[function.__name__] = function
        EXAMPLES[function.__name__] = (good, list(bad))
        return function

    return add


def f(*shape: int) -> jax.Array:
    return jnp.ones(shape)


def i(*shape: int) -> jax.Array:
    return jnp.ones(shape, jnp.int32)


def m(*shape: int) -> jax.Array:
    return jnp.ones(shape, bool)


def n(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


KEY = jax.random.key(0)


class Batch(TypedDict):
    x: Float[Array, "b d"]
    y: Int[Array, " b"]


class Loose(TypedDict):
    x: Float[Array, "b d"]
    mask: NotRequired[Bool[Array, " b"]]


class Pair(NamedTuple):
    left: Float[Array, "a b"]
    right: Float[Array, " b"]


class Named(NamedTuple):
    name: str
    values: Float[Array, " b"]


@dataclasses.dataclass
class Record:
    mean: Float[Array, " d"]
    count: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    w: Float[Array, "i o"]
    rest: list[Float[Array, " o"]]


class Linear(eqx.Module):
    weight: Float[Array, "o i"]
    bias: Float[Array, " o"] | None


class Net(eqx.Module):
    layers: list[Linear]
    scale: Float[Array, ""]


class Sized(eqx.Module):
    size: int = eqx.field(static=True)
    w: Float[Array, "{self.size} k"]


@dataclasses.dataclass
class Link:
    value: Float[Array, " v"]
    following: Optional["Link"] = None


Vector = TypeVar("Vector", bound=Float[Array, " n"])


# Flat arrays.


@entry({"x": f(2, 3)}, {"x": f(2)}, {"x": i(2, 3)}, {"x": "text"}, {"x": n(2, 3)})
def named(x: Float[Array, "b d"]) -> Float[Array, "b d"]:
    return x


@entry({"x": f(2, 3), "w": f(3, 4)}, {"w": f(4, 3)}, {"w": f(3)}, {"x": f(2, 4)})
def shared(x: Float[Array, "b d"], w: Float[Array, "d n"]) -> Float[Array, "b n"]:
    return x @ w


@entry({"x": f(3, 3)}, {"x": f(2, 3)})
def twice_in_one(x: Float[Array, "n n"]) -> None: ...


@entry({"x": f(3, 4)}, {"x": f(4, 4)}, {"x": f(3, 5)})
def fixed(x: Float[Array, "3 4"]) -> None: ...


@entry({"x": f(3, 4)}, {"x": f(4, 4)})
def fixed_with_names(x: Float[Array, "rows=3 cols=4"]) -> None: ...


@entry({"x": f(2, 3, 4), "y": f(2, 3)}, {"y": f(3, 2)}, {"y": f(2)})
def variadic(x: Float[Array, "*b d"], y: Float[Array, "*b"]) -> Float[Array, "*b"]:
    return y


@entry({"x": f(2, 5, 6, 3)}, {"x": f(2)}, {"x": f(2, 5, 6, 4)})
def variadic_middle(x: Float[Array, "b *n 3"]) -> None: ...


@entry({"x": f(2, 9, 4), "y": f(4)}, {"x": f(4)}, {"y": f(5)})
def ellipsis_axes(x: Float[Array, "... _ d"], y: Float[Array, " d"]) -> None: ...


@entry({"x": f(5, 9, 3), "y": f(3)}, {"x": f(5, 9, 4)}, {"x": f(9, 3)})
def anonymous(x: Float[Array, "_ _foo d"], y: Float[Array, " d"]) -> None: ...


@entry({"x": f(4, 3), "y": f(1, 3)}, {"y": f(2, 3)}, {"y": f(4, 1)})
def broadcast_one(x: Float[Array, "a b"], y: Float[Array, "#a b"]) -> None: ...


@entry({"x": f(1, 3), "y": f(4, 1)}, {"y": f(4, 2)}, {"x": f(2, 3)})
def broadcast_many(x: Float[Array, "*#s"], y: Float[Array, "*#s"]) -> None: ...


@entry({"x": f(4)}, {"x": f(3)})
def broadcast_fixed(x: Float[Array, "#4"]) -> None: ...


@entry({"x": f(3), "y": f(6)}, {"y": f(7)}, {"y": f(3)})
def symbolic(x: Float[Array, " h"], y: Float[Array, " 2*h"]) -> None: ...


@entry({"y": f(10)}, {"y": f(7)})
def symbolic_unbound(y: Float[Array, " 2*h"]) -> None: ...


@entry({"y": f(10), "x": f(5)}, {"x": f(4)}, {"y": f(9)})
def symbolic_before(y: Float[Array, " 2*h"], x: Float[Array, " h"]) -> None: ...


@entry({"x": f(3, 4), "y": f(12), "z": f(4)}, {"y": f(13)}, {"z": f(5)})
def symbolic_several(x: Float[Array, "a b"], y: Float[Array, " a*b"], z: Float[Array, " max(a,b)"]) -> None: ...


@entry({"x": f(5), "y": f(4), "z": f(2)}, {"y": f(5)}, {"z": f(3)})
def symbolic_operators(x: Float[Array, " n"], y: Float[Array, " n-1"], z: Float[Array, " n//2"]) -> None: ...


@entry({"x": f(4), "size": 4}, {"x": f(5)}, {"size": 5})
def argument_axis(x: Float[Array, " {size}"], size: int) -> None: ...


@entry({"x": f(4)}, {"x": f(5)})
def argument_default(x: Float[Array, " {size}"], size: int = 4) -> None: ...


@entry({"x": f(8), "heads": 2, "h": f(4)}, {"h": f(5)}, {"heads": 3})
def argument_in_expression(x: Float[Array, " {heads}*h"], heads: int, h: Float[Array, " h"]) -> None: ...


@entry({"x": f()}, {"x": f(1)}, {"x": 1.0})
def zero_dim(x: Float[Array, ""]) -> Float[Array, ""]:
    return x


@entry({"x": i()}, {"x": i(1)}, {"x": 3})
def scalar(x: Scalar) -> None: ...


# Dtypes.


@entry({"x": i(2), "y": i(3)}, {"x": f(2)}, {"x": m(2)}, {"y": f(3)})
def ints(x: Int[Array, " a"], y: Integer[Array, " b"]) -> None: ...


@entry({"x": jnp.ones(2, jnp.uint8)}, {"x": i(2)}, {"x": f(2)})
def unsigned(x: UInt[Array, " a"]) -> None: ...


@entry({"x": m(2)}, {"x": i(2)}, {"x": f(2)})
def bools(x: Bool[Array, " a"]) -> None: ...


@entry({"x": f(2), "y": jnp.ones(2, jnp.complex64)}, {"y": f(2)}, {"x": i(2)})
def complexes(x: Inexact[Array, " a"], y: Complex[Array, " a"]) -> None: ...


@entry({"x": i(2), "y": f(2)}, {"x": m(2)}, {"y": jnp.ones(2, jnp.complex64)})
def numbers(x: Num[Array, " a"], y: Real[Array, " a"]) -> None: ...


@entry({"x": f(2), "y": jnp.ones(2, jnp.float16)}, {"x": jnp.ones(2, jnp.float16)}, {"y": f(2)})
def exact_floats(x: Float32[Array, " a"], y: Float16[Array, " a"]) -> None: ...


@entry({"x": i(2), "y": jnp.ones(3, jnp.uint8)}, {"x": jnp.ones(2, jnp.int8)}, {"y": jnp.ones(3, jnp.int8)})
def exact_ints(x: Int32[Array, " a"], y: UInt8[Array, " b"] | Int8[Array, "3 3"]) -> None: ...


@entry({"x": jnp.ones(2, jnp.bfloat16)}, {"x": i(2)})
def bfloat(x: Float[Array, " a"]) -> None: ...


@entry({"x": m(2, 3), "y": f(3)}, {"y": f(2)}, {"x": m(2)})
def any_dtype(x: Shaped[Array, "a b"], y: Shaped[Array, " b"]) -> None: ...


@entry({"key": KEY}, {"key": jax.random.split(KEY)}, {"key": f(2)}, {"key": 0})
def prng_key(key: PRNGKeyArray) -> PRNGKeyArray:
    return key


@entry({"keys": jax.random.split(KEY, 3), "x": f(3)}, {"x": f(2)}, {"keys": f(3)})
def prng_keys(keys: Key[Array, " n"], x: Float[Array, " n"]) -> None: ...


# Array types.


@entry({"x": n(2, 3)}, {"x": f(2, 3)}, {"x": n(2)}, {"x": np.ones((2, 3), np.int32)})
def numpy_arrays(x: Float[np.ndarray, "a b"]) -> None: ...


@entry({"x": n(2, 3), "y": f(3)}, {"y": f(2)}, {"x": [1.0]})
def any_array(x: Float[Any, "a b"], y: Shaped[Any, " b"]) -> None: ...


@entry({"x": 1.0, "y": n(2)}, {"x": "1.0"}, {"y": i(2)}, {"x": i(2)})
def array_like(x: Float[ArrayLike, "..."], y: Float[ArrayLike, " a"]) -> None: ...


@entry({"x": f(2, 3), "y": n(3)}, {"y": n(2)}, {"x": [1]})
def jax_or_numpy(x: Float[Array | np.ndarray, "a b"], y: Float[Array | np.ndarray, " b"]) -> None: ...


@entry({"x": f(2, 3, 4)}, {"x": f(2, 3)}, {"x": f(3, 3, 4)})
def extended(x: Float[Float[Array, "3 4"], "2"]) -> None: ...


@entry({"x": f(2), "y": f(2)}, {"y": f(2, 2)}, {"x": i(2)})
def type_variable(x: Vector, y: Vector) -> Vector:
    return x


@entry({"x": f(2)}, {"x": f(2, 2)})
def annotated(x: Annotated[Float[Array, " n"], "a note"]) -> None: ...


@entry({"x": f(2), "y": f(2)}, {"y": f(3)})
def string_annotations(x: "Float[Array, ' n']", y: "list[Float[Array, ' n']] | Float[Array, ' n']") -> "None": ...


# Optional and unions.


@entry({"x": f(2), "y": None}, {"y": f(3)}, {"y": "x"}, {"x": None})
def optional(x: Float[Array, " a"], y: Float[Array, " a"] | None = None) -> Optional[Float[Array, " a"]]:  # noqa: UP045  # the spelling is the case
    return y


@entry({"x": f(2, 3), "y": f(3)}, {"y": f(2)}, {"x": f(2, 3, 4)})
def union_of_ranks(x: Float[Array, "a b"] | Float[Array, " b"], y: Float[Array, " b"]) -> None: ...


@entry({"x": i(2), "y": f(2)}, {"x": m(2)}, {"y": f(3)})
def union_of_dtypes(x: Union[Float[Array, " a"], Int[Array, " a"]], y: Float[Array, " a"]) -> None: ...  # noqa: UP007


@entry({"x": f(2, 3), "y": f(3, 5)}, {"y": f(2, 3, 1)}, {"y": f(4, 4)})
def union_that_backtracks(x: Float[Array, "a b"] | Float[Array, "b a"], y: Float[Array, "a c"]) -> None: ...


@entry({"x": 3, "y": f(2)}, {"x": "3"}, {"x": f(1)}, {"y": i(2)})
def union_with_plain(x: int | Int[Array, ""], y: Float[Array, " a"] | list[Float[Array, " a"]]) -> None: ...


@entry({"x": [f(2), None]}, {"x": [f(2), f(3)]}, {"x": [f(2), i(2)]})
def list_of_optional(x: list[Float[Array, " a"] | None]) -> None: ...


# Containers.


@entry({"x": [f(2), f(2)]}, {"x": [f(2), f(3)]}, {"x": (f(2),)}, {"x": [f(2), None]})
def lists(x: list[Float[Array, " a"]]) -> None: ...


@entry({"x": [[f(2)], [f(2), f(2)]], "y": f(2)}, {"x": [[f(2)], [f(2), f(3)]]}, {"y": f(3)})
def nested_lists(x: list[list[Float[Array, " a"]]], y: Float[Array, " a"]) -> None: ...


@entry({"x": (f(2), i(3))}, {"x": (f(2), f(3))}, {"x": (f(2),)}, {"x": [f(2), i(3)]})
def fixed_tuple(x: tuple[Float[Array, " a"], Int[Array, " b"]]) -> tuple[Float[Array, " a"], Int[Array, " b"]]:
    return x


@entry({"x": (f(2), f(2))}, {"x": (f(2), f(3))}, {"x": (f(2), "2")})
def variadic_tuple(x: tuple[Float[Array, " a"], ...]) -> None: ...


@entry({"x": [f(2)]}, {"x": [f(2), f(2, 2)]}, {"x": f(2)})
def sequences(x: Sequence[Float[Array, " a"]]) -> None: ...


@entry({"x": {"a": f(2), "b": f(2)}}, {"x": {"a": f(2), "b": f(3)}}, {"x": {1: f(2)}}, {"x": [f(2)]})
def dicts(x: dict[str, Float[Array, " a"]]) -> None: ...


@entry({"x": {"a": [f(2)]}}, {"x": {"a": [f(2), i(2)]}})
def mappings(x: Mapping[str, list[Float[Array, " a"]]]) -> None: ...


@entry({"x": {"a": (f(2), [f(3)])}, "y": f(3)}, {"y": f(2)}, {"x": {"a": (f(2), [f(3), f(4)])}})
def deep(x: dict[str, tuple[Float[Array, " a"], list[Float[Array, " b"]]]], y: Float[Array, " b"]) -> None: ...


BATCH = {"x": f(2, 3), "y": i(2)}


@entry(
    {"batch": BATCH},
    {"batch": BATCH | {"y": i(3)}},
    {"batch": {"x": f(2, 3)}},
    {"batch": BATCH | {"z": i(2)}},
    {"batch": BATCH | {"x": i(2, 3)}},
)
def typed_dict(batch: Batch) -> Float[Array, "b d"]:
    return batch["x"]


@entry({"batch": {"x": f(2, 3)}, "y": f(2)}, {"y": f(3)}, {"batch": {"x": f(2, 3), "mask": m(3)}})
def typed_dict_optional_key(batch: Loose, y: Float[Array, " b"]) -> None: ...


@entry({"pair": Pair(f(2, 3), f(3)), "x": f(2)}, {"pair": Pair(f(2, 3), f(2))}, {"x": f(3)}, {"pair": (f(2, 3), f(3))})
def named_tuple(pair: Pair, x: Float[Array, " a"]) -> Pair:
    return pair


@entry({"x": Named("a", f(2))}, {"x": Named(1, f(2))}, {"x": Named("a", f(2, 2))})
def named_tuple_plain(x: Named) -> None: ...


@entry(
    {"record": Record(f(2), i())}, {"record": Record(f(2, 2), i())}, {"record": Record(f(2), i(1))}, {"record": f(2)}
)
def dataclass(record: Record) -> None: ...


@entry({"x": Frozen(f(2, 3), [f(3), f(3)])}, {"x": Frozen(f(2, 3), [f(3), f(2)])})
def frozen_dataclass(x: Frozen) -> None: ...


@entry({"layer": Linear(f(3, 2), f(3)), "x": f(2)}, {"layer": Linear(f(3, 2), f(2))}, {"layer": Linear(f(3), None)})
def module(layer: Linear, x: Float[Array, " i"]) -> None: ...


NET = Net([Linear(f(3, 2), f(3)), Linear(f(5, 3), None)], f())


@entry({"net": NET}, {"net": Net([*NET.layers, Linear(f(2, 2), f(3))], f())}, {"net": Net(NET.layers, f(1))})
def nested_module(net: Net) -> None: ...


@entry({"x": Sized(2, f(2, 3))}, {"x": Sized(3, f(2, 3))})
def module_with_own_size(x: Sized) -> None: ...


@entry({"x": [Linear(f(3, 2), f(3)), Linear(f(5, 3), f(5))]}, {"x": [Linear(f(3, 2), f(3)), Linear(f(5, 3), f(3))]})
def list_of_modules(x: list[Linear]) -> None: ...


@entry({"x": Link(f(2), Link(f(3)))}, {"x": Link(f(2), Link(f(3, 3)))}, {"x": Link(f(2), "end")})
def class_that_holds_itself(x: Link) -> None: ...


@entry({"x": {"p": (f(2), f(2)), "q": [f(2)]}}, {"x": {"p": (f(2), f(3))}}, {"x": [f(2), i(2)]}, {"x": [f(2), "a"]})
def pytree(x: PyTree[Float[Array, " a"]]) -> None: ...


@entry({"x": [f(2), f(3)], "y": [f(2), f(3)]}, {"y": [f(3), f(2)]}, {"y": (f(2), f(3))}, {"y": [f(2)]})
def pytree_leaf_axes(x: PyTree[Float[Array, "?n"], " T"], y: PyTree[Float[Array, "?n"], " T"]) -> None: ...


@entry({"x": {"a": 1}, "y": {"a": f(2)}}, {"y": {"b": f(2)}}, {"x": {"a": "1"}})
def pytree_structure(x: PyTree[int, " T"], y: PyTree[Float[Array, " a"], " T"]) -> None: ...


@entry({"x": (1, 2), "y": [3], "z": [(4, 5)]}, {"z": [(4, 5), (6, 7)]}, {"z": ([4], [5])})
def pytree_composite(x: PyTree[int, " T"], y: PyTree[int, " S"], z: PyTree[int, "S T"]) -> None: ...


@entry({"x": [1, f(2)]}, {"x": [1, f(2, 2)]}, {"x": ["a"]})
def pytree_of_union(x: PyTree[int | Float[Array, " a"]]) -> None: ...


# Plain values, and kinds of parameters.


@entry({"x": f(2), "by": 0.5}, {"by": "fast"}, {"by": None}, {"by": f(2)}, {"by": i()})
def plain_float(x: Float[Array, " n"], by: float) -> Float[Array, " n"]:
    return x * by


@entry({"k": 3, "mode": "a", "flag": True}, {"k": 0.5}, {"mode": "c"}, {"flag": 1})
def plain_values(k: int, mode: Literal["a", "b"], flag: bool) -> None: ...


@entry({"by": None, "names": ["a"]}, {"by": "x"}, {"names": [1]})
def plain_containers(by: float | None, names: list[str]) -> None: ...


@entry({"x": f(2), "y": f(2)}, {"y": f(3)})
def keyword_only(x: Float[Array, " a"], *, y: Float[Array, " a"]) -> None: ...


@entry({"x": f(2), "extra": f(2)}, {"extra": f(3)})
def keywords(x: Float[Array, " a"], **rest: Float[Array, " a"]) -> None: ...
