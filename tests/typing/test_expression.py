"""Symbolic axes: the parser against Python's own arithmetic, `solve` against trying every size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import AnnotationError

from equikd.typing._expression import UnboundName, expression
from equikd.typing._solve import Unsolvable, common

SIZES = {"a": 2, "b": 3, "h": 5}


def expressions(names=("a", "b", "h")):
    atoms = st.sampled_from([*names, "1", "2", "7"])
    symbols = st.sampled_from(["+", "-", "*", "//", "%"])
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.builds("({}{}{})".format, inner, symbols, inner),
            st.builds("{}({},{})".format, st.sampled_from(["min", "max"]), inner, inner),
            st.builds("-{}".format, inner),
        ),
        max_leaves=6,
    )


@given(expressions())
def test_evaluate_is_pythons_arithmetic(text):
    try:
        expected = eval(text, {}, dict(SIZES))
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            expression(text).evaluate(SIZES)
    else:
        assert expression(text).evaluate(SIZES) == expected
    assert expression(text).names <= SIZES.keys()


@given(expressions(), st.integers(0, 20), st.integers(0, 12))
def test_solve_finds_the_size_and_only_sizes_that_fit(text, unknown, size):
    parsed, known = expression(text), {"a": 2, "b": 3}
    if "h" not in parsed.names:
        return
    try:
        size = parsed.evaluate({**known, "h": unknown})
    except ZeroDivisionError:
        return
    found = parsed.solve(size, known)
    for value in found[:50]:
        assert parsed.evaluate({**known, "h": value}) == size
    if unknown <= 4 * abs(size) + 64:
        assert unknown in found


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("2*h", 10, [5]),
        ("2*h", 7, []),
        ("h-1", 4, [5]),
        ("10-h", 4, [6]),
        ("10-h", 11, []),
        ("h//2", 3, [6, 7]),
        ("2*h+1", 1001, [500]),
        ("h*h", 9, [3]),
        ("h*h", 8, []),
        ("12//h", 4, [3]),
        ("max(h,3)", 3, [0, 1, 2, 3]),
        ("{n}*h", 12, [3]),
        ("h-1000", 5, [1005]),
    ],
)
def test_solve(text, size, expected):
    assert list(expression(text).solve(size, {}, {"n": 4})) == expected


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("h*h", 1000**2, [1000]),
        ("h*h", 10**12 + 1, []),
        ("h*(h+1)//2", 500500, [1000]),
        ("h*(h-1)//2", 499500, [1000]),
        ("h*(h-1)", 0, [0, 1]),
        ("2**k", 2**14, [14]),
        ("2**k", 2**15 + 1, []),
        ("3*2**k+1", 3 * 2**40 + 1, [40]),
        ("10**9-h*h", 10**9 - 10**8, [10**4]),
        ("10**12//(h+1)", 10**6, [10**6 - 1]),
        ("k**k", 3**3, [3]),
        ("2**2**2**k", 16, [1]),
        ("min(h,4)", 3, [3]),
        ("max(h*h,h)", 10**10, [10**5]),
        ("(h+2)*(h+3)", 10**10 + 5 * 10**5 + 6, [10**5]),
        ("h*h-2*h", 15, [5]),
    ],
)
def test_large_sizes_are_solved(text, size, expected):
    assert list(expression(text).solve(size, {})) == expected


def test_solve_gives_up():
    for text, size in (("100%k", 10**6), ("k**k%7", 10**7), ("2**k%5+h", 10**9)):
        with pytest.raises(Unsolvable):
            expression(text).solve(size, {"h": 0})
    many = expression("12//h").solve(0, {})
    assert (many[0], len(many) > 10**15) == (13, True)
    assert common(many, range(15)) == range(13, 15)
    assert common(many, (3, 20)) == common((3, 20), many) == (20,)


def test_a_number_that_is_too_large():
    with pytest.raises(OverflowError, match="too large"):
        expression("2**k").evaluate({"k": 10**9})


def test_a_text_in_braces_is_an_expression():
    parsed = expression("{k}+1")
    assert parsed.unknowns({}, {"k": "2*q"}) == ("q",)
    assert list(parsed.solve(7, {}, {"k": "2*q"})) == [3]
    with pytest.raises(AnnotationError, match="stands for itself"):
        parsed.unknowns({}, {"k": "{k}"})


def test_solve_needs_one_unknown():
    for text, sizes in (("a*b", {}), ("a", {"a": 1})):
        with pytest.raises(ValueError, match="not one"):
            expression(text).solve(4, sizes)


class Model:
    dim = 8
    sizes = (3, {"k": 4})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{self.dim}", 8), ("{self.dim}//2", 4), ("{self.dim//2}", 4), ("{self.sizes[0]}*2", 6), ("{n}+a", 9),
     ('{self.sizes[1]["k"]}', 4), ("{axis}", 2), ("{axis}*3", 6)],
)  # fmt: skip
def test_arguments(text, expected):
    assert expression(text).evaluate(SIZES, {"self": Model(), "n": 7, "axis": "a"}) == expected


@pytest.mark.parametrize(
    ("text", "arguments", "why"),
    [("{n}", {}, "no argument 'n'"), ("{self.x}", {"self": Model()}, "no attribute 'x'"),
     ("{n}", {"n": 1.5}, "not an int"),
     ("{n[0]}", {"n": ()}, "out of range")],
)  # fmt: skip
def test_arguments_that_are_missing(text, arguments, why):
    with pytest.raises(AnnotationError, match=why):
        expression(text).evaluate({}, arguments)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "a.b",
        "a[0]",
        "f(a)",
        "a if b else 1",
        "lambda:1",
        "a and b",
        "1.5*a",
        "a;b",
        "{f(x)}",
        "{a,b}",
        "a<b",
        "True",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(AnnotationError, match="not an expression of axes"):
        expression(text)


def test_an_unbound_name_is_named():
    with pytest.raises(UnboundName) as error:
        expression("a*c").evaluate(SIZES)
    assert error.value.name == "c"
    assert expression("a*c*d").unknowns(SIZES) == ("c", "d")
