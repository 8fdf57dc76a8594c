"""Gradients with respect to intermediates, by zeros that are added to them."""

# ruff: noqa: PLW0108 - a module or a jitted function is traced in another way than a lambda that calls it

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equikd as ek
from equikd.intermediates import Inputs, IntermediateError, NoGradientWarning, gradients

WIDTH = 4
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (WIDTH,))


def call(model, *args, **kwargs):
    return model(*args, **kwargs)


def linear(seed=0):
    return eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(seed))


class Net(eqx.Module):
    """Two parts and a rule of how they are used."""

    one: Any
    other: Any
    rule: Callable[..., Any] = eqx.field(static=True, default=lambda self, x: self.other(self.one(x)))

    def __call__(self, *args):
        return self.rule(self, *args)


def net(rule, one=None):
    return Net(linear() if one is None else one, linear(1), rule)


def squared(model, x):
    return jnp.mean(model(x) ** 2)


def test_gradients_are_those_with_respect_to_the_value(same):
    model = Net(linear(), linear(1))
    value, found = jax.jit(lambda x: gradients(squared, ["one", "other"])(model, x))(X)
    after_one = lambda inside: jnp.mean(model.other(inside) ** 2)
    expected = jax.jit(lambda x: jax.value_and_grad(after_one)(model.one(x)))(X)
    same((value, found["one"]), expected)
    same(found["other"], jax.jit(lambda x: 2 * model(x) * (1 / WIDTH))(X))


def test_each_call_has_its_own(same):
    model = net(lambda self, x: self.one(self.one(x)))
    _, found = gradients(lambda model, x: model(x).sum(), ["one[0]", "one[-1]", "one[1]"])(model, X)
    same(found["one[1]"], jnp.ones(WIDTH))
    same(found["one[-1]"], found["one[1]"])
    np.testing.assert_allclose(found["one[0]"], model.one.weight.sum(0), rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint])
def test_in_a_scan_there_is_one_for_each_iteration(wrap, same):
    def forward(self, x, added=None):
        def body(carry, by):
            return jnp.tanh(self.one(carry) if by is None else self.one(carry) + by), None

        return jax.lax.scan(wrap(body), x, added, length=3)[0]

    model = net(forward)
    paths = ["one", "one[0]", "one[-1]"]
    value, found = jax.jit(lambda x: gradients(squared, paths)(model, x))(X)
    by_hand = lambda added: jnp.mean(forward(model, X, added) ** 2)
    expected = jax.jit(jax.value_and_grad(by_hand))(jnp.zeros((3, WIDTH)))
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(found["one"], expected[1], rtol=1e-5)
    same((found["one[0]"], found["one[-1]"]), (found["one"][0], found["one"][2]))


def test_in_a_vmap_there_is_one_for_each_example(same):
    model, inputs = Net(linear(), linear(1)), jnp.stack([X, 2 * X, 3 * X])
    added = jnp.zeros((3, WIDTH))
    loss = lambda x, by: ek.capture(squared, ["one"], perturb={"one": by})(model, x)[0]
    inside = jax.grad(lambda added: jax.vmap(loss)(inputs, added).sum())(added)
    batched = lambda model, xs: jnp.sum(jax.vmap(lambda x: squared(model, x))(xs))
    outside = gradients(batched, ["one"])(model, inputs)[1]["one"]
    by_hand = lambda added: jnp.sum(
        jax.vmap(lambda x, by: jnp.mean(model.other(model.one(x) + by) ** 2))(inputs, added)
    )
    same(inside, jax.grad(by_hand)(added))
    same(outside, inside)


def test_branches_of_a_cond_and_what_is_not_taken(same):
    rule = lambda self, choice, x: jax.lax.cond(choice, lambda x: self.one(x), lambda x: self.other(self.one(x)), x)
    loss = lambda model, choice: model(choice, X).sum()
    for choice, expected in ((True, 1.0), (False, 0.0)):
        run = gradients(loss, ["one", "other"], absent="zeros")
        found = run(net(rule), jnp.array(choice))[1]
        np.testing.assert_allclose(found["one"], 1.0 if choice else linear(1).weight.sum(0), rtol=1e-6)
        same(found["other"], jnp.full(WIDTH, 1 - expected))


def test_of_inputs_and_of_parts_of_values(same):
    part = lambda x, by: {"sum": x + by, "count": jnp.int32(3), "name": "text", "numpy": np.ones(2)}
    model = net(lambda self, x: self.other(self.one(x, by=x)["sum"]), one=part)
    paths = ["one", "one.sum", "one.inputs", "one.inputs[0]", "one.inputs.by", "other.inputs[0]"]
    with pytest.raises(IntermediateError, match="is nothing"):
        ek.capture(call, ["one.nothing"])(model, X)
    values = ek.capture(call, paths)(model, X)[1]
    same(values["one.inputs.by"], X)
    same(values["one.sum"], 2 * X)
    assert isinstance(values["one.inputs"], Inputs)
    found = gradients(lambda model, x: model(x).sum(), paths)(model, X)[1]
    one = jax.grad(lambda x: model.other(x).sum())(2 * X)
    for path in ("one.sum", "one.inputs[0]", "one.inputs.by", "other.inputs[0]"):
        same(found[path], one)
    same(found["one"]["sum"], one)
    assert found["one"]["count"] is found["one"]["numpy"] is found["one"]["name"] is None
    same(found["one.inputs"][0], one)


def test_halves_keep_their_dtype():
    half = eqx.nn.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, key=KEY)
    found = gradients(lambda model, x: model(x).sum(), ["one"])(Net(half, jnp.sin), X.astype(jnp.bfloat16))[1]
    assert found["one"].dtype == jnp.bfloat16


def test_what_is_added_changes_the_output(same):
    model = Net(linear(), linear(1))
    out, found = ek.capture(call, ["one"], perturb={"one": X})(model, X)
    same((out, found["one"]), (model.other(model.one(X) + X), model.one(X) + X))
    traced = jax.jit(lambda by: ek.capture(call, ["one"], perturb={"one": by})(model, X)[0])
    same(traced(np.zeros(WIDTH, np.float32)), jax.jit(lambda: model(X))())


def test_gradients_with_respect_to_parameters_and_values_at_once(same):
    model = Net(linear(), linear(1))
    loss = lambda pair: ek.capture(squared, ["one"], perturb={"one": pair[1]})(pair[0], X)[0]
    of_model, of_value = eqx.filter_jit(eqx.filter_grad(loss))((model, jnp.zeros(WIDTH)))
    same(of_value, of_model.one.bias)  # which is added in the same place
    same(of_model, eqx.filter_jit(eqx.filter_grad(lambda model: squared(model, X)))(model))


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("shape", {"one": jnp.zeros((2, WIDTH))}),
        ("scalar", {"one": 0.5}),
        ("structure", {"one.inputs": jnp.zeros(WIDTH)}),
        ("unknown", {"on": jnp.zeros(WIDTH)}),
        ("reduced", {"other": jnp.zeros(())}),
    ],
)
def test_what_cannot_be_added_is_refused(name, added, snapshot):
    paths = {"one": None, "other": jnp.sum, "one.inputs": None}
    with pytest.raises(IntermediateError) as caught:
        ek.capture(call, paths, perturb=added)(Net(linear(), linear(1)), X)
    snapshot(name, str(caught.value))


def test_integers_have_no_gradient(snapshot):
    model = net(lambda self, x: self.one(x) * 1.0, one=lambda x: x.astype(jnp.int32))
    with pytest.raises(IntermediateError) as caught:
        ek.capture(call, ["one"], perturb={"one": jnp.zeros(WIDTH)})(model, X)
    snapshot("integers", str(caught.value))
    assert gradients(lambda model, x: model(x).sum(), ["one"])(model, X)[1] == {"one": None}


def test_no_gradient_inside_of_loops_and_rules(snapshot):
    loop = net(lambda self, x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, self.one(c[1])), (0, x))[1])

    def ruled(self, x):
        rule = jax.custom_jvp(lambda x: self.one(x))
        rule.defjvp(lambda primals, tangents: (self.one(*primals), tangents[0]))
        return rule(x)

    for name, model in (("while", loop), ("custom_jvp", net(ruled))):
        with pytest.raises(IntermediateError) as caught:
            gradients(squared, ["one"], while_loops="last")(model, X)
        snapshot(name, str(caught.value))


def test_the_value_of_a_rule_is_told_to_have_no_gradient_once():
    def ruled(self, x):
        rule = jax.custom_jvp(lambda x: self.one(x) + self.other(x))
        rule.defjvp(lambda primals, tangents: (self.one(*primals), tangents[0]))
        return rule(rule(x))

    with pytest.warns(
        NoGradientWarning, match=r"^one\[0\], one\[1\], other\[1\]: inside of a custom_jvp_call"
    ) as heard:
        ek.capture(call, ["one[0]", "one[1]", "other[1]"])(net(ruled), X)
    assert len(heard) == 1
