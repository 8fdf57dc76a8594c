"""Variance, deviation and histogram: equal to numpy's, with all digits, over every split of the rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equikd.config import validate
from equikd.errors import ConfigError
from equikd.metrics import BinCounts, Histogram, Std, Variance, empty_state

_MERGE = jax.jit(lambda a, b: a | b)
_OF = jax.jit(Variance(values="preds").from_values)


@pytest.mark.parametrize("by_element", [None, "values"])
@pytest.mark.parametrize("shape", [(), (3, 2)])
@pytest.mark.parametrize(("cls", "reference"), [(Variance, np.var), (Std, np.std)])
def test_equals_numpy(cls, reference, shape, by_element, equals_reference):
    draw = lambda random, rows: {"values": random.normal(3, 2, (rows, *shape)).astype(np.float32)}
    exact = lambda values: reference(values.astype(np.float64))
    empty = equals_reference(cls(values="preds"), draw, exact, by_element=by_element)
    assert np.isnan(empty[""])


@pytest.mark.parametrize("size", [10, 256, 2000])
def test_a_small_deviation_at_a_large_mean(size):  # case 26
    values = (1e4 + np.random.default_rng(0).normal(0, 0.03, 20_000)).astype(np.float32)
    of = jax.jit(Std(values="preds").from_values)
    batches = [jnp.asarray(values[start : start + size]) for start in range(0, len(values), size)]
    full = jnp.ones(size, bool)
    states = [of(batch, full[: len(batch)]) for batch in batches]
    state = functools.reduce(_MERGE, states)
    np.testing.assert_allclose(state.compute(), values.astype(np.float64).std(), rtol=1e-4)
    np.testing.assert_allclose(state.compute(), 0.03, rtol=2e-2)


@settings(max_examples=20)
@given(st.lists(st.integers(-99, 99), min_size=12, max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_merging_is_associative_and_has_an_identity(numbers, mask):
    values, mask = np.array(numbers, np.float32).reshape(3, 4), np.array(mask).reshape(3, 4)
    a, b, c = (_OF(jnp.asarray(v), jnp.asarray(m)) for v, m in zip(values, mask, strict=True))
    nothing = empty_state(a)
    for one in (nothing | a, a | nothing):
        assert jax.tree.all(jax.tree.map(lambda x, y: bool(x == y), one, a))
    left, right = (a | b) | c, a | (b | c)
    expected = values[mask].astype(np.float64).var() if mask.any() else np.nan
    for state in (left, right, a | (c | b)):
        assert state.moments.count == mask.sum()
        np.testing.assert_allclose(jax.device_get(state).compute(), expected, rtol=1e-5, atol=1e-6)


def test_stacked_states_reduce():
    values = jax.random.normal(jax.random.key(0), (5, 8))
    stacked = jax.vmap(_OF, in_axes=(0, None))(values, jnp.ones(8, bool))
    np.testing.assert_allclose(stacked.reduce().compute(), np.asarray(values, np.float64).var(), rtol=1e-5)


def test_what_is_not_finite_is_not_hidden():
    values = jnp.array([1.0, jnp.inf])
    assert jnp.isnan(_OF(values, jnp.ones(2, bool)).compute())
    assert _OF(values, jnp.array([True, False])).compute() == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint8, jnp.bool_])
def test_dtypes(dtype):
    state = Variance(values="preds").from_values(jnp.array([1, 0, 1, 0], dtype), jnp.ones(4, bool))
    assert (state.compute(), state.moments.mean.dtype) == (0.25, jnp.float32)


def test_64_bit_values():
    with jax.enable_x64(True):
        state = Std(values="preds").from_values(jnp.array([1e9, 1e9 + 1e-3]), jnp.ones(2, bool))
        np.testing.assert_allclose(state.compute(), 5e-4, rtol=1e-3)


def test_a_count_that_is_full_is_refused():
    one = _OF(jnp.ones(2), jnp.ones(2, bool))
    full = jax.tree.map(lambda x: x, one)
    for _ in range(31):
        full = full | full
    with pytest.raises(OverflowError, match="a count does not fit"):
        full.finalize()


@pytest.mark.parametrize("shape", [(), (3,)])
def test_histogram_equals_numpy(shape, equals_reference):
    low, high = -1.5, 2.0

    def reference(values):
        counts, edges = np.histogram(values, 12, (low, high))
        return BinCounts(counts, edges, (values < low).sum(), (values > high).sum())

    draw = lambda random, rows: {"values": random.normal(0, 2, (rows, *shape)).astype(np.float32)}
    empty = equals_reference(Histogram(values="preds", low=low, high=high, bins=12), draw, reference)
    assert np.isnan(empty.pop("edges")).all()
    assert not any(np.any(count) for count in empty.values())


def test_edges_of_the_histogram():
    metric = Histogram(values="preds", low=0.0, high=4.0, bins=4)
    assert metric.edges().tolist() == [0, 1, 2, 3, 4]
    values = jnp.array([0, 1, 2, 3, 4, 5, -1])
    state = metric.from_values(values, jnp.ones(7, bool))
    assert (state.counts.tolist(), state.below, state.above) == ([1, 1, 1, 2], 1, 1)
    nan = metric.from_values(jnp.array([jnp.nan, jnp.inf, -jnp.inf]), jnp.ones(3, bool))
    assert (nan.counts.sum(), nan.below, nan.above) == (0, 1, 2)
    assert state.compute() == BinCounts(np.array([1, 1, 1, 2], np.int32), np.arange(5, dtype=np.float32), 1, 1)
    with pytest.raises(ConfigError, match="no bins"):
        validate(Histogram(values="preds", low=1.0, high=1.0))


@pytest.mark.parametrize(
    ("low", "high", "bins"),
    [
        (0, 10, 10),
        (0, 11, 11),
        (0, 26, 26),
        (0, 43, 43),
        (0, 100, 10),
        (-5, 5, 10),
        (1, 11, 10),
        (0, 255, 51),
    ],
    ids=map(str, range(8)),
)
def test_values_on_edges_that_are_whole_numbers_are_those_of_numpy(low, high, bins):
    values = np.linspace(low, high, bins + 1).astype(np.float32)
    expected, _ = np.histogram(values, bins, (low, high))
    metric = Histogram(values="preds", low=float(low), high=float(high), bins=bins)
    found = metric.from_values(jnp.asarray(values), jnp.ones(bins + 1, bool)).finalize().compute()
    assert found.counts.tolist() == expected.tolist() == [1] * (bins - 1) + [2]
