"""`ek.testing.check_shapes`: right programs pass, wrong ones fail with the smallest call and what is wrong."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from beartype import beartype
from hypothesis import strategies as st
from jaxtyping import jaxtyped

import equikd as ek
from equikd.testing import DrawError, check_shapes
from equikd.typing import Array, Bool, Float, Int, PRNGKeyArray

DIM_AND_HEADS = {"dim": st.sampled_from([8, 16]), "heads": st.integers(1, 4)}


def divides(dim, heads):
    return dim % heads == 0


class Attention(eqx.Module):
    """Self attention over `t` tokens."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    dim: int = eqx.field(static=True)
    heads: int = eqx.field(static=True)

    def __init__(self, dim: int, heads: int, *, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.qkv = eqx.nn.Linear(dim, 3 * dim, key=first)
        self.out = eqx.nn.Linear(dim, dim, key=second)
        self.dim, self.heads = dim, heads

    def split(self, x):
        return x.reshape(x.shape[0], self.heads, -1)

    def merge(self, x):
        return x.reshape(x.shape[0], self.dim)

    def mix(self, x):
        q, k, v = (self.split(part) for part in jnp.split(jax.vmap(self.qkv)(x), 3, axis=-1))
        weights = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5)
        return jnp.einsum("hts,shd->thd", weights, v)

    @ek.typechecked
    def __call__(self, x: Float[Array, "t {self.dim}"]) -> Float[Array, "t {self.dim}"]:
        return jax.vmap(self.out)(self.merge(self.mix(x)))


class WrongReshape(Attention):
    """Heads and tokens are not brought into order first."""

    def split(self, x):
        return x.reshape(self.heads, -1, x.shape[0])


class ForgottenTranspose(Attention):
    """Right for one token and one head."""

    def mix(self, x):
        return jnp.swapaxes(super().mix(x), 0, 1)

    def merge(self, x):
        return x.reshape(x.shape[0], -1)


class Projection(eqx.Module):
    """Two axes of the result are swapped."""

    w: Float[Array, "n d"]

    @ek.typechecked
    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, "b n"]:
        return self.w @ x.T


@ek.typechecked
class Layer(eqx.Module):
    w: Float[Array, "o i"]
    b: Float[Array, " o"]

    def __call__(self, x: Float[Array, " i"]) -> Float[Array, " o"]:
        return x[: self.w.shape[1]].sum() + self.b


class Net(eqx.Module):
    """Two layers that use the same letters for different sizes."""

    first: Layer
    second: Layer
    width: int = eqx.field(static=True)

    def __init__(self, width: int, *, key):
        del key
        self.first = Layer(jnp.zeros((2 * width, width)), jnp.zeros(2 * width))
        self.second = Layer(jnp.zeros((3, 2 * width)), jnp.zeros(3))
        self.width = width

    @ek.typechecked
    def __call__(self, x: Float[Array, " {self.width}"], key: PRNGKeyArray | None = None) -> Float[Array, "3"]:
        return self.second(self.first(x))

    @ek.typechecked
    def hidden(self, x: Float[Array, " {self.width}"]) -> Float[Array, " 2*{self.width}"]:
        return self.first(x)


class Batch(NamedTuple):
    x: Float[Array, "b d"]
    y: Int[Array, " b"]


@dataclasses.dataclass
class Weights:
    w: Float[Array, "d k"]
    b: Float[Array, " k"]


@ek.typechecked
def everything(batch: Batch, weights: list[Weights], extra: dict[str, Float[Array, "#b d"]]) -> Float[Array, "b d"]:
    del weights
    return sum(extra.values(), start=batch.x) * batch.y[:, None]


@ek.typechecked
def outer(x: Float[Array, " n"], y: Float[Array, " m"]) -> Float[Array, "n m"]:
    return y[:, None] * x


def unchecked(x: Float[Array, "b d"], y: Float[Array, "b d"]) -> Float[Array, "b d"]:
    return x + y


def unchecked_product(x: Float[Array, "b d"], w: Float[Array, "d n"]) -> Float[Array, "b n"]:
    return x @ w


@ek.typechecked
def refuses_too_much(x: Float[Array, "b d"]) -> Float[Array, "b d"]:
    return positive(x)


@ek.typechecked
def positive(x: Float[Array, "n n"]) -> Float[Array, "n n"]:
    return x


class UncheckedFields(eqx.Module):
    w: Float[Array, "o i"]
    b: Float[Array, " o"]


class WrongFields(eqx.Module):
    w: Float[Array, "{self.dim} {self.dim}"]
    dim: int = eqx.field(static=True)

    def __init__(self, dim: int):
        self.dim = dim
        self.w = jnp.zeros((dim, dim + 1))

    @ek.typechecked
    def __call__(self, x: Float[Array, " {self.dim}"]) -> Float[Array, " {self.dim}"]:
        return x


class Hidden:
    """No pytree."""

    def __init__(self, w: Float[Array, "n d"], scale: int, *, key):
        self.w, self.d = w * scale + jax.random.normal(key, w.shape), w.shape[1]

    @ek.typechecked
    def __call__(self, x: Float[Array, "b {self.d}"]) -> Float[Array, "b {self.w.shape[0]}"]:
        return x @ self.w.T


@jaxtyped(typechecker=beartype)
def stock(batch: Batch) -> Float[Array, "b d"]:
    return batch.x


@ek.config.config
class Hinge(ek.losses.Loss):
    x: ek.KeyPath
    y: ek.KeyPath

    def values(self, x: Float[Array, "b n"], y: Float[Array, "b n"]) -> Float[Array, " b"]:
        return jnp.maximum(0, 1 - x * y).sum(axis=-1)


@ek.config.config
class WrongAxis(Hinge):
    def values(self, x: Float[Array, "b n"], y: Float[Array, "b n"]) -> Float[Array, " b"]:
        return jnp.maximum(0, 1 - x * y).sum(axis=0)


@ek.config.config
class Largest(ek.metrics.Metric):
    x: ek.KeyPath

    def from_values(self, x: Float[Array, "b n"], mask: Bool[Array, " b"]) -> ek.metrics.Average:
        return ek.metrics.Average.of(x.max(axis=-1), mask)


def two_kinds(x: Float[Array, " d"], act: Callable) -> Float[Array, " d"]:
    return act(x)


class TestRight:
    @pytest.mark.parametrize("method", [None, "hidden"])
    def test_a_two_layer_net(self, method):
        check_shapes(Net, method=method, examples=20)

    def test_attention(self):
        check_shapes(Attention, axes=DIM_AND_HEADS, where=divides, examples=20)

    def test_an_instance_and_its_methods(self):
        net = Net(4, key=jax.random.key(0))
        check_shapes(net, examples=20)
        check_shapes(net.hidden, examples=20)
        check_shapes(net, method="hidden", examples=20)

    def test_a_constructor(self):
        check_shapes(Layer, examples=20)

    def test_an_instance_that_is_no_pytree(self):
        with pytest.raises(AssertionError, match=r"Hidden.*a violation was"):  # its constructor is not checked
            check_shapes(Hidden, examples=20)
        check_shapes(Hidden, given={"w": st.just(jax.ShapeDtypeStruct((2, 3), "float32"))}, examples=20)
        check_shapes(Hidden(jnp.ones((2, 3)), 2, key=jax.random.key(0)), examples=20)

    def test_wrapped_functions(self):
        check_shapes(jax.jit(outer_right), examples=20)
        check_shapes(eqx.filter_jit(outer_right), examples=20)

    def test_nothing_to_break(self):
        @ek.typechecked
        def takes_all(x: Float[Array, "b d"] | Any) -> Any:
            return x

        check_shapes(takes_all, examples=20)

    def test_containers(self):
        check_shapes(everything, examples=30, dtypes="all")

    def test_the_rules_of_an_undecorated_function(self):
        check_shapes(ek.typechecked(unchecked), examples=20)

    def test_given(self):
        check_shapes(ek.typechecked(two_kinds), given={"act": st.sampled_from([jnp.tanh, jnp.abs])}, examples=20)

    @pytest.mark.parametrize("loss", [Hinge, Hinge(x="preds", y="batch.y"), ek.losses.SoftmaxCrossEntropy])
    def test_losses(self, loss):
        check_shapes(loss, examples=20)

    def test_metrics(self):
        check_shapes(Largest, examples=20)

    def test_dtypes_of_a_mask(self):
        @ek.typechecked
        def masked(x: Float[Array, "b d"], mask: Bool[Array, " b"]) -> Float[Array, "b d"]:
            return jnp.where(mask[:, None], x, 0)

        check_shapes(masked, examples=20, dtypes="all")

    def test_nothing_is_computed(self, compilations):
        check_shapes(outer_right, examples=2)
        compilations.clear()
        check_shapes(outer_right, examples=20)
        assert compilations.names == []


@ek.typechecked
def outer_right(x: Float[Array, " n"], y: Float[Array, " m"]) -> Float[Array, "n m"]:
    return x[:, None] * y


WRONG = {
    "wrong_reshape": lambda: check_shapes(WrongReshape, axes=DIM_AND_HEADS, where=divides),
    "forgotten_transpose": lambda: check_shapes(ForgottenTranspose, axes=DIM_AND_HEADS, where=divides),
    "heads_do_not_divide": lambda: check_shapes(Attention, axes=DIM_AND_HEADS),
    "swapped_axes": lambda: check_shapes(Projection(jnp.zeros((3, 4)))),
    "result": lambda: check_shapes(outer),
    "unchecked": lambda: check_shapes(unchecked),
    "unchecked_by_chance": lambda: check_shapes(unchecked_product),
    "refuses_too_much": lambda: check_shapes(refuses_too_much),
    "unchecked_fields": lambda: check_shapes(UncheckedFields),
    "wrong_fields": lambda: check_shapes(WrongFields),
    "stock_checker": lambda: check_shapes(stock),
    "loss_over_the_wrong_axis": lambda: check_shapes(WrongAxis),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name, snapshot):
    with pytest.raises(AssertionError) as caught:
        WRONG[name]()
    assert not getattr(caught.value, "__notes__", [])
    snapshot(name, str(caught.value))


def test_a_rule_that_no_annotation_states():
    # No annotation can say that the axes of the mask are the first of those of the values.
    # Given to a class, it is the argument, not the field of the same name.
    mask = {"mask": st.just(jax.ShapeDtypeStruct((3, 7), bool))}
    with pytest.raises(AssertionError, match="raises WiringError where all arguments fit") as caught:
        check_shapes(ek.metrics.Accuracy, axes={"b": st.just(3)}, given=mask)
    assert "the mask does not fit the values" in str(caught.value)


@pytest.mark.parametrize("function", [outer, unchecked, unchecked_product, refuses_too_much])
def test_failures_are_small(function):
    with pytest.raises(AssertionError) as caught:
        check_shapes(function)
    call = str(caught.value).partition("): ")[0]
    shapes = [[int(size) for size in shape.split(",")] for shape in re.findall(r"\[([\d,]+)\]", call)]
    assert len(shapes) == len(inspect.signature(function).parameters)
    assert max(size for shape in shapes for size in shape) <= 3


BAD_CALLS = {
    "unsupported": lambda: check_shapes(two_kinds),
    "no_shapes": lambda: check_shapes(len_of),
    "unknown_axis": lambda: check_shapes(Attention, axes={"head": st.just(2)}),
    "where_is_never_true": lambda: check_shapes(outer, where=lambda n: n < 0),
}


def len_of(x: int) -> int:
    return x


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name, snapshot):
    with pytest.raises(DrawError) as caught:
        BAD_CALLS[name]()
    snapshot(name, str(caught.value))


def test_checks_that_are_off(monkeypatch):
    monkeypatch.setenv("EQUIKD_TYPECHECK", "0")
    with pytest.raises(DrawError, match="checks are off"):
        check_shapes(outer)


def test_the_cause_is_kept():
    with pytest.raises(AssertionError) as caught:
        check_shapes(Attention, axes=DIM_AND_HEADS)
    assert isinstance(caught.value.__cause__, TypeError)


class Keyed(eqx.Module):
    """The usual way to write a constructor's key."""

    linear: eqx.nn.Linear
    size: int = eqx.field(static=True)

    def __init__(self, size: int, *, key: jax.Array) -> None:
        self.linear, self.size = eqx.nn.Linear(size, 3, key=key), size

    @ek.typechecked
    def __call__(self, x: Float[Array, "n {self.size}"], key: jax.Array | None = None) -> Float[Array, "n 3"]:
        return jax.vmap(self.linear)(x)


def test_a_key_annotated_as_any_array_is_supplied() -> None:
    ek.testing.check_shapes(Keyed, examples=5)
