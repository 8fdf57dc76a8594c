"""Sums of losses: exact over long runs, and to the bit the plain formula, in value and gradient, of one batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equikd.losses import LossState, Value
from equikd.metrics import StepTotals, TwoFloat, empty_state
from equikd.wiring import Context

VALUE = Value("preds")


def state(values, mask=None):
    mask = jnp.ones(values.shape, bool) if mask is None else mask
    return VALUE.from_context(Context(preds=values, mask=mask))


def far(total, expected):
    return abs(float(total) - expected) / abs(expected)


@pytest.mark.parametrize("seed", range(5))
def test_one_batch_is_the_plain_formula_to_the_bit(seed):
    values = np.random.default_rng(seed).normal(size=37).astype(np.float32)
    mask = np.random.default_rng(seed).random(37) < 0.7

    def plain(values, mask):
        return jnp.where(mask, values, 0.0).sum() / mask.sum().astype(jnp.float32)

    ours = jax.jit(jax.value_and_grad(lambda x, mask: state(jnp.sin(x), mask).mean()))(values, mask)
    theirs = jax.jit(jax.value_and_grad(lambda x, mask: plain(jnp.sin(x), mask)))(values, mask)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    one = jax.jit(state)(values, mask)
    assert one.mean() == one.compute() == jax.jit(plain)(values, mask)
    assert one.total == one.exact.high


def test_the_gradient_is_finite_where_rows_are_masked_and_where_none_counts():
    values = jnp.array([1.0, jnp.nan, -jnp.inf])
    for mask, expected in ([True, False, False], [3.0, 0, 0]), ([False] * 3, [0.0, 0, 0]):
        gradient = jax.grad(lambda values, mask=mask: state(3 * values, jnp.array(mask)).mean())(values)
        assert gradient.tolist() == expected
    assert jax.grad(lambda x: LossState(x, jnp.int32(2)).mean())(3.0) == 0.5


def test_plain_arrays_will_do():
    one = LossState(jnp.float32(3), jnp.int32(2))
    assert isinstance(one.exact, TwoFloat)
    assert (one | empty_state(jax.eval_shape(lambda: one))).compute() == 1.5
    terms = StepTotals({"ce": jnp.float32(3)}, {"ce": jnp.int32(1)})
    assert (terms | StepTotals({"ce": TwoFloat.of(1.0)}, {"ce": jnp.int32(1)})).compute() == 2
    assert terms.weighted({}) == {"ce": 3}


def test_the_loss_of_an_eval_of_400_000_rows_in_batches_of_8():
    rows = (1e4 + np.random.default_rng(0).random((50_000, 8))).astype(np.float32)
    empty = empty_state(jax.eval_shape(state, rows[0]))
    merged, _ = jax.jit(lambda rows: jax.lax.scan(lambda so_far, x: (so_far | state(x), None), empty, rows))(rows)
    expected = rows.mean(dtype=np.float64)
    assert merged.count == 400_000
    assert far(merged.compute(), expected) <= 1e-6
    plain, _ = jax.lax.scan(lambda total, x: (total + x.sum(), None), jnp.float32(0), rows)
    assert far(plain / 400_000, expected) > 1e-6


def test_the_total_of_an_interval_of_100_000_steps():
    losses = (3 + np.random.default_rng(0).random(100_000)).astype(np.float32)
    one = jnp.int32(1)
    step = lambda loss: StepTotals({"ce": loss, "l2": 0.1 * loss}, {"ce": one, "l2": one})
    empty = empty_state(jax.eval_shape(step, losses[0]))
    merged, _ = jax.jit(lambda x: jax.lax.scan(lambda so_far, x: (so_far | step(x), None), empty, x))(losses)
    expected = losses.mean(dtype=np.float64)
    assert far(merged.weighted({})["ce"], expected) <= 1e-6
    assert far(merged.compute(), 1.1 * expected) <= 1e-6
    plain, _ = jax.lax.scan(lambda total, x: (total + x, None), jnp.float32(0), losses)
    assert far(plain / 100_000, expected) > 1e-6


def test_rows_past_the_last_int_of_float32():
    """A plain float32 sum of ones stays at 16,777,216."""
    ones = lambda rows: LossState(jnp.float32(rows), jnp.int32(rows))
    merged = ones(2**24)
    for _ in range(3):
        merged = merged | ones(1)
    assert merged.count == 2**24 + 3
    assert np.float64(merged.exact.high) + np.float64(merged.exact.low) == 2**24 + 3
    assert merged.compute() == 1
