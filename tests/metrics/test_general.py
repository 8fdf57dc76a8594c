"""Mean: exact over every split of the rows into batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equikd.metrics import Mean
from equikd.wiring import Context


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def padded_batches(values, size, junk=np.nan):
    """The values in batches of one size, the last one filled up with junk."""
    for start in range(0, len(values), size):
        part = values[start : start + size]
        mask = np.arange(size) < len(part)
        yield jnp.asarray(np.concatenate([part, np.full(size - len(part), junk, part.dtype)])), jnp.asarray(mask)


@settings(max_examples=20)
@given(st.lists(st.integers(-999, 999), min_size=1, max_size=9), st.sampled_from([1, 2, 3, 4, 16]))
def test_every_batch_size_gives_the_same(numbers, size):
    values = np.array(numbers, np.float32)
    metric = Mean("preds")
    states = [metric.from_context(Context(preds=x, mask=m)) for x, m in padded_batches(values, size)]
    merged = functools.reduce(lambda a, b: a | b, states)
    assert (merged.total, merged.count) == (values.sum(), len(values))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8, jnp.bool_])
def test_dtypes(dtype):
    values = jnp.array([1, 0, 1, 1], dtype)
    state = Mean("preds").from_values(values, jnp.array([True, True, True, False]))
    assert state.total.dtype == jnp.float32
    np.testing.assert_allclose(state.compute(), 2 / 3, rtol=1e-6)


def test_the_gradient_ignores_masked_rows():
    mask = jnp.array([True, False, True])
    mean = lambda x: Mean("preds").from_values(jnp.log(x), mask).compute()
    np.testing.assert_allclose(jax.grad(mean)(jnp.array([1.0, 2.0, 4.0])), [0.5, 0, 0.125])
