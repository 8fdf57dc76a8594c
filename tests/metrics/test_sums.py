"""Two-float sums against float64 and fractions, whatever the order; ints that do not fit are refused, not wrapped."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equikd.errors import WiringError
from equikd.metrics import Average, State, empty_state, sum_field
from equikd.metrics._sums import TwoFloat, add, exact_sum, two_sum
from equikd.typing import Array, Int

numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=16, max_size=16)


class Total(State):
    value: TwoFloat = sum_field(exact=True)

    def compute(self):
        return self.value.value


def in_float64(total):
    return np.asarray(total.high, np.float64) + np.asarray(total.low, np.float64)


@settings(max_examples=50)
@given(st.floats(-(2.0**99), 2.0**99, width=32), st.floats(-(2.0**99), 2.0**99, width=32))
def test_the_error_of_one_sum_is_known_to_the_bit(a, b):
    total, error = jax.jit(two_sum)(np.float32(a), np.float32(b))
    if abs(a) > 1e-20 < abs(b):  # subnormals are flushed
        assert math.fsum([float(total), float(error)]) == math.fsum([a, b])


@settings(max_examples=50)
@given(numbers, st.integers(1, 15), st.randoms())
def test_sums_are_those_of_float64_however_split_and_ordered(values, cut, random):
    rows = np.array(values, np.float32)
    expected, size = math.fsum(values), math.fsum(map(abs, values))
    shuffled = rows.copy()
    random.shuffle(shuffled)
    split = Total(exact_sum(rows[:cut])) | Total(exact_sum(rows[cut:]))
    for total in (exact_sum(rows), exact_sum(shuffled), split.value):
        assert abs(in_float64(total) - expected) <= 1e-12 * size + 1e-30


def test_padding_leaves_the_bits_of_a_sum():
    for seed in range(20):
        rows = np.random.default_rng(seed).normal(size=23).astype(np.float32)
        padded = np.concatenate([rows, np.full(9, np.nan, np.float32)])
        assert exact_sum(padded, np.arange(32) < 23).value == exact_sum(rows).value


def test_shapes_and_dtypes():
    rows = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(exact_sum(rows).value, rows.sum(axis=0))
    mask = jnp.array([[True, False], [False, False], [True, True]])
    np.testing.assert_array_equal(exact_sum(rows, mask).value, [4, 5])
    assert exact_sum(jnp.ones((0, 2))).value.tolist() == [0, 0]
    assert exact_sum(jnp.ones(1000, jnp.bfloat16)).value == 1000
    assert exact_sum(jnp.array([True, True])).high.dtype == jnp.float32
    for broken in (lambda: exact_sum(jnp.ones(())), lambda: exact_sum(rows, jnp.ones(2, bool))):
        with pytest.raises(WiringError):
            broken()


@pytest.mark.parametrize("values", [[np.inf, 1.0], [1.0, -np.inf], [np.inf, np.inf], [3e38, 3e38]])
def test_an_infinite_sum_is_infinite_and_not_nan(values):
    rows = np.array(values, np.float32)
    state = Total(exact_sum(rows)) | Total(jnp.float32(1)) | Total(jnp.float32(2))
    with np.errstate(over="ignore"):
        assert state.compute() == rows.sum(dtype=np.float32)
    assert np.isnan((Total(jnp.float32(np.inf)) | Total(jnp.float32(-np.inf))).compute())


def test_the_gradient_is_that_of_the_plain_sum():
    rows, mask = jnp.array([1.0, 1e8, 3.0, np.nan]), jnp.array([True, True, True, False])
    gradient = jax.grad(lambda rows: (TwoFloat.of(jnp.float32(5)) + exact_sum(rows, mask)).value * 2)(rows)
    assert gradient.tolist() == [2, 2, 2, 0]


def test_a_plain_array_becomes_a_number_without_error():
    state = Total(jnp.float32(3))
    assert isinstance(state.value, TwoFloat)
    assert (state | empty_state(jax.eval_shape(lambda: state))).compute() == 3


def test_a_long_run_of_small_batches_keeps_its_mean():
    """400,000 rows of 8 at 1e4, where a float32 sum of 3e9 adds batches in steps of 256."""
    rows = (1e4 + np.random.default_rng(0).random((50_000, 8))).astype(np.float32)
    empty = empty_state(jax.eval_shape(Average.of, rows[0]))
    state, _ = jax.jit(lambda rows: jax.lax.scan(lambda state, x: (state | Average.of(x), None), empty, rows))(rows)
    expected = rows.mean(dtype=np.float64)
    assert state.count == 400_000
    assert abs(float(state.compute()) - expected) <= 1e-6 * expected
    plain, _ = jax.lax.scan(lambda total, x: (total + x.sum(), None), jnp.float32(0), rows)
    assert abs(float(plain) / 400_000 - expected) > 1e-6 * expected


def test_a_mean_of_ten_million_values():
    values = (1000 + np.random.default_rng(0).random(10_000_000)).astype(np.float32)
    expected = values.mean(dtype=np.float64)
    assert abs(float(jax.jit(Average.of)(values).compute()) - expected) <= 1e-6 * expected
    assert abs(float(jax.jit(exact_sum)(values).value) / 1e7 - expected) <= 1e-7 * expected


class Count(State):
    rows: Int[Array, ""] = sum_field()

    def compute(self):
        return self.rows


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint32, jnp.uint8])
def test_counts_that_do_not_fit_are_refused_and_do_not_wrap(dtype):
    most = int(jnp.iinfo(dtype).max)
    near = Count(jnp.array(most - 3, dtype))
    assert (near | Count(jnp.array(2, dtype))).finalize().compute() == most - 1
    over = jax.jit(lambda a: a | a)(near)
    for state in (over, over | Count(jnp.array(1, dtype)), Count(jnp.full(5, most // 4, dtype)).reduce()):
        assert int(state.rows) == most
        assert state.rows.dtype == dtype
        with pytest.raises(OverflowError, match=r"Count\.rows: a sum of ints does not fit"):
            state.finalize()


def test_a_count_passes_the_last_int_of_float32():
    state = Count(jnp.int32(16_777_216))
    for _ in range(3):
        state = state | Count(jnp.int32(1))
    assert state.finalize().compute() == 16_777_219


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
@settings(max_examples=100)
def test_a_sum_is_right_or_the_largest_int(a, b):
    most = 2**31 - 1
    total = int(add(np.int32(a), np.int32(b)))
    fits = -(2**31) <= a + b < most and most not in (a, b)
    assert total == (a + b if fits else most)
