"""Annotations as data: the axes of a shape, the dtypes of a family, and the trees of containers."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NotRequired, TypedDict

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import AbstractDtype, AnnotationError

from equikd.typing import Array, Float, Int, PRNGKeyArray, PyTree, Shaped
from equikd.typing._annotation import array_rule, axes
from equikd.typing._nodes import (
    ArrayNode,
    DataclassNode,
    PlainNode,
    SequenceNode,
    UnionNode,
    holds_arrays,
    node_of,
    walk,
)


@pytest.mark.parametrize(
    ("word", "kind", "attributes"),
    [
        ("b", "named", {"name": "b"}),
        ("#b", "named", {"name": "b", "broadcast": True}),
        ("?b", "named", {"name": "b", "tree": True}),
        ("#?b", "named", {"name": "b", "tree": True, "broadcast": True}),
        ("*b", "variadic", {"name": "b"}),
        ("*#b", "variadic", {"name": "b", "broadcast": True}),
        ("#*b", "variadic", {"name": "b", "broadcast": True}),
        ("_", "anonymous", {"name": ""}),
        ("_time", "anonymous", {"name": ""}),
        ("...", "ellipsis", {"name": ""}),
        ("*_", "ellipsis", {"name": ""}),
        ("4", "fixed", {"size": 4}),
        ("rows=4", "fixed", {"size": 4}),
        ("#4", "fixed", {"size": 4, "broadcast": True}),
        ("#2*h", "symbolic", {"broadcast": True}),
        ("{self.n}", "symbolic", {}),
    ],
)
def test_axes(word, kind, attributes):
    (axis,) = axes(word)
    assert (axis.kind, axis.text) == (kind, word)
    assert {name: getattr(axis, name) for name in attributes} == attributes
    assert (axis.expression is not None) == (kind == "symbolic")


WORDS = st.sampled_from(["a", "b", "3", "#a", "_", "*s", "...", "*#s", "rows=2", "a+b"])


@given(st.lists(WORDS, max_size=4), st.lists(st.integers(1, 3), max_size=5))
def test_rank_and_alignment_are_jaxtypings(words, shape):
    try:
        annotation = Shaped[np.ndarray, " ".join(words)]
    except ValueError:  # two groups
        return
    rule = array_rule(annotation)
    assert rule is not None
    free = Shaped[np.ndarray, " ".join("..." if axis.many else "_" for axis in rule.axes)]
    assert rule.admits_rank(len(shape)) == isinstance(np.ones(shape), free)
    if rule.admits_rank(len(shape)):
        aligned = [size for _, positions in rule.align(len(shape)) for size in shape[positions]]
        assert aligned == shape


def test_dtypes():
    class Mine(AbstractDtype):
        dtypes = ("float32", re.compile("int.*"))

    rule = array_rule(Mine[Array, "..."])
    assert rule is not None
    assert [rule.admits_dtype(name) for name in ("float32", "int8", "float16")] == [True, True, False]
    anything = array_rule(Shaped[Array, ""])
    assert anything is not None
    assert anything.dtypes is None
    assert anything.admits_dtype("anything")


def test_only_arrays_have_a_rule():
    assert [array_rule(one) for one in (int, Array, list[Float[Array, ""]], PyTree, None, "b d")] == [None] * 6


def test_an_axis_that_is_no_arithmetic_is_refused():
    with pytest.raises(AnnotationError, match="not an expression"):
        array_rule(Float[Array, "x.shape[0]"])


@dataclasses.dataclass
class Tree:
    value: Float[Array, " v"]
    children: "list[Tree]"
    name: str = ""


class Items(TypedDict):
    x: Float[Array, "b d"]
    y: NotRequired[tuple[Int[Array, " b"], ...]]


def paths(annotation: Any) -> list[str]:
    return [
        f"{path} {rule.dtype} {' '.join(axis.text for axis in rule.axes)}" for path, rule in walk(node_of(annotation))
    ]


def test_walk():
    assert paths(dict[str, list[Float[Array, "a b"]]]) == ["[...][...] Float a b"]
    assert paths(Items) == ["['x'] Float b d", "['y'][...] Int b"]
    assert paths(tuple[Float[Array, " a"], Int[Array, " b"] | None]) == ["[0] Float a", "[1] Int b"]
    assert paths(PyTree[Float[Array, "?a"], " T"]) == ["[...] Float ?a"]
    assert paths(Annotated[Float[Array, " a"], "note"]) == [" Float a"]
    assert paths(Tree) == [".value Float v"]  # a class that holds itself is entered once


def test_what_holds_no_arrays_is_one_plain_node():
    for plain in (int, list[int], dict[str, float], float | None, Array, Any, Callable[[int], int]):
        assert node_of(plain) == PlainNode(plain)
    assert node_of(Iterator[Float[Array, " a"]]).annotation.__name__ == "Iterator"  # looked at from outside only
    assert not holds_arrays(node_of(jax.Array))


def test_kinds():
    assert isinstance(node_of(Tree), DataclassNode)
    assert isinstance(node_of(list[Tree]), SequenceNode)
    assert isinstance(node_of(PRNGKeyArray), UnionNode)
    assert isinstance(node_of(Annotated[Float[Array, " a"], []]), ArrayNode)  # unhashable
