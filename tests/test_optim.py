"""Schedules: optax's values, traced numbers, step 0 at the first update, and their two uses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from equikd.config import from_json, lazy, override, ref, resolve, to_json, validate
from equikd.errors import ConfigError
from equikd.optim import Constant, Cosine, Linear, Schedule, WarmupCosine

PAIRS = {
    "constant": (Constant(0.3), optax.constant_schedule(0.3)),
    "linear": (Linear(0.1, 2.0, 40), optax.linear_schedule(0.1, 2.0, 40)),
    "linear_later": (Linear(2.0, 0.1, 30, transition_begin=7), optax.linear_schedule(2.0, 0.1, 30, 7)),
    "linear_never": (Linear(2.0, 0.1, 0), optax.linear_schedule(2.0, 0.1, 0)),
    "cosine": (Cosine(3e-4, 40), optax.cosine_decay_schedule(3e-4, 40)),
    "cosine_floor": (Cosine(0.5, 33, alpha=0.1, exponent=2.0), optax.cosine_decay_schedule(0.5, 33, 0.1, 2.0)),
    "warmup": (WarmupCosine(0.0, 3e-4, 10, 40), optax.warmup_cosine_decay_schedule(0.0, 3e-4, 10, 40)),
    "warmup_all": (
        WarmupCosine(1e-5, 0.7, 5, 37, end_value=1e-3, exponent=1.5),
        optax.warmup_cosine_decay_schedule(1e-5, 0.7, 5, 37, 1e-3, 1.5),
    ),
    "warmup_none": (WarmupCosine(1e-5, 0.7, 0, 40, 0.1), optax.warmup_cosine_decay_schedule(1e-5, 0.7, 0, 40, 0.1)),
    "peak_of_0": (WarmupCosine(0.1, 0.0, 5, 40, 0.1), optax.warmup_cosine_decay_schedule(0.1, 0.0, 5, 40, 0.1)),
}
COUNTS = [*range(48), 1000, 2**30]  # both ends and beyond


@pytest.mark.parametrize("name", PAIRS)
def test_equals_optax(name):
    ours, theirs = PAIRS[name]
    compiled = jax.jit(lambda schedule, count: resolve(schedule)(count) + jnp.zeros(()))
    expected = np.array([theirs(count) for count in COUNTS])
    # 1 + cos cancels near the end of the decay; there the error is 1e-7 of the schedule's scale, in optax too.
    tolerances = {"rtol": 1e-6, "atol": 1e-6 * np.abs(expected).max()}
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose([ours(count) for count in COUNTS], expected, **tolerances)
        np.testing.assert_allclose([compiled(ours, jnp.int32(count)) for count in COUNTS], expected, **tolerances)


def test_one_program_serves_all_numbers(compilations):
    run = jax.jit(lambda schedule, count: resolve(schedule)(count))
    count = jnp.int32(7)
    run(WarmupCosine(0.0, 1.0, 10, 40), count)
    compilations.clear()
    schedules = [
        WarmupCosine(0.1, 1.0, 10, 40),
        WarmupCosine(0.0, 2.0, 10, 40),
        WarmupCosine(0.0, 1.0, 5, 40),
        WarmupCosine(0.0, 1.0, 5, 20),
        WarmupCosine(0.0, 1.0, 5, 20, end_value=0.1),
        WarmupCosine(0.0, 1.0, 5, 20, exponent=2.0),
    ]
    assert len({float(run(schedule, count)) for schedule in schedules}) == len(schedules)
    assert compilations.names == []


def test_members_of_a_population():
    schedules = [WarmupCosine(0.0, peak, warmup, 30) for peak, warmup in [(1.0, 0), (0.0, 30), (2.0, 10)]]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *schedules)
    values = jax.vmap(lambda schedule: schedule(jnp.int32(5)))(stacked)
    np.testing.assert_allclose(values, [schedule(5) for schedule in schedules], rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "constant"])
def test_gradients_are_finite_at_every_step(name):
    slopes = jax.jit(jax.vmap(jax.grad(lambda s, count: s(count), allow_int=True), in_axes=(None, 0)))(
        PAIRS[name][0], jnp.array(COUNTS)
    )
    floats = [leaf for leaf in jax.tree.leaves(slopes) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert floats
    assert all(np.isfinite(leaf).all() for leaf in floats)


@pytest.mark.parametrize("schedule", [WarmupCosine(0.0, 1.0, 10, 10), WarmupCosine(0.0, 1.0, 10, 5), Cosine(1.0, 0)])
def test_numbers_that_only_a_trace_would_meet_stay_finite(schedule):
    values = jax.jit(jax.vmap(schedule.__call__))(jnp.arange(20))
    assert np.isfinite(values).all()


def test_the_value_promotes_like_a_python_float():
    half = jnp.ones((), jnp.bfloat16)
    for schedule, _ in PAIRS.values():
        value = jax.jit(lambda s, count: resolve(s)(count) * half)(schedule, jnp.int32(3))
        assert value.dtype == jnp.bfloat16


def test_many_counts_at_once_for_a_plot():
    schedule = WarmupCosine(0.0, 1.0, 10, 40)
    np.testing.assert_allclose(schedule(jnp.arange(50)), [schedule(count) for count in range(50)], atol=1e-6)


def test_the_first_update_sees_step_0():  # case 12
    optimizer = resolve(lazy(optax.sgd)(Linear(1.0, 0.0, 4)))
    params, state, seen = jnp.zeros(()), None, []
    state = optimizer.init(params)
    for _ in range(5):
        updates, state = optimizer.update(jnp.ones(()), state, params)
        seen.append(-float(updates))
    assert seen == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_as_a_traced_argument_of_an_optimizer(compilations):  # case 6
    @jax.jit
    def update(node, count):
        optimizer = resolve(node)
        params = {"w": jnp.ones(2, jnp.bfloat16)}
        state = optax.tree_utils.tree_set(optimizer.init(params), count=count)
        return optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)[0]["w"]

    node = lazy(optax.adamw)(WarmupCosine(0.0, 3e-4, 10, 100))
    first = update(node, jnp.int32(5))
    compilations.clear()
    other = update(override(node, {"learning_rate.peak_value": 6e-4}), jnp.int32(5))
    assert compilations.names == []
    assert first.dtype == jnp.bfloat16
    assert (other != first).all()


def test_plain_form_and_references():
    schedule = WarmupCosine(0.0, 3e-4, warmup_steps=10, decay_steps=ref("num_steps"))
    assert validate(schedule) is schedule
    assert from_json(to_json(schedule)) == schedule
    assert isinstance(schedule, Schedule)


def test_numbers_that_make_no_sense(snapshot):
    texts = []
    for schedule in [
        Linear(0.0, 1.0, -1),
        Linear(0.0, 1.0, 3, transition_begin=-2),
        Cosine(1.0, 0),
        WarmupCosine(0.0, 1.0, -1, 10),
        WarmupCosine(0.0, 1.0, 10, 10),
    ]:
        with pytest.raises(ConfigError) as error:
            validate(schedule)
        texts.append(str(error.value))
    snapshot("numbers", "\n".join(texts))
