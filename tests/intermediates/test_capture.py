"""Values and gradients are to the bit those of a model that returns the values by hand."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

import equikd as ek

WIDTH = 4
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (3, WIDTH))


def call(model, *args, **kwargs):
    return model(*args, **kwargs)


def linear(seed=0):
    return eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(seed))


class Block(eqx.Module):
    """A residual block that can also return what is inside of it, as a person would write it."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.Linear
    mlp: eqx.nn.MLP

    def __init__(self, seed=0):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = linear(seed)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 8, 1, key=jax.random.key(seed + 100))

    def __call__(self, x):
        return self.by_hand(x)[0]

    def by_hand(self, x):
        inside = self.attention(self.norm(x))
        x = x + inside
        return x + self.mlp(x), inside


class Stack(eqx.Module):
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self):
        self.blocks, self.head = [Block(1), Block(2)], linear(3)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def by_hand(self, x):
        x, first = self.blocks[0].by_hand(x)
        x, second = self.blocks[1].by_hand(x)
        out = self.head(x)
        return out, {"blocks[0].attention": first, "blocks[1].attention": second, "blocks[1]": x, "head": out}


def test_values_are_those_that_a_model_returns_by_hand(same):
    model, batched = Stack(), lambda model, x: jax.vmap(model)(x)
    paths = ["blocks[0].attention", "blocks[-1].attention", "blocks[1]", "head"]
    out, found = eqx.filter_jit(ek.capture(batched, paths))(model, X)
    expected = eqx.filter_jit(lambda model, x: jax.vmap(model.by_hand)(x))(model, X)
    assert set(found) == set(paths)
    found["blocks[1].attention"] = found.pop("blocks[-1].attention")
    same((out, found), expected)


def through_a_jaxpr(function):
    """The same function by way of a jaxpr, as JAX itself evaluates one: since JAX 0.12 that alone changes the order in
    which a backward pass lists its operations, and so the last bit of a gradient."""

    def call(*args):
        jaxpr, shape = jax.make_jaxpr(lambda: function(*args), return_shape=True)()
        return jax.tree.unflatten(jax.tree.structure(shape), jaxpr_as_fun(jaxpr)())

    return call


def test_gradients_are_those_of_a_model_that_returns_the_value_by_hand(same):
    model, paths = Stack(), ["blocks[0].attention", "blocks[1].attention", "blocks[1]", "head"]

    def gradient(forward: Callable[..., Any]) -> Any:
        def loss(model):
            out, found = forward(model)
            return jnp.mean(out**2) + sum(jnp.mean(jnp.abs(value)) for value in found.values())

        return eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)

    captured = gradient(lambda model: jax.vmap(lambda x: ek.capture(call, paths)(model, x))(X))
    same(captured, gradient(lambda model: jax.vmap(through_a_jaxpr(model.by_hand))(X)))


def test_what_is_taken_without_gradient_gives_none():
    loss = lambda model: jax.lax.stop_gradient(ek.capture(call, ["head"])(model, X[0])[1]["head"]).sum()
    gradients = eqx.filter_grad(loss)(Stack())
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_nothing_asked_is_the_function_itself():
    model, seen = Stack(), []
    out, found = ek.capture(seen.append, [])(model)
    assert (out, found) == (None, {})
    assert seen[0] is model


class Net(eqx.Module):
    """Two parts and a rule of how they are used."""

    one: Any
    other: Any = None
    rule: Callable[..., Any] = eqx.field(static=True, default=lambda self, x: self.other(self.one(x)))

    def __call__(self, *args):
        return self.rule(self, *args)


def test_one_module_called_several_times(same):
    model = Net(linear(), rule=lambda self, x: self.one(jnp.sin(self.one(x))))
    out, found = ek.capture(call, ["one[0]", "one[1]", "one[-1]", "one[-2]"])(model, X[0])
    first = model.one(X[0])
    same(found, {"one[0]": first, "one[1]": out, "one[-1]": out, "one[-2]": first})


def test_an_object_at_two_paths_is_two_submodules(same):
    shared = linear()
    out, found = ek.capture(call, ["one", "other"])(Net(shared, shared), X[0])
    same(found, {"one": shared(X[0]), "other": out})


def test_shared_layers_of_equinox(same):
    embedding, readout = eqx.nn.Embedding(5, WIDTH, key=KEY), eqx.nn.Linear(WIDTH, 5, use_bias=False, key=KEY)
    tied = eqx.nn.Shared((embedding, readout), lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    def use(self, token):
        embedding, readout = self.one()
        return readout(embedding(token))

    model = Net(tied, rule=use)
    out, found = ek.capture(call, ["one.pytree[0]", "one.pytree[1]"])(model, jnp.int32(2))
    same(found, {"one.pytree[0]": embedding(jnp.int32(2)), "one.pytree[1]": out})
    by_capture = lambda model: ek.capture(call, ["one.pytree[1]"])(model, jnp.int32(2))[1]["one.pytree[1]"].sum()
    same(eqx.filter_grad(by_capture)(model), eqx.filter_grad(lambda model: model(jnp.int32(2)).sum())(model))


def test_state_goes_through_batch_norm(same):
    class Normed(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        drop: eqx.nn.Dropout

        def __call__(self, x, state, key):
            x, state = self.norm(self.linear(x), state)
            return self.drop(x, key=key), state

    made = lambda: Normed(linear(), eqx.nn.BatchNorm(WIDTH, "batch", mode="batch"), eqx.nn.Dropout(0.5))
    model, state = eqx.nn.make_with_state(made)()
    keys = jax.random.split(KEY, 3)
    batched = lambda model, *args: jax.vmap(model, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")(*args)
    (out, after), found = eqx.filter_jit(ek.capture(batched, ["linear", "norm", "drop"]))(model, X, state, keys)
    expected = eqx.filter_jit(batched)(model, X, state, keys)
    same((out, after), expected)
    same((found["drop"], found["linear"]), (out, eqx.filter_jit(lambda model, x: jax.vmap(model.linear)(x))(model, X)))
    assert isinstance(found["norm"][1], eqx.nn.State)


def test_stateful_layers_in_a_sequential(same):
    make = lambda: eqx.nn.Sequential(
        [linear(), eqx.nn.BatchNorm(WIDTH, "batch", mode="batch"), eqx.nn.Lambda(jax.nn.relu)]
    )
    model, state = eqx.nn.make_with_state(make)()
    batched = lambda model, x, state: jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(
        x, state
    )
    (out, after), found = ek.capture(batched, ["layers[0]", "[2]", "layers[2].fn"])(model, X, state)
    same((out, after), batched(model, X, state))
    same((found["[2]"], found["layers[2].fn"], found["layers[0]"]), (out, out, jax.vmap(model[0])(X)))


@pytest.mark.parametrize("value", ["text", None, 3, ("a", 1.5), np.arange(3), np.float32(2)])
def test_outputs_that_are_no_arrays_of_jax_stay_what_they_are(value):
    model = Net(lambda x: {"y": x * 2, "is": value}, rule=lambda self, x: (self.one(x), value))
    (_, out), found = ek.capture(call, ["one"])(model, X[0])
    assert type(out) is type(value) is type(found["one"]["is"])
    np.testing.assert_equal((out, found["one"]["is"]), (value, value))
    np.testing.assert_equal(np.asarray(found["one"]["y"]), 2 * np.asarray(X[0]))


def test_numpy_in_a_model_may_decide_what_is_computed(same):
    model = Net(linear(), np.array([0, 1, 1, 0]), lambda self, x: self.one(x)[np.flatnonzero(self.other)])
    out, found = ek.capture(call, ["one"])(model, X[0])
    same((out, found["one"]), (model(X[0]), model.one(X[0])))


def test_dtypes_and_keys_come_out_as_they_are(same):
    half = eqx.nn.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, key=KEY)
    model = Net(half, lambda key: jax.random.split(key, 2), lambda self, x, key: (self.one(x), self.other(key)))
    args = (X[0].astype(jnp.bfloat16), KEY)
    out, found = eqx.filter_jit(ek.capture(call, ["one", "other"]))(model, *args)
    same((found["one"], found["other"]), out)
    same(out, eqx.filter_jit(call)(model, *args))


def test_a_value_reduced_where_it_is_computed(same):
    model, norm = Stack(), lambda value: jnp.sqrt(jnp.mean(value**2))
    reduced = jax.jit(jax.vmap(lambda x: ek.capture(call, {"head": norm, "blocks[0]": None})(model, x)))
    whole = jax.jit(jax.vmap(lambda x: ek.capture(call, ["head", "blocks[0]"])(model, x)))
    (out, found), (expected, values) = reduced(X), whole(X)
    same((out, found["blocks[0]"]), (expected, values["blocks[0]"]))
    np.testing.assert_allclose(found["head"], jax.vmap(norm)(values["head"]), rtol=1e-6)


def test_a_model_that_captures_on_its_own(same):
    """Also of itself, by the same names."""
    inner = Net(linear(1), rule=lambda self, x: ek.capture(lambda net, x: net.one(x), ["one"])(self, x)[1]["one"])
    model = Net(inner, linear())
    out, found = eqx.filter_jit(ek.capture(call, ["one", "one.one", "other"]))(model, X[0])
    value = eqx.filter_jit(inner.one)(X[0])
    same(found, {"one": value, "one.one": value, "other": out})
    out, found = ek.capture(call, ["one"])(inner, X[0])
    same((out, found["one"]), (inner.one(X[0]), inner.one(X[0])))


def test_arguments_by_name_and_without_any_model(same):
    parts = [linear(), {"two": linear(1)}]
    out, found = ek.capture(lambda parts, *, x: parts[1]["two"](parts[0](x)), "[0]")(parts, x=X[0])
    same((out, found), (parts[1]["two"](parts[0](X[0])), {"[0]": parts[0](X[0])}))


def test_a_warning_of_the_model_is_still_heard():
    def warn(self, x):
        warnings.warn("from the model", stacklevel=1)
        return self.one(x)

    with pytest.warns(UserWarning, match="from the model"):
        ek.capture(call, ["one"])(Net(linear(), rule=warn), X[0])


def _nested(shape):
    """A model and a function that computes it by hand, from a drawn nesting of containers."""
    if shape is None:
        return linear()
    kind, parts = shape
    parts = [_nested(part) for part in parts]
    return parts if kind == "list" else tuple(parts) if kind == "tuple" else {f"k{i}": p for i, p in enumerate(parts)}


SHAPES = st.recursive(
    st.none(),
    lambda inner: st.tuples(st.sampled_from(["list", "tuple", "dict"]), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=5,
)


@given(shape=SHAPES, order=st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_any_nesting_of_parts(shape, order, same):
    """Captured for many paths, for one, and by hand: the same; and the output is unchanged."""
    model = {"root": _nested(shape)}
    paths = list(ek.intermediates.available(_chained, model, X[0]))
    out, found = ek.capture(_chained, paths)(model, X[0])
    by_hand, value = [], X[0]
    for part in _parts(model):
        by_hand.append(part(value))
        value = jnp.tanh(by_hand[-1])
    same((out, list(found.values())), (value, by_hand))
    path = order.choice(paths)
    same(ek.capture(_chained, [path])(model, X[0])[1], {path: found[path]})


def _parts(model):
    return jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, eqx.nn.Linear))


def _chained(model, x):
    for part in _parts(model):
        x = jnp.tanh(part(x))
    return x
