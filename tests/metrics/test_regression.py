"""Metrics of predicted numbers: equal to scikit-learn's over the rows that count."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score, root_mean_squared_error

from equikd.metrics import R2, MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError

REFERENCES = [
    (MeanSquaredError, mean_squared_error),
    (RootMeanSquaredError, root_mean_squared_error),
    (MeanAbsoluteError, mean_absolute_error),
    (R2, r2_score),
]


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("kind", [np.float32, np.int32])
@pytest.mark.parametrize(("cls", "reference"), REFERENCES)
def test_equals_sklearn(cls, reference, kind, shape, equals_reference):
    def draw(random, rows):
        targets = random.normal(2, 5, (rows, *shape)).astype(kind)
        return {"targets": targets, "preds": (targets + random.normal(0, 2, targets.shape)).astype(np.float32)}

    def expected(preds, targets):
        if cls is R2 and np.ptp(targets) == 0:
            return np.nan if (preds == targets).all() else -np.inf
        return reference(targets.ravel(), preds.ravel())

    by_element = "targets" if shape and kind is np.int32 else None
    empty = equals_reference(cls(preds="preds", targets="batch"), draw, expected, by_element=by_element)
    assert np.isnan(empty[""])


@pytest.mark.parametrize(("cls", "reference"), REFERENCES)
def test_bf16_is_computed_in_float32(cls, reference):
    preds = jnp.linspace(0, 3, 50).astype(jnp.bfloat16)
    targets = jnp.linspace(0, 2, 50).astype(jnp.float32)
    value = cls(preds="preds", targets="batch").from_values(preds, targets, jnp.ones(50, bool)).compute()
    np.testing.assert_allclose(value, reference(np.asarray(targets), np.asarray(preds, np.float32)), rtol=1e-5)


def test_r2_of_targets_far_from_zero():
    random = np.random.default_rng(0)
    targets = (1e4 + random.normal(0, 0.03, (40, 16))).astype(np.float32)
    preds = (targets + random.normal(0, 0.01, targets.shape)).astype(np.float32)
    metric, every = R2(preds="preds", targets="batch"), jnp.ones(16, bool)
    state = metric.from_values(preds[0], targets[0], every)
    for p, t in zip(preds[1:], targets[1:], strict=True):
        state = state | metric.from_values(p, t, every)
    exact = r2_score(targets.astype(np.float64).ravel(), preds.astype(np.float64).ravel())
    np.testing.assert_allclose(state.compute(), exact, rtol=1e-3)
