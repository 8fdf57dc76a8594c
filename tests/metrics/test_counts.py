"""Counts: int32, int64 under x64, and never wrapped; sums that do not drift over a long run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equikd as ek
from equikd.metrics import Average, empty_state
from equikd.metrics._moments import Moments

P, L = "preds", "batch"
CLASSES = {
    "accuracy": ek.metrics.Accuracy(preds=P, labels=L),
    "top_k": ek.metrics.TopKAccuracy(preds=P, labels=L, k=2),
    "f1": ek.metrics.F1(preds=P, labels=L, average="micro"),
    "confusion": ek.metrics.ConfusionMatrix(preds=P, labels=L),
    "calibration": ek.metrics.ExpectedCalibrationError(logits=P, labels=L),
    "perplexity": ek.metrics.Perplexity(logits=P, labels=L),
    "tokens": ek.metrics.TokenAccuracy(logits=P, labels=L),
}
NUMBERS = {
    "auc": ek.metrics.RocAuc(preds=P, labels=L),
    "r2": ek.metrics.R2(preds=P, targets=L),
    "mse": ek.metrics.MeanSquaredError(preds=P, targets=L),
}
VALUES = {
    "mean": ek.metrics.Mean(values=P),
    "std": ek.metrics.Std(values=P),
    "histogram": ek.metrics.Histogram(values=P, low=-3.0, high=3.0),
}


def states_of(names, wide):
    """Each metric of the same rows, in 32 or 64 bits."""
    random = np.random.default_rng(0)
    floats, ints = (np.float64, np.int64) if wide else (np.float32, np.int32)
    logits, numbers = random.normal(size=(12, 4)).astype(floats), random.normal(size=12).astype(floats)
    labels, mask = random.integers(0, 4, 12).astype(ints), jnp.arange(12) < 9
    arguments = {
        **dict.fromkeys(CLASSES, (logits, labels)),
        **dict.fromkeys(NUMBERS, (numbers, (labels > 1).astype(ints))),
        **dict.fromkeys(VALUES, (numbers,)),
        "norm": ({"w": numbers},),
    }
    metrics = {**CLASSES, **NUMBERS, **VALUES, "norm": ek.metrics.Norm(tree="grads")}
    return {name: metrics[name].from_values(*arguments[name], mask) for name in names}


def ints(state):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.dtype.kind in "iu"}


def flat(state):
    leaves = jax.tree.leaves(jax.tree.map(np.asarray, state))
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in leaves if leaf.dtype.kind in "iu"])


@pytest.mark.slow
def test_all_counts_have_64_bits_under_x64():
    check_widths([*CLASSES, *NUMBERS, *VALUES, "norm"])


@pytest.mark.slow
def test_counts_have_64_bits_under_x64_and_the_same_values():
    check_widths(["accuracy", "f1", "auc"])


def check_widths(names):
    narrow = states_of(names, wide=False)
    with jax.enable_x64(True):
        both = states_of(names, wide=True)
        for name, state in both.items():
            assert ints(state) == {"int64"}, name
            assert ints(state | empty_state(state)) == {"int64"}, name
            jax.block_until_ready((state | state).finalize().compute())
        past = ek.metrics.Average(jnp.float64(3), jnp.int64(2**40)) | Average.of(jnp.ones(1))
        assert past.finalize().count == 2**40 + 1
    for name, state in narrow.items():
        assert ints(state) == {"int32"}, name
        np.testing.assert_array_equal(flat(state), flat(both[name]), err_msg=name)


@pytest.mark.parametrize("name", [*CLASSES])
def test_labels_of_all_widths_are_looked_at_whole(name):
    """A label of 2^32 is no class, whatever its low bits say; 200 fits uint8 but is no class of four."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    numbers = lambda state: jax.tree.leaves(jax.device_get(state))
    expected = numbers(CLASSES[name].from_values(logits, jnp.array([1, 3, -1]), jnp.ones(3, bool)))
    for label, dtype in ((200, jnp.uint8), (-7, jnp.int8), (2**31 + 1, jnp.uint32), (-(2**31), jnp.int32)):
        state = CLASSES[name].from_values(logits, jnp.array([1, 3, label], dtype), jnp.ones(3, bool))
        for a, b in zip(numbers(state), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    with jax.enable_x64(True):
        state = CLASSES[name].from_values(logits, jnp.array([1, 3, 2**32 + 1], jnp.int64), jnp.ones(3, bool))
        for a, b in zip(numbers(state), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_moments_of_more_elements_than_int32_counts():
    """2^15 rows of 2^16 equal values, in a loop that holds none of them: their number, 2^31, is no int32."""
    of = jax.jit(lambda x, mask: Moments.of(jnp.broadcast_to(x[:, None], (2**15, 2**16)), mask))
    moments = of(jnp.asarray(np.arange(2**15) % 2 * 2, jnp.float32), jnp.ones(2**15, bool))
    assert (moments.count, moments.mean, moments.variance()) == (2**15, 1, 1)


def long_run(metric, *arrays):
    """A metric over batches of 8, merged one after the other."""
    mask = jnp.ones(8, bool)
    of = lambda parts: metric.from_values(*parts, mask)
    empty = empty_state(jax.eval_shape(of, [array[0] for array in arrays]))
    run = jax.jit(lambda xs: jax.lax.scan(lambda state, x: (state | of(x), None), empty, xs)[0])
    return jax.device_get(run(list(arrays))).finalize().compute()


def test_long_runs_do_not_drift():
    """400,000 rows in batches of 8; a plain float32 sum is off by more than 1e-6 in each of these."""
    random = np.random.default_rng(0)
    values = (1e3 + random.random((50_000, 8))).astype(np.float32)
    preds = (values + random.normal(3, 1, values.shape)).astype(np.float32)
    exact, targets = preds.astype(np.float64), values.astype(np.float64)
    squares = np.square(exact - targets)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    close(long_run(ek.metrics.Sum(values=P), values), targets.sum())
    close(long_run(ek.metrics.MeanSquaredError(preds=P, targets=L), preds, values), squares.mean())
    close(long_run(ek.metrics.Variance(values=P), preds), exact.var(), rtol=2e-6)
    r2 = 1 - squares.sum() / np.square(targets - targets.mean()).sum()
    close(long_run(ek.metrics.R2(preds=P, targets=L), preds, values), r2, rtol=2e-6)
    norms = np.sqrt(np.square(targets).sum(axis=1)).mean()
    close(long_run(ek.metrics.Norm(tree="grads"), values), norms)


def test_calibration_does_not_drift_where_sums_cancel():
    random = np.random.default_rng(1)
    logits = np.zeros((50_000, 8, 2), np.float32)
    logits[..., 0] = 2 + 0.1 * random.random((50_000, 8))
    confidence = 1 / (1 + np.exp(-logits[..., 0].astype(np.float64)))
    labels = (random.random((50_000, 8)) > confidence + 1e-3).astype(np.int32)
    expected = abs(confidence.sum() - (labels == 0).sum()) / labels.size
    found = long_run(ek.metrics.ExpectedCalibrationError(logits=P, labels=L, bins=1), logits, labels)
    assert abs(found - expected) < 1e-7
