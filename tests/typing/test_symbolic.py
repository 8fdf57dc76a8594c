"""Symbolic axes in calls: solved together, and what stands in braces."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from equikd.typing import Array, Float, ShapeError, dim, shape, typechecked


def test_symbolic_axes_are_solved_together():
    """`h//2 == 3` leaves 6 and 7; `h%4 == 3` decides."""

    @typechecked
    def f(x: Float[Array, " h//2"], y: Float[Array, " h%4"]) -> int:
        return dim("h")

    assert f(jnp.ones(3), jnp.ones(3)) == 7
    with pytest.raises(ShapeError, match="no h makes"):
        f(jnp.ones(3), jnp.ones(1))

    @typechecked
    def open_ended(x: Float[Array, " h//2"]) -> None: ...

    open_ended(jnp.ones(3))  # 6 or 7: it fits, and nobody asks

    @typechecked
    def late(x: Float[Array, " 2*h"]) -> Float[Array, " h"]:
        return x[::2]

    assert late(jnp.ones(6)).shape == (3,)


def test_an_axis_cannot_be_a_traced_number():
    @typechecked
    def f(x: Float[Array, " {size}"], size: object) -> None: ...

    with pytest.raises(jaxtyping.AnnotationError, match="not an int"):
        jax.jit(f)(jnp.ones(2), 2)


@pytest.mark.parametrize(
    ("annotation", "value", "match"),
    [
        ("{k}", None, "gives a NoneType, not an int"),
        ("{k.dim}", 3, "has no attribute 'dim'"),
        ("{k['dim']}", {}, "'dim'"),
        ("h*{k.dim}", 3, "has no attribute 'dim'"),
        ("{nope}", 3, "no argument 'nope' here"),
        ("{k}", "import os", "not an expression of axes"),
        ("{k}", "p*q", "'p' and 'q' are unknown"),
    ],
)
def test_what_stands_in_braces_cannot_be_computed(annotation, value, match):
    @typechecked
    def f(k, x: Float[Array, annotation]) -> None: ...

    with pytest.raises(ShapeError, match=match) as error:
        f(value, jnp.ones(2))
    assert "f: axis 0 of x" in str(error.value)
    assert "test_symbolic.py" in str(error.value)
    assert f'>  x  Float[Array, "{annotation}"]' in str(error.value)


def test_a_text_in_braces_names_an_axis():
    @typechecked
    def f(k, x: Float[Array, " {k}"]) -> int:
        return dim("q")

    assert (f("q", jnp.ones(2)), f("q+1", jnp.ones(3)), f("2*q", jnp.ones(4))) == (2, 2, 2)
    with pytest.raises(ShapeError, match="no q makes"):
        f("2*q", jnp.ones(3))


def test_an_axis_that_is_no_arithmetic_names_the_function():
    @typechecked
    def f(x: Float[Array, "{len(x)}"]) -> None: ...  # noqa: F821

    with pytest.raises(ShapeError, match=r"f: x: axis '\{len\(x\)\}': not an expression") as error:
        f(jnp.ones(2))
    assert "test_symbolic.py" in str(error.value)

    @typechecked
    def body(x: Float[Array, " n"], k: object = None) -> tuple[int, ...]:
        return shape("n {k}")

    with pytest.raises(ShapeError, match="cannot be computed"):
        body(jnp.ones(2))


def test_an_axis_with_too_many_sizes_to_try():
    @typechecked
    def f(x: Float[Array, " 100%k"]) -> None: ...

    with pytest.raises(ShapeError, match="too many sizes to try"):
        f(jnp.ones(100_000))

    @typechecked
    def g(x: Float[Array, " 100%k+100000"], k: Float[Array, " k"]) -> None: ...

    g(jnp.ones(100_001), jnp.ones(99))

    @typechecked
    def h(x: Float[Array, " k*k"]) -> int:
        return dim("k")

    assert h(jnp.ones(10**6)) == 1000
