"""What is found inside: collections of every kind, generic classes, and things that only look like arrays."""

import collections
import dataclasses
import types
import typing
from collections.abc import (
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Reversible,
    Sequence,
    ValuesView,
)
from collections.abc import Set as AbstractSet
from typing import Any, Generic, NamedTuple, Required, TypedDict, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equikd.typing import Array, Float, PyTree, Shaped, ShapeError, check, typechecked

B = Float[Array, " b"]
T = TypeVar("T")
S = TypeVar("S")


def f(*sizes):
    return jnp.ones(sizes)


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (Iterable[B], [f(2), f(2)], [f(2), f(3)]),
        (Iterable[B], (f(2),), [1]),
        (Iterable[B], {}.values(), {1: "a"}.values()),
        (Collection[B], [], [f(2), f(2, 2)]),
        (Collection[B], collections.deque([f(2)]), {1: f(2)}),
        (Reversible[B], [f(2)], ["a"]),
        (typing.Container[B], [f(2)], [1]),
        (ValuesView[B], {1: f(2), 2: f(2)}.values(), {1: f(2), 2: f(3)}.values()),
        (ItemsView[str, B], {"a": f(2)}.items(), {1: f(2)}.items()),
        (ItemsView[str, B], {}.items(), {"a": f(2), "b": f(3)}.items()),
        (AbstractSet[B], set(), {1}),
        (set[B], set(), {1}),
        (frozenset[B | None], frozenset([None]), frozenset([None, 1])),
        (KeysView[B | int], {1: 0}.keys(), {"a": 0}.keys()),
        (collections.ChainMap[str, B], collections.ChainMap({"a": f(2)}), collections.ChainMap({"a": 1})),
        (types.MappingProxyType[str, B], types.MappingProxyType({"a": f(2)}), types.MappingProxyType({"a": 1})),
        (Mapping[str, B], {}, {"a": f(2, 2)}),
        (type[B], B, int),
        (type[B] | None, None, 3),
    ],
)
def test_items_are_checked(annotation, good, bad):
    assert check(good, annotation) is good
    with pytest.raises(ShapeError):
        check(bad, annotation)


def test_items_share_the_names_of_the_call():
    @typechecked
    def g(x: B, xs: Iterable[B], named: ValuesView[B]) -> None: ...

    g(f(2), [f(2)], {1: f(2)}.values())
    for args in ((f(2), [f(3)], {}.values()), (f(2), [], {1: f(3)}.values())):
        with pytest.raises(ShapeError, match="axis 'b' has two sizes"):
            g(*args)


def test_an_iterator_is_not_used_up():
    @typechecked
    def g(xs: Iterable[B], ys: Iterator[B]) -> int:
        return len(list(xs)) + len(list(ys))

    assert g(iter([f(2), f(3)]), iter([f(2)])) == 3
    assert jax.make_jaxpr(lambda x: g(x, iter(())))(f(2, 3)).jaxpr is not None
    assert len(jax.make_jaxpr(lambda x: check(x, Iterable[B]))(f(2, 3)).eqns) == 0  # rows are not computed


# Generic classes.


@dataclasses.dataclass
class Box(Generic[T]):
    x: T
    more: list[T] = dataclasses.field(default_factory=list)
    tree: "PyTree[T] | None" = None


@dataclasses.dataclass
class Many(Generic[T]):
    d: typing.Dict[str, tuple[T, ...]]  # noqa: UP006
    a: typing.Annotated[T, "a note"]
    o: typing.Optional[typing.Union[T, typing.List[T]]]  # noqa: UP006, UP007, UP045
    c: typing.Callable[[T], T] | None = None


@dataclasses.dataclass
class Two(Box[S], Generic[T, S]):
    y: T | None = None


@dataclasses.dataclass
class Fixed(Box[Float[Array, "b 3"]]):
    y: Float[Array, " b"] | None = None


class Module(eqx.Module, Generic[T]):
    x: T


class Record(TypedDict, Generic[T]):
    x: Required[T]


class Named(NamedTuple, Generic[T]):
    x: T


@dataclasses.dataclass
class Tree(Generic[T]):
    x: T
    below: "list[Tree[T]]"


B3 = Float[Array, "b 3"]


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (Box[B3], Box(f(2, 3)), Box(f(2))),
        (Box[B3], Box(f(2, 3), [f(2, 3)]), Box(f(2, 3), [f(3, 3)])),
        (Box[B3], Box(f(2, 3), [], {"a": f(2, 3)}), Box(f(2, 3), [], {"a": f(3, 3)})),
        (Box[B3], Box(f(2, 3)), Box(2)),
        (Box[int | B3], Box(2), Box("2")),
        (Many[B3], Many({"a": (f(2, 3),)}, f(2, 3), f(2, 3)), Many({"a": (f(2, 2),)}, f(2, 3), f(2, 3))),
        (Many[B3], Many({}, f(2, 3), f(2, 3)), Many({}, f(2, 2), f(2, 3))),
        (Many[B3], Many({}, f(2, 3), f(2, 3)), Many({}, f(2, 3), f(2, 2))),
        (Two[B, B3], Two(f(2, 3), y=f(2)), Two(f(2, 3), y=f(3))),
        (Two[int, B3], Two(f(2, 3), y=3), Two(f(3), y=3)),
        (Fixed, Fixed(f(2, 3), y=f(2)), Fixed(f(2, 3), y=f(3))),
        (Fixed, Fixed(f(2, 3)), Fixed(f(2, 4))),
        (list[Module[B3]], [Module(f(2, 3)), Module(f(4, 3))], [Module(f(2))]),
        (Record[B3], {"x": f(2, 3)}, {"x": f(2)}),
        (Record[B3], {"x": f(2, 3)}, {}),
        (Named[B3], Named(f(2, 3)), Named(f(2))),
        (Tree[B3], Tree(f(2, 3), [Tree(f(5, 3), [])]), Tree(f(2, 3), [Tree(f(2), [])])),
        (Box[Box[B3]], Box(Box(f(2, 3))), Box(Box(f(2)))),
        (Box[list[B3]], Box([f(2, 3)]), Box([f(2)])),
    ],
)
def test_generic_classes(annotation, good, bad):
    assert check(good, annotation) is good
    with pytest.raises(ShapeError):
        check(bad, annotation)


def test_a_generic_class_without_arguments_admits_anything():
    assert check(Box("text"), Box).x == "text"
    assert check({"x": 1}, Record)["x"] == 1


# Things that look like arrays.


class Raises:
    dtype = np.dtype("float32")

    @property
    def shape(self):
        raise ZeroDivisionError


class NoTuple:
    shape, dtype = 3, np.dtype("float32")


@pytest.mark.parametrize("value", [Raises(), NoTuple(), np.ndarray, float])
def test_what_has_no_shape_is_no_array(value):
    @typechecked
    def g(x: Float[Array, " n"] | Shaped[Any, "n n"], other: object = None) -> None: ...

    with pytest.raises(ShapeError, match="x is"):
        g(value)
    with pytest.raises(ShapeError):
        g(f(2, 3), value)
    with pytest.raises(ShapeError):
        check([value], list[Shaped[Any, "..."]])
    with pytest.raises(ShapeError):
        check(value, Float[Array, " n"])


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (list[int], lambda one: [1] * 9 + [one] + [1] * 9, "a"),
        (tuple[int, ...], lambda one: (*[1] * 9, one), "a"),
        (tuple[int, str], lambda one: (one, "x"), "a"),
        (dict[str, tuple[float, ...]], lambda one: {"a": (1.0,), "b": (0.5, one, 1.0)}, "a"),
        (dict[int, str], lambda one: {1: "x", one: "y"}, "a"),
        (set[int], lambda one: {*range(20), one}, "a"),
        (Sequence[int | None], lambda one: [None] * 9 + [one], "a"),
        (list[list[int]] | None, lambda one: [[1], [2, one]], "a"),
    ],
    ids=map(str, range(8)),
)
def test_one_bad_item_without_arrays_is_always_found(annotation, good, bad):
    @typechecked
    def take(x: annotation) -> None: ...

    sound = 7.0 if annotation == dict[str, tuple[float, ...]] else 7
    for _ in range(20):
        take(good(sound))
        with pytest.raises(ShapeError, match="x is"):
            take(good(bad))
