"""Areas under curves: exactly scikit-learn's for scores on the edges of the bins, and close to it for all others."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from equikd.config import validate
from equikd.errors import ConfigError
from equikd.metrics import AveragePrecision, RocAuc

REFERENCES = [(RocAuc, roc_auc_score), (AveragePrecision, average_precision_score)]


@pytest.mark.parametrize("kind", [np.int32, np.bool_])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize(("cls", "reference"), REFERENCES)
def test_equals_sklearn_on_rounded_scores(cls, reference, shape, kind, equals_reference):
    def draw(random, rows):
        labels = random.random((rows, *shape)) < 0.4
        scores = np.clip(random.normal(0.4 + 0.2 * labels, 0.2), 0, 0.99)
        return {"preds": scores.astype(np.float32), "labels": labels.astype(kind)}

    def expected(preds, labels):
        labels, scores = labels.ravel(), np.floor(preds.ravel() * np.float32(16))
        alone = len(set(labels.tolist())) == 1
        return np.nan if not labels.any() or (alone and cls is RocAuc) else reference(labels, scores)

    empty = equals_reference(cls(preds="preds", labels="batch", bins=16), draw, expected)
    assert np.isnan(empty[""])


@pytest.mark.parametrize(("cls", "reference"), REFERENCES)
def test_a_thousand_bins_are_close_to_all_scores(cls, reference):
    random = np.random.default_rng(0)
    labels = random.random(3000) < 0.3
    logits = random.normal(2.0 * labels, 1.5).astype(np.float32)
    metric = cls(preds="preds", labels="batch", low=-10.0, high=10.0)
    value = metric.from_values(jnp.asarray(logits), jnp.asarray(labels), jnp.ones(3000, bool)).compute()
    np.testing.assert_allclose(value, reference(labels, logits), rtol=0, atol=2e-3 if cls is AveragePrecision else 1e-4)


@pytest.mark.parametrize("cls", [RocAuc, AveragePrecision])
def test_scores_outside_and_nan(cls):
    metric, labels, every = cls(preds="preds", labels="batch"), jnp.array([0, 1, 1]), jnp.ones(3, bool)
    assert metric.from_values(jnp.array([-9.0, 9.0, jnp.inf]), labels, every).compute() == 1
    nan = metric.from_values(jnp.array([0.0, 1.0, jnp.nan]), labels, every)
    assert jnp.isnan(nan.compute())
    assert nan.invalid == 1
    with pytest.raises(ConfigError, match="no bins"):
        validate(cls(preds="preds", labels="batch", bins=0))
