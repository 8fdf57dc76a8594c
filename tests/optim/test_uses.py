"""Schedules at work: in an optimizer, in a loss, with references, in a trainer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.config import lazy, override, ref, resolve, validate
from equikd.errors import ConfigError
from equikd.optim import (
    Constant,
    Cosine,
    CosineOneCycle,
    Exponential,
    InverseSquareRoot,
    Join,
    Linear,
    LinearOneCycle,
    PiecewiseConstant,
    Polynomial,
    WarmupCosine,
    WarmupExponential,
    WarmupStableDecay,
)
from tests.train._small import Plain, assert_same, differs, small

NUM_STEPS = ref("num_steps")
# Each with a reference where it has a count that may be one, and one of its own numbers to edit.
SCHEDULES = {
    "constant": (Constant(0.1), "value"),
    "linear": (Linear(0.1, 0.0, NUM_STEPS), "init_value"),
    "polynomial": (Polynomial(0.1, 0.0, 2.0, NUM_STEPS), "power"),
    "cosine": (Cosine(0.1, NUM_STEPS), "init_value"),
    "exponential": (Exponential(0.1, NUM_STEPS, 0.5, end_value=0.01), "decay_rate"),
    "warmup_cosine": (WarmupCosine(0.01, 0.1, 3, NUM_STEPS), "warmup_steps"),
    "warmup_exponential": (WarmupExponential(0.01, 0.1, 3, NUM_STEPS, 0.5), "decay_rate"),
    "inverse_square_root": (InverseSquareRoot(0.01, 0.1, NUM_STEPS), "peak_value"),
    "stable": (WarmupStableDecay(0.01, 0.1, 3, 4, NUM_STEPS), "cooldown_steps"),
    "cosine_cycle": (CosineOneCycle(NUM_STEPS, 0.1), "div_factor"),
    "linear_cycle": (LinearOneCycle(NUM_STEPS, 0.1), "pct_final"),
    "piecewise": (PiecewiseConstant(0.1, ((3, 0.5), (NUM_STEPS, 0.5))), "boundaries_and_scales[0][0]"),
    "join": (Join((Linear(0.0, 0.1, 3), Cosine(0.1, NUM_STEPS)), (3,)), "boundaries[0]"),
}


def rates(optimizer, steps=5):
    """The rates that an optimizer such as sgd applies to its first updates."""
    params = jnp.zeros(())
    state, seen = optimizer.init(params), []
    for _ in range(steps):
        updates, state = optimizer.update(jnp.ones(()), state, params)
        seen.append(-float(updates))
    return seen


def test_the_first_update_sees_step_0():  # case 12
    assert rates(resolve(lazy(optax.sgd)(Linear(1.0, 0.0, 4)))) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_inside_a_chain():
    chain = lazy(optax.chain)(
        lazy(optax.clip_by_global_norm)(1.0),
        lazy(optax.scale_by_schedule)(PiecewiseConstant(1.0, ((2, 0.5),))),
        lazy(optax.scale_by_learning_rate)(Join((Constant(1.0), Linear(1.0, 0.0, 2)), (3,))),
    )
    assert rates(resolve(chain)) == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_members_of_a_join_may_be_nodes_and_functions():
    members = (lazy(optax.linear_schedule)(0.0, 1.0, 2), lambda count: 3.0, Constant(0.5))
    schedule = validate(Join(members, (2, 4)))
    expected = [0.0, 0.5, 3.0, 3.0, 0.5]
    assert [float(schedule(count)) for count in range(5)] == expected  # on the host, as it is written
    assert rates(resolve(lazy(optax.sgd)(schedule))) == expected
    with pytest.raises(ConfigError, match=r"schedules\[1\].*decay_steps must be positive, got 0"):
        validate(lazy(optax.sgd)(Join((Constant(1.0), Cosine(1.0, 0)), (5,))))


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_a_traced_argument_of_an_optimizer(name, compilations):  # case 6
    @jax.jit
    def update(node, count):
        optimizer = resolve(node)
        params = {"w": jnp.ones(2, jnp.bfloat16)}
        state = optax.tree_utils.tree_set(optimizer.init(params), count=count)
        return optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)[0]["w"]

    schedule, path = SCHEDULES[name]
    node = lazy(optax.adamw)(schedule)
    node = override(node, {ek.tree.join(at): 12 for at, value in ek.tree.walk(node) if value == NUM_STEPS})
    first = update(node, jnp.int32(9))
    assert first.dtype == jnp.bfloat16
    old = ek.tree.get(node, f"learning_rate.{path}")
    edited = override(node, {f"learning_rate.{path}": old + 2 if type(old) is int else old * 0.5})
    jax.tree.leaves(edited)
    compilations.clear()
    update(edited, jnp.int32(9))
    assert compilations.names == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_a_trainer_as_rate_and_as_weight(name, compilations):
    schedule, path = SCHEDULES[name]

    def loss(weight):
        return {"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label", weight=weight)}

    def trainer(num_steps):
        optimizer = lazy(optax.sgd)(schedule)
        return small(lazy(Plain)(), optimizer=optimizer, losses=loss(schedule), num_steps=num_steps)

    before = trainer(12).train()
    old = ek.tree.get(schedule, path)
    new = old + 1 if type(old) is int else old * 0.9
    compilations.clear()
    longer = trainer(14).train()
    other = override(trainer(12), {f"optimizer.learning_rate.{path}": new}).train()
    heavier = override(trainer(12), {f"losses.ce.weight.{path}": new}).train()
    assert compilations.names == []
    assert int(longer.state.step) == 14
    assert differs(before.state, other.state)
    assert before.metrics["train/weighted/ce"] != heavier.metrics["train/weighted/ce"]


def test_a_referred_boundary_is_the_number_itself(compilations):
    def trainer(num_steps, boundary, **shared):
        rate = Join((Constant(0.1), PiecewiseConstant(0.2, ((1, 0.5),))), (boundary,))
        return small(lazy(Plain)(), optimizer=lazy(optax.sgd)(rate), num_steps=num_steps, shared=shared)

    referred = trainer(12, ref("shared.turn"), turn=4).train()
    assert_same(referred.state, trainer(12, 4).train().state)
    compilations.clear()
    later = trainer(12, ref("shared.turn"), turn=6).train()
    assert compilations.names == []
    assert differs(referred.state, later.state)


def test_a_gradient_reaches_the_numbers_of_a_schedule_through_training():
    def trained(schedule):
        optimizer = resolve(lazy(optax.sgd)(schedule))

        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(2 * params, state, params)  # the gradient of x^2
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (jnp.ones(()), optimizer.init(jnp.ones(()))), length=4)[0][0]

    schedule = WarmupStableDecay(0.01, 0.1, 1, 2, 4, end_value=0.05, power=0.5)
    slope = eqx.filter_jit(eqx.filter_grad(trained))(schedule)
    by_hand = eqx.filter_grad(lambda s: jnp.prod(jnp.stack([1 - 2 * s(count) for count in range(4)])))(schedule)
    for name in ("init_value", "peak_value", "end_value", "power"):
        np.testing.assert_allclose(getattr(slope, name), getattr(by_hand, name), rtol=1e-4)
        assert abs(getattr(slope, name)) > 1e-3
