"""The numbers of schedules are traced: one program for all, in a vmap and a scan, with finite and right gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equikd.config import override, resolve, validate
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
from tests.optim._cases import ARGUMENTS, CASES, CLASSES, COUNTS, EACH, curve, numbers


@CLASSES
def test_one_program_serves_all_numbers(cls, compilations):
    run = jax.jit(lambda schedule, count: resolve(schedule)(count))
    schedule = cls(*ARGUMENTS[cls])
    paths = numbers(schedule)
    counts = [jnp.int32(count) for count in (0, 5, 8, 9, 10, 15, 30, 38, 45)]
    before = [run(schedule, count) for count in counts]
    edits = [override(schedule, {path: value + 1 if type(value) is int else value * 1.1}) for path, value in paths]
    jax.tree.leaves(edits)
    compilations.clear()
    for (path, _), edit in zip(paths, edits, strict=True):
        changed = [run(edit, count) for count in counts]
        assert any(float(one) != float(other) for one, other in zip(before, changed, strict=True)), path
    assert compilations.names == []


@CLASSES
def test_every_number_is_a_leaf(cls):
    schedule = cls(*ARGUMENTS[cls])
    kinds = {float: "float32", int: "int32"}
    expected = [kinds[type(value)] for _, value in numbers(schedule)]
    assert [leaf.dtype.name for leaf in jax.tree.leaves(schedule)] == expected


@CLASSES
def test_members_of_a_population(cls):
    schedule = cls(*ARGUMENTS[cls])
    edits = [
        override(schedule, {path: value + 2 if type(value) is int else value * 1.1})
        for path, value in numbers(schedule)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *edits)
    values = jax.jit(jax.vmap(lambda schedule, count: schedule(count), in_axes=(0, None)))(stacked, jnp.int32(15))
    np.testing.assert_allclose(values, [edit(15) for edit in edits], rtol=1e-5, atol=1e-6)


@EACH
def test_gradients_are_finite_at_every_step(name):
    slopes = jax.jit(jax.vmap(jax.grad(lambda s, count: s(count), allow_int=True), in_axes=(None, 0)))(
        CASES[name], jnp.array(COUNTS)
    )
    floats = [leaf for leaf in jax.tree.leaves(slopes) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert floats
    assert all(np.isfinite(leaf).all() for leaf in floats)


@CLASSES
def test_gradients_are_slopes(cls):
    schedule = cls(*ARGUMENTS[cls])
    counts = jnp.array([3, 12, 32])
    for path, value in numbers(schedule):
        if type(value) is int or "pct" in path:
            continue
        at = lambda x, path=path: curve(override(schedule, {path: x}), counts)
        slope = jax.jacfwd(at)(value)
        np.testing.assert_allclose(
            slope, (at(value + 0.01) - at(value - 0.01)) / 0.02, rtol=2e-2, atol=5e-3, err_msg=path
        )


def test_shares_have_no_gradient():
    slope = jax.grad(lambda share: CosineOneCycle(40, 1.0, share)(8))(0.3)
    assert slope == 0


@CLASSES
def test_in_a_scan(cls):
    schedule = cls(*ARGUMENTS[cls])

    @jax.jit
    def run(schedule):
        return jax.lax.scan(lambda count, _: (count + 1, schedule(count)), jnp.int32(0), length=48)[1]

    np.testing.assert_allclose(run(schedule), [schedule(count) for count in range(48)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        Linear(1.0, 0.0, -5, -3),
        Polynomial(1.0, 0.0, 0.5, -5),
        WarmupCosine(0.0, 1.0, 10, 10),
        WarmupCosine(0.0, 1.0, 10, 5),
        Cosine(1.0, 0),
        Exponential(1.0, -3, 0.5, -2, True),
        WarmupExponential(0.0, 1.0, -3, 0, 0.5, -2),
        InverseSquareRoot(0.0, 1.0, -2),
        WarmupStableDecay(0.0, 1.0, 10, 10, 5, power=0.5),
        WarmupStableDecay(0.0, 1.0, -1, -1, 0),
        CosineOneCycle(0, 1.0),
        LinearOneCycle(-2, 1.0),
        LinearOneCycle(10, 1.0, 0.9, 0.1),
        PiecewiseConstant(1.0, ((-1, 0.5), (-1, 0.5))),
        Join((Constant(1.0), Cosine(1.0, 3), Linear(1.0, 0.0, 3)), (7, 2)),
    ],
)
def test_numbers_that_only_a_trace_would_meet_stay_finite(schedule):
    with pytest.raises(ConfigError):
        validate(schedule)
    values = jax.jit(jax.vmap(lambda schedule, count: schedule(count), in_axes=(None, 0)))(schedule, jnp.arange(20))
    assert np.isfinite(values).all()


def test_growth_beyond_the_end_has_a_finite_gradient():
    schedule = Exponential(1.0, 1, 2.0, end_value=10.0)
    value, slope = jax.value_and_grad(lambda s: s(2000), allow_int=True)(schedule)
    assert value == 10.0  # 2^2000 is no float
    assert (slope.init_value, slope.decay_rate, slope.end_value) == (0.0, 0.0, 1.0)


def test_a_joined_member_is_not_asked_outside_of_its_steps():
    seen = []
    Join((Constant(1.0), lambda count: seen.append(int(count)) or 0.0), (10,))(3)
    assert seen == [0]


@EACH
def test_the_value_promotes_like_a_python_float(name):
    half = jnp.ones((), jnp.bfloat16)
    value = jax.jit(lambda s, count: resolve(s)(count) * half)(CASES[name], jnp.int32(3))
    assert value.dtype == jnp.bfloat16
