"""Mean, sum, smallest and largest: exact over every split of the rows into batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equikd.metrics import Max, Mean, Min, Sum
from equikd.wiring import Context


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


@pytest.mark.parametrize("by_element", [None, "values"])
@pytest.mark.parametrize("kind", [np.float32, np.int32])
@pytest.mark.parametrize("shape", [(), (3, 2)])
@pytest.mark.parametrize(("cls", "reference"), [(Mean, np.mean), (Sum, np.sum), (Min, np.min), (Max, np.max)])
def test_equals_numpy(cls, reference, shape, kind, by_element, equals_reference):
    draw = lambda random, rows: {"values": random.normal(1, 9, (rows, *shape)).astype(kind)}
    exact = lambda values: reference(values.astype(np.float64))
    empty = equals_reference(cls(values="preds"), draw, exact, by_element=by_element, atol=1e-5)[""]
    limits = np.iinfo(np.int32) if kind is np.int32 else None
    expected = {
        Mean: np.nan,
        Sum: 0,
        Min: limits.max if limits else np.inf,
        Max: limits.min if limits else -np.inf,
    }
    np.testing.assert_equal(empty.item(), expected[cls])


def test_the_extremes_keep_the_dtype_and_show_nan():
    every = jnp.ones(2, bool)
    assert Min("preds").from_values(jnp.array([3, 200], jnp.uint8), every).compute().dtype == jnp.uint8
    assert Max("preds").from_values(jnp.array([True, False]), every).compute()
    assert jnp.isnan(Max("preds").from_values(jnp.array([1.0, jnp.nan]), every).compute())
    assert Min("preds").from_values(jnp.zeros((0,)), jnp.zeros(0, bool)).compute() == jnp.inf
