"""Average: exact sums and counts under a mask, in value, dtype and bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equikd.errors import WiringError
from equikd.metrics import Average, empty_state


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@settings(max_examples=20)
@given(
    st.lists(st.integers(-99, 99), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_padding_changes_nothing(numbers, mask, junk):
    values, mask = np.array(numbers, np.float32), np.array(mask)
    clean = Average.of(values, mask)
    longer = Average.of(np.append(values, np.float32([junk, junk])), np.append(mask, [False, False]))
    inside = Average.of(np.where(mask, values, np.float32(junk)), mask)
    for state in (longer, inside):
        assert (state.total, state.count) == (clean.total, clean.count)
    assert clean.total == values[mask].sum()


def test_merged_states_keep_strong_types():
    weak = jax.jit(lambda x: Average.of(jnp.stack([x, x])), static_argnums=0)(0.5)
    merged = empty_state(jax.eval_shape(lambda: weak)) | weak
    assert not merged.total.weak_type
    assert merged.total.dtype == jnp.float32


def test_mean_of_batches_is_weighted_by_count():  # case 17
    state = Average(jnp.float32(179.2), jnp.int32(256)) | Average(jnp.float32(204.8), jnp.int32(256))
    state = state | Average(jnp.float32(9.0), jnp.int32(10))
    np.testing.assert_allclose(state.compute(), (179.2 + 204.8 + 9) / 522, rtol=1e-6)


def test_equals_the_plain_formula_to_the_bit():
    values, mask = jax.random.normal(jax.random.key(0), (1001,)), jnp.arange(1001) % 3 > 0
    with jax.numpy_dtype_promotion("standard"):
        oracle = jax.jit(lambda v, m: jnp.where(m, v, 0).sum() / m.sum())(values, mask)
    assert jax.jit(lambda v, m: Average.of(v, m).compute())(values, mask) == oracle


def test_each_value_counts_as_often_as_it_is_present():  # case 18
    values = jnp.array([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]])
    assert Average.of(values, jnp.array([True, False])).compute() == 2
    assert Average.of(values, jnp.ones(2, bool)).compute() == 4
    assert Average.of(values, jnp.array([[True, False, False], [False, False, True]])).compute() == 4


def test_a_count_of_images_does_not_run_over():
    pixels = jax.ShapeDtypeStruct((256, 224, 224, 3), jnp.float32)
    assert jax.eval_shape(Average.of, pixels).count.dtype == jnp.int32
    images = jnp.full((4, 2**10, 2), 0.5)
    state = Average.of(images)
    for _ in range(20):
        state = state | state
    assert state.count == 4 * 2**20  # values would be 2^33
    np.testing.assert_allclose(state.compute(), 0.5, rtol=1e-6)


def test_a_mean_over_ints_does_not_floor():  # case 21
    state = Average.of(jnp.array([1, 2])) | Average.of(jnp.array([4]))
    np.testing.assert_allclose(state.compute(), 7 / 3, rtol=1e-6)
    assert Average.of(jnp.array([True, False, False, False])).compute() == 0.25


def test_bf16_is_summed_in_float32():
    state = Average.of(jnp.ones(1000, jnp.bfloat16))
    assert (state.total, state.total.dtype) == (1000, jnp.float32)


def test_64_bit_values_are_summed_in_64_bit():
    with jax.enable_x64(True):
        state = Average.of(jnp.full(3, 0.1, jnp.float64))
        assert (state.total.dtype, state.count.dtype) == (jnp.float64, jnp.int64)
        assert abs(float(state.compute()) - 0.1) < 1e-15


def test_nothing_is_nan_without_a_warning():
    state = jax.device_get(Average.of(jnp.ones(2), jnp.zeros(2, bool)))
    assert isinstance(state.total, np.ndarray | np.generic)
    assert np.isnan(state.compute())
    assert Average.of(jnp.ones((2, 0))).count == 0


def test_a_mask_that_does_not_fit_is_an_error(snapshot):
    with pytest.raises(WiringError) as error:
        Average.of(jnp.ones((2, 3)), jnp.ones(3, bool))
    snapshot("mask_does_not_fit", str(error.value))
    with pytest.raises(WiringError, match="a mask is bool"):
        Average.of(jnp.ones(3), jnp.ones(3))
