"""Under, over and between the other transforms of JAX and Equinox, on one device and on eight."""

# ruff: noqa: PLW0108 - a module or a jitted function is traced in another way than a lambda that calls it

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import equikd as ek
from equikd.intermediates import IntermediateError
from equikd.intermediates._mark import Name
from equikd.intermediates._options import Options
from equikd.intermediates._run import run_tapped
from equikd.intermediates._tap import tapped

WIDTH = 4
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (WIDTH,))
BATCH = jax.random.normal(jax.random.key(2), (8, WIDTH))


def call(model, *args, **kwargs):
    return model(*args, **kwargs)


def linear(seed=0):
    return eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(seed))


class Net(eqx.Module):
    """Two parts and a rule of how they are used."""

    one: Any
    other: Any
    rule: Callable[..., Any] = eqx.field(static=True, default=lambda self, x: self.other(jnp.tanh(self.one(x))))

    def __call__(self, *args):
        return self.rule(self, *args)


class Pair(Net):
    """What a person writes who wants the value."""

    def by_hand(self, x):
        inside = self.one(x)
        return self.other(jnp.tanh(inside)), inside


def by_hand(model, x):
    return model.by_hand(x)


def by_path(model, x):
    out, found = ek.capture(call, ["one"])(model, x)
    return out, found["one"]


PAIR = Pair(linear(), linear(1))


def test_nested_jits_that_are_cached(same):
    """The second block finds the program of the first, or of an earlier call, and still has its own value."""
    traces = []

    @eqx.filter_jit
    def run(part, x):
        traces.append(part)
        return part(x)

    model = Net(linear(), linear(1), lambda self, x: run(self.other, run(self.one, run(self.one, x))))
    capture = eqx.filter_jit(ek.capture(call, ["one[0]", "one[1]", "other"]))
    for scale in (1.0, 2.0):
        out, found = capture(model, scale * X)
        first = model.one(scale * X)
        np.testing.assert_allclose(found["one[0]"], first, rtol=1e-6)
        np.testing.assert_allclose(found["one[1]"], model.one(first), rtol=1e-5)
        same(found["other"], out)
    assert len(traces) == 2


def test_a_second_call_traces_nothing_again():
    """A tapped class is made once, so what JAX remembers of it is found again."""
    traces = []

    @eqx.filter_jit
    def run(part, x):
        traces.append(part)
        return part(x)

    model = Net(linear(), linear(1), lambda self, x: run(self.one, x))
    for _ in range(3):
        ek.capture(call, ["one"])(model, X)
    assert len(traces) == 1
    kinds = [type(tapped(model, [Name(("one",))]).one) for _ in range(2)]
    assert kinds[0] is kinds[1]


def test_the_order_of_calls_of_one_jitted_function():
    run = eqx.filter_jit(lambda part, x: part(x))
    model = Net(linear(), linear(1), lambda self, x: run(self.one, self.other(run(self.one, x))))
    names = [Name(("one",)), Name(("other",))]
    got = run_tapped(call, model, (X,), {}, names=names, options=Options())
    assert {name.at: [one.order for one in calls] for name, calls in got.calls.items()} == {
        ("one",): [0, 2],
        ("other",): [1],
    }


def test_explicit_shardings_of_a_jit_stay_constraints():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    everywhere, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data")))
    inputs = jax.device_put(BATCH, split)
    for sharding in (everywhere, split):
        batched = lambda model, xs, sharding=sharding: jax.jit(jax.vmap(lambda x: model(x)), out_shardings=sharding)(xs)
        out, _ = eqx.filter_jit(ek.capture(batched, ["one"]))(PAIR, inputs)
        assert out.sharding.is_equivalent_to(sharding, out.ndim)


def _loss(forward):
    def loss(model, xs):
        out, inside = jax.vmap(lambda x: forward(model, x))(xs)
        return jnp.mean(out**2) + jnp.mean(jnp.abs(inside)), inside

    return eqx.filter_value_and_grad(loss, has_aux=True)


def test_an_ensemble_by_vmap(same):
    made = lambda key: Pair(*(eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in jax.random.split(key)))
    members = eqx.filter_vmap(made)(jax.random.split(KEY, 3))
    step = lambda forward: eqx.filter_jit(eqx.filter_vmap(_loss(forward), in_axes=(eqx.if_array(0), None)))
    captured = step(by_path)(members, BATCH)
    same(captured, step(by_hand)(members, BATCH))
    assert captured[0][1].shape == (3, 8, WIDTH)


def test_an_ensemble_inside_of_the_model(same):
    made = lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key)
    model = Net(
        eqx.filter_vmap(made)(jax.random.split(KEY, 3)), linear(1), lambda self, x: self.other(each(self.one, x).sum(0))
    )
    each = eqx.filter_vmap(lambda part, x: part(x), in_axes=(eqx.if_array(0), None))
    _, found = eqx.filter_jit(ek.capture(call, ["one"]))(model, X)
    same(found["one"], eqx.filter_jit(each)(model.one, X))


def test_gradient_accumulation_as_a_scan(same):
    def accumulated(forward):
        def step(total, xs):
            (_, inside), gradients = _loss(forward)(PAIR, xs)
            return jax.tree.map(jnp.add, total, gradients), inside

        zeros = jax.tree.map(jnp.zeros_like, eqx.filter(PAIR, eqx.is_array))
        return jax.jit(lambda: jax.lax.scan(step, zeros, BATCH.reshape(4, 2, WIDTH)))()

    same(accumulated(by_path), accumulated(by_hand))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
        jax.hessian,
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: jax.grad(lambda x: jax.lax.cond(x[0] > 9, jnp.sum, f, x)),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: lambda x: jax.linearize(f, x)[1](x),
        lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0]),
    ],
    ids=["grad of grad", "hessian", "remat", "cond", "jvp", "linearize", "scan"],
)
def test_under_other_transforms(transform, same):
    total = lambda forward: lambda x: jnp.sum(forward(PAIR, x)[0] ** 2) + jnp.sum(jnp.sin(forward(PAIR, x)[1]))
    same(jax.jit(transform(total(by_path)))(X), jax.jit(transform(total(by_hand)))(X))


DERIVATIVES: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x: jax.grad(f)(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "remat": lambda f, x: jax.grad(eqx.filter_checkpoint(f))(x),
    "scan": lambda f, x: jax.grad(lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=1)[0])(x),
}


@pytest.mark.parametrize("kind", DERIVATIVES)
def test_derivatives_inside_of_the_model(kind, same):
    """As in models of energies: each value comes out once, that of the forward pass."""
    model = Net(linear(), linear(1), lambda self, x: DERIVATIVES[kind](lambda x: jnp.sin(self.one(x)).sum(), x))
    out, found = eqx.filter_jit(ek.capture(call, ["one"]))(model, X)
    np.testing.assert_allclose(out, eqx.filter_jit(call)(model, X), rtol=1e-6)
    same(found["one"].reshape(-1, WIDTH)[0], eqx.filter_jit(model.one)(X))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes(kind, same):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    everywhere, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data")))
    with jax.set_mesh(mesh):
        model = jax.tree.map(lambda leaf: jax.device_put(leaf, everywhere) if eqx.is_array(leaf) else leaf, PAIR)
        inputs = jax.device_put(BATCH, split)
        values = lambda forward: eqx.filter_jit(lambda model, xs: jax.vmap(lambda x: forward(model, x))(xs))(
            model, inputs
        )
        (out, inside), expected = values(by_path), values(by_hand)
        assert inside.sharding.is_equivalent_to(split, 2)
        assert inside.sharding.is_equivalent_to(expected[1].sharding, 2)
        same((out, inside), expected)
        if kind is AxisType.Auto:
            steps = [eqx.filter_jit(_loss(forward))(model, inputs) for forward in (by_path, by_hand)]
            same(*steps)


def test_shard_map_is_refused_outside_and_works_inside(same):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
    outside = lambda model, xs: jax.shard_map(lambda xs: jax.vmap(lambda x: model(x))(xs), **specs)(xs)
    with pytest.raises(IntermediateError, match="inside of a shard_map"):
        eqx.filter_jit(ek.capture(outside, ["one"]))(PAIR, BATCH)
    inside = lambda forward: jax.jit(jax.shard_map(lambda xs: jax.vmap(lambda x: forward(PAIR, x))(xs), **specs))
    same(inside(by_path)(BATCH), inside(by_hand)(BATCH))


RULES = {
    "cond": lambda self, x: jax.lax.cond(jnp.array(True), lambda x: self.one(x), lambda x: x, x),
    "while": lambda self, x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, self.one(c[1])), (0, x))[1],
}


@pytest.mark.parametrize("rule", RULES)
def test_substitutes_on_meshes(rule, same):
    """What stands for a value has its sharding, and varies over the axes of a mesh that it varies over."""
    model = Net(lambda x: jnp.sin(x), None, RULES[rule])
    capture = ek.capture(call, ["one"], absent="nan", while_loops="last")
    out, expected = eqx.filter_jit(capture)(model, BATCH)
    split = PartitionSpec("data")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(lambda xs: capture(model, xs), mesh=mesh, in_specs=split, out_specs=split)
    same(jax.jit(mapped)(BATCH), (out, expected))
    with jax.set_mesh(mesh := jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        inputs = jax.device_put(BATCH, NamedSharding(mesh, split))
        same(eqx.filter_jit(capture)(model, inputs), (out, expected))


def test_checks_of_jax_find_nothing():
    step = lambda model, xs: _loss(by_path)(model, xs)[0][0]
    with jax.checking_leaks():
        eqx.filter_jit(step)(PAIR, BATCH)
    with jax.enable_checks(True):
        eqx.filter_jit(step)(PAIR, BATCH)
        step(PAIR, BATCH)


def test_disabled_jit_changes_nothing(same):
    model = Net(
        linear(), linear(1), lambda self, x: jax.lax.scan(lambda c, _: (self.one(c), None), x, None, length=3)[0]
    )
    expected = ek.capture(call, ["one"])(model, X)
    with jax.disable_jit():
        found = ek.capture(call, ["one"])(model, X)
    np.testing.assert_allclose(found[1]["one"], expected[1]["one"], rtol=1e-6)


def test_concrete_arrays_may_decide_as_they_do_without_capture(same):
    model = Net(linear(), jnp.array(2), lambda self, x: self.one(x) if int(self.other) == 2 else None)
    out, found = ek.capture(call, ["one"])(model, X)
    same((out, found["one"]), (model(X), model.one(X)))


def test_wide_numbers_of_numpy(same):
    model = Net(
        np.float64(3.0) * np.ones(WIDTH),
        jnp.sin,
        lambda self, x: self.other(jax.lax.mul(x, jnp.asarray(self.one)) + self.one),
    )
    for wrap in (lambda f: f, eqx.filter_jit):
        out, found = wrap(ek.capture(call, ["other"]))(model, X)
        same((out, found["other"]), (wrap(call)(model, X), out))


@pytest.mark.filterwarnings("ignore:.*no gradient flows")
def test_callbacks_run_once_and_in_order(capfd):
    def rule(self, x):
        jax.debug.print("a {}", x[0], ordered=True)

        @jax.custom_jvp
        def inside(x):
            jax.debug.print("b", ordered=True)
            return self.one(x)

        inside.defjvp(lambda primals, tangents: (inside(*primals), tangents[0]))
        x = inside(x)
        jax.debug.print("c", ordered=True)
        return jax.pure_callback(np.sin, x, self.other(x))

    for wrap in (lambda f: f, eqx.filter_jit):
        wrap(ek.capture(call, ["one", "other"]))(Net(linear(), linear(1), rule), jnp.ones(WIDTH))
        jax.effects_barrier()
        assert capfd.readouterr().out == "a 1.0\nb\nc\n"


def test_scopes_of_names_are_kept():
    def rule(self, x):
        with jax.named_scope("outer"):
            run = jax.jit(lambda x: self.one(x))
            with jax.named_scope("inner"):
                return jax.lax.scan(lambda c, _: (jnp.sin(run(c)), None), x, None, length=2)[0]

    model = Net(linear(), linear(1), rule)
    program = jax.jit(lambda x: ek.capture(call, ["one"])(model, x)).lower(X).compile().as_text()
    assert "outer/inner/" in program


@pytest.mark.slow
def test_training_is_the_same_to_the_bit(same):
    optimizer = optax.adam(1e-2)

    def trained(forward):
        @eqx.filter_jit(donate="all-except-first")
        def step(xs, model, state):
            (loss, _), gradients = _loss(forward)(model, xs)
            updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, updates), state, loss

        model = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, PAIR)
        state, losses = optimizer.init(eqx.filter(model, eqx.is_array)), []
        for _ in range(5):
            model, state, loss = step(BATCH, model, state)
            losses.append(loss)
        return model, losses

    same(trained(by_path), trained(by_hand))


def test_a_very_deep_model_and_one_of_many_parts(same):
    class Nested(eqx.Module):
        inner: Any

        def __call__(self, x):
            return x if self.inner is None else self.inner(x) + 1

    model = None
    for _ in range(100):
        model = Nested(model)
    assert len(ek.capture(call, ["**"])(model, X)[1]) == 99

    many = Net([jnp.sin] * 300, None, lambda self, x: [part(x) for part in self.one][-1])
    assert len(ek.capture(call, ["one[*]"])(many, X)[1]) == 300


def _used() -> list[weakref.ref[Any]]:
    """Captures of a model that is not used afterwards."""
    model, probe = Net(linear(), linear(1)), jnp.ones(WIDTH)
    reduce = lambda value: value @ probe
    jax.block_until_ready(jax.jit(lambda x: ek.capture(call, {"one": reduce})(model, x))(X))
    ek.capture(call, {"one": reduce, "other": jnp.sum})(model, X)
    return [weakref.ref(one) for one in (model.one.weight, model, probe, reduce)]


def test_models_are_let_go():
    """What is kept of a capture is classes and names, no arrays."""
    watched = _used()
    jax.clear_caches()
    gc.collect()
    assert [one() for one in watched] == [None] * 4


def test_functions_that_reduce_may_be_of_any_kind(same):
    for reduce in (jnp.sum, X.__add__, functools.partial(jnp.max, axis=0), abs, eqx.nn.Lambda(jnp.sin)):
        found = ek.capture(call, {"one": reduce})(PAIR, X)[1]["one"]
        same(found, reduce(PAIR.one(X)))
