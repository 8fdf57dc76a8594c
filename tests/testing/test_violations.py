"""`ek.testing.violations`: exactly one thing is broken, it is really broken, and the text says what."""

import dataclasses
import re
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

import equikd as ek
from equikd.testing import DrawError, Violation, arguments, violations
from equikd.testing._contradictions import contradiction
from equikd.testing._parts import leaves, replaced
from equikd.testing._rules import rules_of
from equikd.typing import Array, Bool, Float, Int, Num, PRNGKeyArray, PyTree, Shaped

quick = settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@dataclasses.dataclass
class Weights:
    w: Float[Array, "a b"]
    b: Float[Array, " b"]


def flat(x: Float[Array, "b t d"], w: Float[Array, "d n"]): ...
def groups(x: Float[Array, "*b t d"], mask: Bool[Array, "*b t"], w: Float[Array, "d 4"]): ...
def symbols(h: Int[Array, " h"], w: Float[Array, "h+1 2*h"], u: Num[Array, "h-1 n=3"]): ...
def alone(x: Float[Array, " 2*h"], y: Float[Array, " 2*h"]): ...
def broadcast(x: Float[Array, "*#b #t d"], y: Float[Array, "*#b t #d"], z: Float[Array, "#4"]): ...
def exact_and_loose(x: Float[Array, "*b d"], y: Float[Array, "*#b d"]): ...
def braces(x: Float[Array, "{n} d"], n: int): ...
def keys(k: PRNGKeyArray, x: Float[Array, " 2"]): ...
def unions(x: Float[Array, "a b"] | Int[Array, " a"] | None, y: Num[Array, "a b"] | float, z: Float[Array, " a"]): ...
def labels(x: Float[Array, "b *n k"], y: Int[Array, " b *n"] | Num[Array, "b *n k"]): ...
def containers(x: list[Float[Array, "a b"]], y: dict[str, tuple[Float[Array, " b"], ...]], z: Weights): ...
def trees(
    x: PyTree[Float[Array, "?q b"], " T"], y: PyTree[Float[Array, " ?q"], " T"], z: PyTree[Float[Array, " b"]]
): ...
def numpy_too(x: Float[np.ndarray, "a b"], y: Float[Array, " a"]): ...
def variable(*xs: Float[Array, "a b"], **rest: Float[Array, " a"]): ...
def free(x: Shaped[Array, "a ..."]): ...


FUNCTIONS = [flat, groups, symbols, alone, broadcast, exact_and_loose, braces, keys, unions, labels, containers, trees]
FUNCTIONS += [numpy_too, variable, free]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_all_are_refused(function):
    checked = ek.typechecked(function)

    @quick
    @given(violations(function, dtypes="all"))
    def refused(call):
        with pytest.raises(TypeCheckError):
            call.eval_shape(checked)

    refused()


@pytest.mark.parametrize("function", [flat, containers, numpy_too], ids=lambda function: function.__name__)
def test_one_thing_is_broken(function):
    kinds = set()

    @quick
    @given(violations(function))
    def one(call):
        kinds.add(call.kind)
        path = re.match(r"(?:axis \w+ of |axis \d+ of |)([\w\[\]'.]+)", call.broken)
        assert path is not None
        assert path[1].split("[")[0].split(".")[0] in call.kwargs

    one()
    assert kinds == {"axis", "rank", "dtype"}


def test_kinds_can_be_chosen():
    @quick
    @given(violations(flat, kinds=["axis"]))
    def axes(call):
        assert call.kind == "axis"
        assert call.kwargs["x"].ndim == 3
        assert call.kwargs["x"].shape[2] != call.kwargs["w"].shape[0]

    axes()


def test_an_axis_that_stands_once_is_free():
    def f(x: Float[Array, "a b"], y: Float[Array, " b"]): ...

    @quick
    @given(violations(f, kinds=["axis"]))
    def only_b(call):
        assert call.broken.startswith("axis b of x is ")

    only_b()


def test_size_one_is_among_what_is_drawn():
    """It broadcasts in silence, which is what an unchecked function gets wrong."""
    found = hypothesis.find(
        violations(flat, kinds=["axis"]), lambda call: call.kwargs["w"].shape[0] == 1, settings=quick
    )
    assert found.kwargs["x"].shape[2] > 1


def test_a_union_member_that_fits_is_no_violation():
    """An int axis for a float one: `Int` admits it too."""

    def f(x: Float[Array, " a"] | Int[Array, " a"], y: Any): ...

    @quick
    @given(violations(f, given={"y": st.just(0)}))
    def neither(call):
        assert call.kind == "rank" or str(call.kwargs["x"].dtype) in ("bool", "key<fry>")

    neither()


def test_dataclasses_have_their_own_names():
    def f(x: Weights, y: Float[Array, "a b"]): ...

    @quick
    @given(violations(f, kinds=["axis"]))
    def inside(call):
        assert call.broken.startswith("axis b of x.w is ")

    inside()


def test_values_on_request():
    checked = ek.typechecked(flat)

    @settings(quick, max_examples=3)
    @given(violations(flat, values=True))
    def refused(call):
        with pytest.raises(TypeCheckError):
            checked(**call.kwargs)

    refused()


def test_the_text_says_what_is_broken():
    assert repr(hypothesis.find(violations(flat), lambda call: True, settings=quick)) == (
        "flat(x=f32[1,2,4], w=f32[3,4])  # axis d of x is 4, of w it is 3"
    )


CASES = {
    "axis": (flat, lambda call: call.kind == "axis"),
    "rank": (flat, lambda call: call.kind == "rank"),
    "dtype": (flat, lambda call: call.kind == "dtype"),
    "fixed": (groups, lambda call: "annotation says 4" in call.broken),
    "group": (groups, lambda call: "axes *b" in call.broken),
    "symbol": (symbols, lambda call: "2*h is" in call.broken),
    "no_size_fits": (alone, lambda call: call.kind == "axis"),
    "container": (containers, lambda call: "y['a'][0]" in call.broken and call.kind == "axis"),
    "instance": (braces, lambda call: call.kind == "axis"),
}


@pytest.mark.parametrize(("name", "case"), CASES.items())
def test_texts(name, case, snapshot):
    function, wanted = case
    found = hypothesis.find(
        violations(function), wanted, settings=settings(quick, max_examples=2000, derandomize=True), random=None
    )
    snapshot(name, repr(found))


def test_nothing_to_break(snapshot):
    def everything(x: Shaped[Array, "..."]): ...

    with pytest.raises(DrawError) as caught:
        violations(everything)
    snapshot("nothing_to_break", str(caught.value))


def test_nothing_to_break_where_a_union_admits_all():
    def anything(x: Float[Array, "a b"] | Any): ...

    def plain(x: int): ...

    with pytest.raises(DrawError, match="nothing can be broken"):
        violations(plain)
    with pytest.raises(DrawError, match="nothing can be broken"):
        hypothesis.find(violations(anything), lambda call: True, settings=quick)


PLAIN = [flat, groups, symbols, alone, broadcast, exact_and_loose, braces, containers, numpy_too, variable]


@pytest.mark.parametrize("function", PLAIN, ids=lambda function: function.__name__)
def test_the_two_verdicts_agree(function):
    """Of any changed axis, rank or dtype: what is not judged contradictory is what the binder takes."""
    checked, verdicts = ek.typechecked(function), set()
    rules, _ = rules_of(function)

    @quick
    @given(arguments(function, dtypes="all"), st.data())
    def agree(call, data):
        leaf = data.draw(st.sampled_from(list(leaves(call.parts.values())) or [None]))
        if leaf is None:
            return
        shape = data.draw(st.lists(st.integers(0, 4), max_size=4) | st.permutations(leaf.shape))
        changed = dataclasses.replace(leaf, shape=tuple(shape))
        parts = {name: replaced(part, leaf, changed) for name, part in call.parts.items()}
        broken = Violation(call, parts, "axis", "")
        judged = contradiction(parts, rules.nodes, call.scope)
        verdicts.add(judged is None)
        if judged is None:
            broken.eval_shape(checked)
        else:
            with pytest.raises(TypeCheckError):
                broken.eval_shape(checked)

    agree()
    assert verdicts == {True, False}
