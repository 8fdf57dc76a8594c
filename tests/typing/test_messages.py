"""The message of a `ShapeError`, word for word: it alone is enough to mend the call."""

import dataclasses
from typing import NamedTuple, TypedDict

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import jaxtyped

from equikd.typing import (
    Array,
    Bool,
    Float,
    Int,
    PRNGKeyArray,
    PyTree,
    Scalar,
    Scope,
    ShapeError,
    check,
    dim,
    provenance,
    shape,
    typechecked,
    typechecker,
)

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def f(*sizes):
    return jnp.ones(sizes)


def i(*sizes):
    return jnp.ones(sizes, jnp.int32)


@typechecked
def attention(
    x: Float[Array, "*b t d"], mask: Bool[Array, "*b t"], w: Float[Array, "d h"], rate: float = 0.0
) -> Float[Array, "*b t h"]:
    return x @ w if rate == 0 else x


MASK = jnp.ones((2, 3), bool)


@case
def transposed():
    attention(f(2, 3, 4), MASK, f(10, 4))


@case
def rank_without_batch():
    @typechecked
    def linear(x: Float[Array, "b d"], w: Float[Array, "d k"]) -> None: ...

    linear(f(4), f(4, 3))


@case
def one_axis_too_many():
    @typechecked
    def layer(x: Float[Array, " d"], w: Float[Array, "d k"]) -> None: ...

    layer(f(32, 4), f(4, 3))


@case
def squeeze():
    @typechecked
    def loss(preds: Float[Array, " b"], labels: Int[Array, " b"]) -> None: ...

    loss(f(8, 1), i(8))


@case
def last_axis_missing():
    @typechecked
    def pixels(x: Float[Array, "b h w 1"]) -> None: ...

    pixels(f(8, 28, 28))


@case
def majority():
    @typechecked
    def add(a: Float[Array, " n"], b: Float[Array, " n"], c: Float[Array, " n"], d: Float[Array, " n"]) -> None: ...

    add(f(3), f(4), f(4), f(4))


@case
def three_sizes():
    @typechecked
    def add(a: Float[Array, " n"], b: Float[Array, " n"], c: Float[Array, " n"]) -> None: ...

    add(f(3), f(4), f(5))


@case
def groups():
    attention(f(2, 3, 4), jnp.ones((3, 3), bool), f(4, 10))


@case
def wrong_dtype():
    attention(f(2, 3, 4), f(2, 3), f(4, 10))


@case
def wrong_type():
    attention("x", MASK, f(4, 10))


@case
def numpy_array():
    attention(np.ones((2, 3, 4), np.float32), MASK, f(4, 10))


@case
def wrong_plain_value():
    attention(f(2, 3, 4), MASK, f(4, 10), rate="high")


@case
def result():
    attention(f(2, 3, 4), MASK, f(4, 10), rate=0.5)


@case
def fixed_size():
    @typechecked
    def image(x: Float[Array, "b 28 28 c=1"]) -> None: ...

    image(f(8, 28, 28, 3))


@case
def no_size_fits():
    @typechecked
    def halves(x: Float[Array, " 2*h"]) -> None: ...

    halves(f(7))


@case
def symbolic():
    @typechecked
    def split(x: Float[Array, "b {heads}*h"], y: Float[Array, "b h"], heads: int) -> None: ...

    split(f(2, 12), f(2, 5), 3)


@case
def two_unknowns():
    @typechecked
    def flat(x: Float[Array, "h*w c"]) -> None: ...

    flat(f(9, 3))


@case
def division_by_zero():
    @typechecked
    def groups(x: Float[Array, " c//n"], y: Float[Array, "c n"]) -> None: ...

    groups(f(2), f(4, 0))


class Model(eqx.Module):
    dim: int

    @typechecked
    def __call__(self, x: Float[Array, "b {self.dim}"]) -> None: ...


@case
def size_of_the_instance():
    Model(8)(f(2, 4))


class Batch(TypedDict):
    image: Float[Array, "b h w"]
    label: Int[Array, " b"]


@typechecked
def train(batch: Batch, weights: list[Float[Array, "i o"]], extra: dict[str, tuple[Int[Array, " b"], ...]]) -> None: ...


IMAGES = {"image": f(8, 3, 3), "label": i(8)}


@case
def item_of_a_dict():
    train(IMAGES | {"label": i(7)}, [f(2, 2)], {})


@case
def item_of_a_list():
    train(IMAGES, [f(2, 2)] * 7 + [f(2)], {})


@case
def item_deep_inside():
    train(IMAGES, [], {"a": (i(8),), "b": (i(8), i(8), i(9))})


@case
def missing_and_unknown_keys():
    train({"images": f(8, 3, 3), "label": i(8)}, [], {})


class Pair(NamedTuple):
    mean: Float[Array, " d"]
    std: Float[Array, " d"]


@case
def field_of_a_named_tuple():
    @typechecked
    def normalise(x: Float[Array, "b d"], by: Pair) -> None: ...

    normalise(f(2, 3), Pair(f(3), f(2)))


class Linear(eqx.Module):
    weight: Float[Array, "o i"]
    bias: Float[Array, " o"]


@case
def field_of_a_module():
    @typechecked
    def apply(layers: list[Linear], x: Float[Array, " i"]) -> None: ...

    apply([Linear(f(3, 2), f(3)), Linear(f(3, 3), f(2))], f(2))


@case
def constructor():
    @typechecked
    @dataclasses.dataclass
    class Point:
        x: Float[Array, " n"]
        y: Float[Array, " n"]
        name: str = ""

    Point(f(2), f(3))


@case
def leaf_of_a_pytree():
    @typechecked
    def update(params: PyTree[Float[Array, "?*s"], " T"], grads: PyTree[Float[Array, "?*s"], " T"]) -> None: ...

    update({"w": f(2, 3), "b": f(3)}, {"w": f(3, 2), "b": f(3)})


@case
def structure_of_a_pytree():
    @typechecked
    def update(params: PyTree[Float[Array, "..."], " T"], grads: PyTree[Float[Array, "..."], " T"]) -> None: ...

    update({"w": f(2, 3)}, {"v": f(2, 3)})


@case
def structure_not_known():
    @typechecked
    def update(x: PyTree[int, "S T"]) -> None: ...

    update([1])


@case
def key():
    @typechecked
    def sample(key: PRNGKeyArray, x: Float[Array, " n"]) -> None: ...

    sample(jax.random.split(jax.random.key(0), 3), f(2))


@case
def key_in_place_of_an_array():
    @typechecked
    def sample(x: Float[Array, " n"], key: PRNGKeyArray) -> None: ...

    sample(jax.random.split(jax.random.key(0), 3), jax.random.key(0))


@case
def union():
    @typechecked
    def either(x: Float[Array, "b d"] | Int[Array, " b"] | None) -> None: ...

    either(3)


@case
def scope():
    @typechecked
    def model(x: Float[Array, "b d"]) -> None: ...

    @typechecked
    def loss(preds: Float[Array, "b k"], labels: Int[Array, " b"]) -> None: ...

    with Scope("b"):
        model(f(32, 784))
        loss(f(31, 10), i(31))


@case
def where_it_comes_from():
    with provenance({"x": "inputs.x = batch.image", "w": "cfg.model.w"}):
        attention(f(2, 3, 4), MASK, f(10, 4))


@case
def ten_arguments():
    @typechecked
    def many(
        a: Float[Array, "b n"], b: Float[Array, "b n"], c: Float[Array, "b n"], d: Float[Array, "b n"],
        e: Float[Array, "b n"], f: list[Float[Array, "b n"]], g: dict[str, Float[Array, "b n"]], h: int, i: Scalar,
        j: Float[Array, "b n"],
    ) -> None: ...  # fmt: skip

    x = f(2, 3)
    many(x, x, x, x, x, [x] * 20, {str(number): x for number in range(20)}, 3, jnp.ones(()), f(3, 2))


@case
def value():
    check({"a": f(2), "b": f(3)}, dict[str, Float[Array, " n"]], "state")


@case
def value_in_a_call():
    @typechecked
    def body(x: Float[Array, "b d"]) -> None:
        check(x.T, Float[Array, "b d"], "hidden")

    body(f(2, 3))


@case
def unbound_dim():
    @typechecked
    def body(x: Float[Array, "batch d"]) -> None:
        shape("batc d")

    body(f(2, 3))


@case
def dim_outside():
    dim("b")


@case
def as_jaxtypings_typechecker():
    jaxtyped(typechecker=typechecker)(Pairwise.distance)(None, f(3, 2), f(4, 3))


class Pairwise:
    def distance(self, x: Float[Array, "n d"], y: Float[Array, "m d"]) -> None: ...


@case
def under_jit():
    jax.jit(attention)(f(2, 3, 4), MASK, f(10, 4))


@pytest.mark.parametrize("name", CASES)
def test_message(name, snapshot):
    with pytest.raises(ShapeError) as error:
        CASES[name]()
    text = str(error.value)
    assert len(text.splitlines()) < 30
    snapshot(name, text)
