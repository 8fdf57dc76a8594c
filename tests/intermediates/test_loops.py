"""Values out of scans, loops, branches, rematerialised functions and functions with their own gradient."""

# ruff: noqa: PLW0108 - a module or a jitted function is traced in another way than a lambda that calls it

import functools
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import equikd as ek
from equikd.intermediates import IntermediateError, NoGradientWarning

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
    rule: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, *args):
        return self.rule(self, *args)


def net(rule, one=None, other=None):
    return Net(linear() if one is None else one, linear(1) if other is None else other, rule)


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint], ids=["plain", "checkpoint"])
def test_a_scan_over_layers_stacks_their_values(wrap, same):
    """As a person would write it, with the values among what the scan gives; gradients through both."""

    def forward(self, x, give=False):
        dynamic, static = eqx.partition(self.one, eqx.is_array)

        def body(x, layer):
            inside = eqx.combine(layer, static)(x)
            return x + jnp.tanh(inside), inside if give else None

        x, inside = jax.lax.scan(wrap(body), x, dynamic)
        return (self.other(x), inside) if give else self.other(x)

    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(jax.random.split(KEY, 3))
    model = net(forward, one=layers)

    def by_path(model, x):
        out, found = ek.capture(call, ["one"])(model, x)
        return out, found["one"]

    def loss(model, forward):
        out, inside = jax.vmap(lambda x: forward(model, x))(jnp.stack([X, 2 * X]))
        return jnp.mean(out**2) + jnp.mean(inside**3), inside

    step = lambda forward: eqx.filter_jit(eqx.filter_value_and_grad(lambda m: loss(m, forward), has_aux=True))(model)
    captured = step(by_path)
    same(captured, step(lambda model, x: forward(model, x, give=True)))
    assert captured[0][1].shape == (2, 3, WIDTH)


def test_axes_of_a_value_are_loops_then_maps_then_its_own():
    inner = lambda self, x: jax.lax.scan(lambda c, _: (self.one(c), None), x, None, length=2)[0]
    model = net(lambda self, x: jax.lax.scan(lambda c, _: (inner(self, c), None), x, None, length=3)[0])
    inside = jax.vmap(lambda x: ek.capture(call, ["one"])(model, x)[1]["one"])(jnp.stack([X] * 5))
    outside = ek.capture(lambda model, x: jax.vmap(model)(x), ["one"])(model, jnp.stack([X] * 5))[1]["one"]
    assert (inside.shape, outside.shape) == ((5, 3, 2, WIDTH), (3, 2, 5, WIDTH))


def test_the_batch_axis_comes_first_wherever_the_model_has_it(same):
    model = net(lambda self, x: self.one(x.T + self.other(jnp.arange(3.0))), eqx.nn.Lambda(jnp.sin), jnp.cos)
    x = jax.random.normal(KEY, (3, WIDTH, 5))
    batched = lambda model, x: jax.vmap(model, in_axes=2, out_axes=2)(x)
    out, found = ek.capture(batched, ["one", "other"])(model, x)
    assert out.shape == (WIDTH, 3, 5)
    same(found["one"], jnp.moveaxis(out, 2, 0))
    same(found["other"], jnp.cos(jnp.arange(3.0)))  # the same for all examples: no axis


def test_the_number_of_a_call_in_a_scan_is_that_of_an_iteration(same):
    cell = eqx.nn.GRUCell(WIDTH, WIDTH, key=KEY)
    inputs = jnp.stack([X, 2 * X, 3 * X])
    forward = lambda self, xs: jax.lax.scan(lambda h, x: ((h := self.one(x, h)), h), jnp.zeros(WIDTH), xs)
    paths = ["one", "one[-1]", "one[0]", "one[1]"]
    (last, states), found = eqx.filter_jit(ek.capture(call, paths))(net(forward, one=cell), inputs)
    same(found, {"one": states, "one[-1]": last, "one[0]": states[0], "one[1]": states[1]})
    with pytest.raises(IntermediateError, match="3 iterations"):
        ek.capture(call, ["one[3]"])(net(forward, one=cell), inputs)


def test_a_number_of_a_scan_where_the_value_begins_with_no_array(same):
    part = lambda x: {"a": "text", "b": np.arange(2), "c": jnp.sin(x)}
    model = net(lambda self, x: jax.lax.scan(lambda c, _: (self.one(c)["c"], None), x, None, length=2)[0], one=part)
    out, found = ek.capture(call, ["one[1]"])(model, X)
    same(found["one[1]"], {"a": "text", "b": np.arange(2), "c": out})


def test_scans_keep_their_settings(same):
    rule = lambda self, xs: jax.lax.scan(lambda c, x: ((c := self.one(c + x)), c), X, xs, reverse=True, unroll=2)
    inputs = jax.random.normal(KEY, (5, WIDTH))
    capture = ek.capture(call, ["one"])
    (out, found), expected = eqx.filter_jit(capture)(net(rule), inputs), eqx.filter_jit(call)(net(rule), inputs)
    same((out, found["one"]), (expected, expected[1]))
    equations = lambda f: [e for e in jax.make_jaxpr(f)(inputs).eqns if e.primitive.name == "scan"]
    (one,), (other,) = equations(lambda x: capture(net(rule), x)), equations(net(rule))
    assert all(one.params[name] == other.params[name] for name in ("length", "reverse", "unroll"))


def test_map_in_batches_has_two_loops(same):
    model, inputs = net(lambda self, xs: jax.lax.map(self.one, xs, batch_size=2)), jnp.stack([X, 2 * X, 3 * X])
    with pytest.raises(IntermediateError, match="called 2 times"):
        ek.capture(call, ["one"])(model, inputs)
    out, found = ek.capture(call, ["one[0]", "one[1]"])(model, inputs)
    same((found["one[0]"], found["one[1]"]), (out[:2].reshape(1, 2, WIDTH), out[2:]))


def times(count):
    return lambda self, x: jax.lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, self.one(c[1])), (0, x))[1]


def test_a_while_loop_gives_the_last_value_on_request(same):
    with pytest.raises(IntermediateError, match="as many values as it has iterations"):
        ek.capture(call, ["one"])(net(times(3)), X)
    out, found = eqx.filter_jit(ek.capture(call, ["one"], while_loops="last"))(net(times(3)), X)
    same((out, found["one"]), (eqx.filter_jit(call)(net(times(3)), X), out))


def test_a_while_loop_without_iterations_gives_nan(same):
    counted = net(times(0), one=lambda x: jax.lax.stop_gradient(x))
    out, found = ek.capture(call, ["one"], while_loops="last")(counted, X)
    same((out, found["one"]), (X, jnp.full(WIDTH, jnp.nan)))
    integers = ek.capture(call, ["one"], while_loops="last")(counted, jnp.arange(3))[1]["one"]
    same(integers, jnp.zeros(3, jnp.int32))


def test_a_while_loop_under_vmap_and_in_a_scan(same):
    steps = lambda self, n: jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, self.one(c[1])), (0, X))[1]
    capture = ek.capture(call, ["one"], while_loops="last")
    counts = jnp.array([1, 3, 2])
    out, found = jax.vmap(lambda n: capture(net(steps), n))(counts)
    same(out, jax.vmap(net(steps))(counts))
    same(found["one"], out)
    scanned = net(lambda self, counts: jax.lax.map(lambda n: steps(self, n), counts))
    out, found = capture(scanned, counts)
    same(found["one"], out)


def test_a_condition_of_a_while_loop_gives_nothing():
    rule = lambda self, x: jax.lax.while_loop(lambda c: (c + 0 * self.one(c))[0] < 3, lambda c: c + 1, x)
    with pytest.raises(IntermediateError, match="computed in a while loop") as caught:
        ek.capture(call, ["one"], while_loops="last")(net(rule), X)
    assert "last" not in str(caught.value)


def branching(self, choice, x):
    return jax.lax.cond(choice, lambda x: self.one(x), lambda x: self.one(self.other(x)), x)


@pytest.mark.parametrize("choice", [True, False])
def test_a_cond_gives_the_value_of_the_branch_taken(choice, same):
    model, choice = net(branching), jnp.array(choice)
    out, found = eqx.filter_jit(ek.capture(call, ["one"]))(model, choice, X)
    same((out, found["one"]), (eqx.filter_jit(call)(model, choice, X), out))
    loss = lambda forward: eqx.filter_jit(eqx.filter_grad(forward))(model)
    captured = loss(lambda model: ek.capture(call, ["one"])(model, choice, X)[1]["one"].sum())
    same(captured, loss(lambda model: model(choice, X).sum()))


def test_what_some_branches_compute_needs_a_substitute(same):
    model, taken, other = net(branching), jnp.array(False), jnp.array(True)
    with pytest.raises(IntermediateError, match="some branches"):
        ek.capture(call, ["other"])(model, taken, X)
    for absent, number in (("zeros", 0.0), ("nan", jnp.nan)):
        run = eqx.filter_jit(ek.capture(call, ["other"], absent=absent))
        same(run(model, taken, X)[1]["other"], eqx.filter_jit(model.other)(X))
        same(run(model, other, X)[1]["other"], jnp.full(WIDTH, number))
    loss = lambda model, choice: ek.capture(call, ["other"], absent="zeros")(model, choice, X)[1]["other"].sum()
    assert jnp.all(eqx.filter_grad(loss)(model, other).other.weight == 0)
    same(eqx.filter_grad(loss)(model, taken).other.weight, jnp.tile(X, (WIDTH, 1)))


@pytest.mark.parametrize("absent", ["zeros", "nan"])
def test_substitutes_of_keys_integers_and_halves(absent, same):
    def part(x):
        return {"key": KEY, "int": jnp.int8(3), "half": x.astype(jnp.bfloat16), "bool": x > 0, "complex": 1j * x}

    rule = lambda self, choice, x: jax.lax.cond(choice, lambda x: (self.one(x)["half"], x)[1], lambda x: -x, x)
    capture = eqx.filter_jit(ek.capture(call, ["one"], absent=absent))
    same(capture(net(rule, one=part), jnp.array(True), X)[1]["one"], part(X))
    found = capture(net(rule, one=part), jnp.array(False), X)[1]["one"]
    number = 0 if absent == "zeros" else jnp.nan
    of_key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32))
    numbers = [jnp.full(WIDTH, number, dtype) for dtype in (jnp.bfloat16, jnp.complex64)]
    same(
        found,
        {"key": of_key, "int": jnp.int8(0), "half": numbers[0], "bool": jnp.zeros(4, bool), "complex": numbers[1]},
    )


def test_a_switch_whose_branches_call_a_part_a_different_number_of_times(same):
    rules = [lambda self, x: x, lambda self, x: self.one(x), lambda self, x: self.one(self.one(x))]
    model = net(lambda self, i, x: jax.lax.switch(i, [functools.partial(rule, self) for rule in rules], x))
    run = eqx.filter_jit(ek.capture(call, ["one[0]", "one[1]"], absent="nan"))
    once = model.one(X)
    values = [jnp.full(WIDTH, jnp.nan), once, model.one(once)]
    same([run(model, jnp.int32(i), X)[1] for i in range(3)], [
        {"one[0]": values[0], "one[1]": values[0]},
        {"one[0]": values[1], "one[1]": values[0]},
        {"one[0]": values[1], "one[1]": values[2]},
    ])  # fmt: skip


def test_shapes_that_differ_between_branches_are_refused():
    rule = lambda self, choice, x: jax.lax.cond(choice, lambda x: self.one(x).sum(), lambda x: self.one(x[:2]).sum(), x)
    with pytest.raises(IntermediateError, match=r"different shapes in the branches(.|\n)*float32\[2\]"):
        ek.capture(call, ["one"])(net(rule, one=jnp.sin), jnp.array(True), X)
    reduced = ek.capture(call, {"one": jnp.sum})(net(rule, one=jnp.sin), jnp.array(True), X)[1]["one"]
    np.testing.assert_allclose(reduced, jnp.sin(X).sum(), rtol=1e-6)


def test_text_that_differs_between_branches_is_refused():
    part = lambda x, text: {"y": x, "text": text}
    rule = lambda texts: lambda self, x: jax.lax.cond(x[0] > 9, *[lambda x, t=t: self.one(x, t)["y"] for t in texts], x)
    with pytest.raises(IntermediateError, match="different parts, besides arrays"):
        ek.capture(call, ["one"])(net(rule("ab"), one=part), X)
    assert ek.capture(call, ["one"])(net(rule("aa"), one=part), X)[1]["one"]["text"] == "a"


def test_under_vmap_both_branches_run_and_both_count(same):
    batched = lambda model, choices, xs: jax.vmap(model)(choices, xs)
    choices, inputs = jnp.array([True, False]), jnp.stack([X, X])
    out, found = ek.capture(batched, ["one[0]", "one[1]", "other"])(net(branching), choices, inputs)
    same(out, jnp.stack([found["one[1]"][0], found["one[0]"][1]]))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoints_keep_their_policy(policy, same):
    model = net(
        lambda self, x: self.other(eqx.filter_checkpoint(lambda one, x: jnp.sin(one(x)), policy=policy)(self.one, x))
    )

    def loss(model, by_hand):
        if by_hand:
            wrapped = eqx.filter_checkpoint(lambda one, x: (jnp.sin(y := one(x)), y), policy=policy)
            out, inside = wrapped(model.one, X)
            return model.other(out).sum() + inside.sum()
        out, found = ek.capture(call, ["one"])(model, X)
        return out.sum() + found["one"].sum()

    step = lambda by_hand: eqx.filter_jit(eqx.filter_value_and_grad(lambda model: loss(model, by_hand)))(model)
    same(step(False), step(True))
    jaxpr = jax.make_jaxpr(lambda x: ek.capture(call, ["one"])(model, x))(X)
    (equation,) = [equation for equation in jaxpr.eqns if "policy" in equation.params]
    assert equation.params["policy"] is policy
    assert equation.params["prevent_cse"] is True


def _custom(make):
    """A model whose part is used inside of a function with its own gradient rule, and how often that rule ran."""

    def rule(self, x):
        function = make(lambda x: self.one(x))
        return self.other(function(x))

    return net(rule)


def _with_jvp(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: (function(*primals), 3 * tangents[0]))
    return wrapped


def _with_vjp(function):
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda x: (function(x), None), lambda _, cotangent: (3 * cotangent,))
    return wrapped


@pytest.mark.parametrize("make", [_with_jvp, _with_vjp])
def test_functions_with_their_own_gradient_keep_it(make, same):
    model = _custom(make)
    with pytest.warns(NoGradientWarning, match=r"one: inside of a custom_(jvp|vjp)_call, so no gradient") as heard:
        out, found = eqx.filter_jit(ek.capture(call, ["one", "other"]))(model, X)
    assert len(heard) == 1
    same((out, found["one"]), (eqx.filter_jit(call)(model, X), eqx.filter_jit(model.one)(X)))

    @jax.grad
    def gradient(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoGradientWarning)
            out, found = ek.capture(call, ["one"])(model, x)
        return out.sum() + 100 * found["one"].sum()

    same(jax.jit(gradient)(X), jax.jit(jax.grad(lambda x: model(x).sum()))(X))


def test_equinox_functions_with_their_own_gradient(same):
    @eqx.filter_custom_vjp
    def function(part, x):
        return part(x)

    function.def_fwd(lambda _, part, x: (part(x), None))
    function.def_bwd(lambda _, g, __, part, x: jax.tree.map(jnp.ones_like, eqx.filter(part, eqx.is_inexact_array)))
    model = net(lambda self, x: function(self.one, x))
    with pytest.warns(NoGradientWarning):
        out, found = ek.capture(call, ["one"])(model, X)
    same(found["one"], out)

    def loss(model):
        out, found = ek.capture(call, ["one"])(model, X)
        return out.sum() + found["one"].sum()

    with pytest.warns(NoGradientWarning):
        assert jnp.all(eqx.filter_grad(loss)(model).one.weight == 1)


def test_functions_with_their_own_rule_of_vmap(same):
    model = net(lambda self, x: jax.custom_batching.sequential_vmap(lambda x: self.one(x))(x))
    with pytest.warns(NoGradientWarning):
        same(ek.capture(call, ["one"])(model, X)[1]["one"], model.one(X))
    batched = lambda model, x: jax.vmap(model)(x)
    inputs = jnp.stack([X, 2 * X])
    with pytest.warns(NoGradientWarning):  # it became a scan
        same(ek.capture(batched, ["one"])(model, inputs)[1]["one"], jax.lax.map(model.one, inputs))


@pytest.mark.parametrize(("kind", "options"), [
    ("lax", {"while_loops": "last"}),
    ("checkpointed", {"while_loops": "last"}),
    ("bounded", {"while_loops": "last", "absent": "nan"}),
])  # fmt: skip
def test_loops_of_equinox(kind, options, same):
    def rule(self, x):
        step = lambda carry: (carry[0] + 1, self.one(carry[1]))
        return eqxi.while_loop(lambda carry: carry[0] < 3, step, (0, x), max_steps=4, kind=kind)[1]

    with pytest.raises(IntermediateError):
        ek.capture(call, ["one"])(net(rule), X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGradientWarning)
        out, found = ek.capture(call, ["one"], **options)(net(rule), X)
    same(out, net(rule)(X))
    value = np.asarray(found["one"]).reshape(-1, WIDTH)
    same(value[~np.isnan(value).any(1)][-1], np.asarray(out))


def test_what_hides_its_program_is_not_called():
    model = net(lambda self, x: eqxi.noinline(lambda x: self.one(x))(x))
    with pytest.raises(IntermediateError):
        ek.capture(call, ["one"])(model, X)


WRAPS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "cond": lambda f: lambda x: jax.lax.cond(jnp.array(True), f, f, x),
}


@pytest.mark.slow
@given(st.lists(st.sampled_from(sorted(WRAPS)), max_size=4))
@settings(max_examples=25)
def test_any_nesting_of_transforms_gives_the_values(kinds):
    wrapped = lambda self: functools.reduce(lambda f, kind: WRAPS[kind](f), kinds, lambda x: jnp.tanh(self.one(x)))
    model = net(lambda self, x: self.other(wrapped(self)(x)))

    def loss(model, capture):
        if not capture:
            return model(X).sum() + jnp.sum(model.one(X) ** 2), model.one(X)
        out, found = ek.capture(call, ["one", "other"])(model, X)
        return out.sum() + jnp.sum(found["one"] ** 2), found["one"].reshape(WIDTH)

    step = lambda capture: eqx.filter_value_and_grad(lambda model: loss(model, capture), has_aux=True)(model)
    for one, other in zip(jax.tree.leaves(step(True)), jax.tree.leaves(step(False)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
