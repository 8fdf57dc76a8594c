"""A name of a call that also stands in a field is another name; a failure says how to tie the two."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import equikd as ek
from equikd.testing import check_shapes
from equikd.typing import Array, Float


class Linear(eqx.Module):
    w: Float[Array, "o i"]

    @ek.typechecked
    def __call__(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        return x @ self.w.T


@ek.typechecked
class Tied(eqx.Module):
    """As the hint says."""

    w: Float[Array, "o i"]

    @ek.typechecked
    def __call__(self, x: Float[Array, "*n {self.w.shape[1]}"]) -> Float[Array, "*n {self.w.shape[0]}"]:
        return x @ self.w.T


class Pair(eqx.Module):
    weights: tuple[Float[Array, "o i"], Float[Array, " o"]]

    @ek.typechecked
    def __call__(self, x: Float[Array, " i"]) -> Float[Array, " o"]:
        return self.weights[0] @ x


@ek.typechecked
class TiedPair(eqx.Module):
    weights: tuple[Float[Array, "o i"], Float[Array, " o"]]

    @ek.typechecked
    def __call__(self, x: Float[Array, " {self.weights[0].shape[1]}"]) -> Float[Array, " o"]:
        return self.weights[0] @ x


class Listed(eqx.Module):
    ws: list[Float[Array, " i"]]
    w: Float[Array, "... k"]

    @ek.typechecked
    def __call__(self, x: Float[Array, " i"], y: Float[Array, " k"]) -> Float[Array, "..."]:
        return sum((x * w for w in self.ws), start=jnp.zeros(())) + (self.w @ y).sum()


class Added(eqx.Module):
    """Wrong by broadcasting, so that only the result tells."""

    w: Float[Array, " d"]

    @ek.typechecked
    def __call__(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        return x + self.w


class Inner(eqx.Module):
    w: Float[Array, "o i"]


class Outer(eqx.Module):
    """The names in another instance are its own; and a mistake that has to do with no name."""

    inner: Inner

    @ek.typechecked
    def __call__(self, x: Float[Array, " i"]) -> Float[Array, " i"]:
        return x.reshape(x.shape[0], 0)


def text_of(target, **options):
    with pytest.raises(AssertionError) as caught:
        check_shapes(target, **options)
    return str(caught.value)


@pytest.mark.parametrize("cls", [Linear, Pair, Listed, Added])
def test_hints(cls, snapshot):
    snapshot(cls.__name__, text_of(cls))


@pytest.mark.parametrize("cls", [Tied, TiedPair])
def test_what_is_hinted_at_helps(cls):
    check_shapes(cls)


def test_an_instance():
    assert "axis 'i' also stands in field w, where it is 5" in text_of(Linear(jnp.ones((4, 5))))


def test_no_hint_where_it_would_not_help():
    assert "also stands" not in text_of(Outer)
    assert "also stands" not in text_of(jax.jit(ek.typechecked(_fails)))


@ek.typechecked
def _fails(x: Float[Array, " i"]) -> Float[Array, " i"]:
    raise TypeError("w")
