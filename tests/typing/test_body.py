"""What the body of a checked function can ask, and checks in programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import jaxtyped

from equikd.typing import Array, Float, Int, Scalar, ShapeError, check, dim, disabled, shape, typechecked, typechecker


@typechecked
def scaled(x: Float[Array, " n"], by: float) -> Float[Array, " n"]:
    return x * by


def test_dim_and_shape():
    @typechecked
    def f(x: Float[Array, "*s t d"], n: int) -> Float[Array, "*s 2*t"]:
        assert (dim("t"), dim("2*d"), dim("{n}")) == (3, 8, 7)
        assert shape("*s d 5 {n}") == (2, 6, 4, 5, 7)
        return jnp.zeros(shape("*s 2*t"))

    assert f(jnp.ones((2, 6, 3, 4)), 7).shape == (2, 6, 6)
    for off in (disabled(),):
        with off:
            assert f(jnp.ones((2, 6, 3, 4)), 7).shape == (2, 6, 6)


def test_dim_belongs_to_the_innermost_call():
    @typechecked
    def inner(x: Float[Array, " n"]) -> int:
        return dim("n")

    @typechecked
    def outer(x: Float[Array, "n m"]) -> tuple[int, int, int]:
        return dim("n"), inner(x[0]), dim("n")

    assert outer(jnp.ones((2, 3))) == (2, 3, 2)


def test_check_shares_the_names_of_the_call():
    @typechecked
    def f(x: Float[Array, " n"], y: object) -> int:
        assert check(y, Float[Array, "n k"] | None) is y
        return dim("k")

    assert f(jnp.ones(2), jnp.ones((2, 3))) == 3
    with pytest.raises(ShapeError, match="axis 'n' has two sizes"):
        f(jnp.ones(2), jnp.ones((3, 3)))


def test_a_check_that_fails_binds_nothing():
    @typechecked
    def f(x: Float[Array, " n"]) -> int:
        with pytest.raises(ShapeError):
            check(jnp.ones((5, 3)), Float[Array, "k n"])
        check(jnp.ones(4), Float[Array, " k"])
        return dim("k")

    assert f(jnp.ones(2)) == 4


@pytest.mark.parametrize("checked", [typechecked, jaxtyped(typechecker=typechecker)])
def test_isinstance_in_the_body_knows_the_names(checked):
    @checked
    def f(x: Float[Array, "*s n"]) -> tuple[bool, bool, bool]:
        return (
            isinstance(jnp.ones(2), Float[Array, " n"]),
            isinstance(jnp.ones(3), Float[Array, " n"]),
            isinstance(jnp.ones((4, 1)), Float[Array, "*s m"]),
        )

    assert f(jnp.ones((4, 2))) == (True, False, True)


# In programs.


def model(layers, x: Float[Array, "b d"]) -> Float[Array, "b d"]:
    for w in layers:
        x = jnp.tanh(x @ w)
    return x


def test_the_program_is_the_same():
    layers, x = [jnp.ones((3, 3))] * 2, jnp.ones((4, 3))
    checked = typechecked(model)
    assert str(jax.make_jaxpr(checked)(layers, x)) == str(jax.make_jaxpr(model)(layers, x))
    loss = lambda function: lambda layers, x: jax.vmap(lambda x: function(layers, x[None])[0])(x).sum()
    programs = [jax.jit(jax.grad(loss(function))).lower(layers, x).as_text() for function in (checked, model)]
    assert programs[0] == programs[1]


def test_checks_run_once_per_trace():
    count = []

    class Counted(float):
        pass

    @jax.jit
    @typechecked
    def f(x: Float[Array, " n"]) -> Float[Array, " n"]:
        count.append(1)
        return x

    for _ in range(3):
        f(jnp.ones(2))
    assert len(count) == 1
    with pytest.raises(ShapeError):
        f(jnp.ones((2, 2)))


def test_two_correct_programs_that_reuse_letters():
    """Two layers with the same letters, two losses with 10 and 5 classes."""

    @typechecked
    def linear(w: Float[Array, "n m"], x: Float[Array, "b n"]) -> Float[Array, "b m"]:
        return x @ w

    @typechecked
    def loss(logits: Float[Array, "b n"], labels: Int[Array, " b"]) -> Scalar:
        return logits[jnp.arange(dim("b")), labels].sum()

    hidden = linear(jnp.ones((4, 6)), jnp.ones((2, 4)))
    for classes in (10, 5):
        loss(linear(jnp.ones((6, classes)), hidden), jnp.zeros(2, jnp.int32))


def test_numpy_is_no_jax_array():
    with pytest.raises(ShapeError, match="a numpy array"):
        scaled(np.ones(2, np.float32), 1.0)
