"""Areas under curves: exactly scikit-learn's of all scores, or of those on the edges of bins, and else close to it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from equikd.config import validate
from equikd.errors import ConfigError
from equikd.metrics import AveragePrecision, RocAuc
from equikd.testing import check_metric

REFERENCES = [(RocAuc, roc_auc_score), (AveragePrecision, average_precision_score)]
EVERY = jnp.ones(2, bool)


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


@pytest.mark.parametrize("size", [None, 200])
@pytest.mark.parametrize("kind", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize(("cls", "reference"), REFERENCES)
def test_all_scores_equal_sklearn_with_ties(cls, reference, shape, kind, size, equals_reference):
    def draw(random, rows):
        labels = random.random((rows, *shape)) < 0.4
        scores = random.normal(3.0 * labels, 4).round(0 if random.random() < 0.5 else 3)
        return {"preds": scores.astype(kind), "labels": labels.astype(random.choice(["int8", "uint8", "float32"]))}

    def expected(preds, labels):
        labels, scores = labels.ravel() > 0.5, preds.ravel().astype(np.float64)
        alone = len(set(labels.tolist())) == 1
        return np.nan if not labels.any() or (alone and cls is RocAuc) else reference(labels, scores)

    metric = cls(preds="preds", labels="batch", bins=None, size=size)
    by_element = "preds" if shape else None
    empty = equals_reference(metric, draw, expected, by_element=by_element, rtol=1e-12, traced=False)
    assert np.isnan(empty[""])
    assert empty[""].dtype == np.float64


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 5000])
@pytest.mark.parametrize("cls", [RocAuc, AveragePrecision])
def test_all_scores_keep_the_laws(cls, size):
    check_metric(cls(preds="preds", labels="batch", bins=None, size=size), examples=2)


@pytest.mark.parametrize("cls", [RocAuc, AveragePrecision])
def test_all_scores_nan_one_class_and_too_many(cls, snapshot):
    metric = cls(preds="preds", labels="batch", bins=None, size=3)
    every, scores = jnp.ones(3, bool), jnp.array([-jnp.inf, 9.0, jnp.inf])
    state = metric.from_values(scores, jnp.array([0, 1, 1]), every)
    assert state.finalize().compute() == 1
    assert np.isnan(metric.from_values(scores.at[0].set(jnp.nan), jnp.array([0, 1, 1]), every).compute())
    masked = metric.from_values(scores.at[0].set(jnp.nan), jnp.array([0, 1, 0]), jnp.array([False, True, True]))
    assert masked.compute() == (0 if cls is RocAuc else 0.5)
    assert np.isnan(metric.from_values(scores, jnp.zeros(3, bool), every).compute())
    ones = metric.from_values(scores, jnp.ones(3, bool), every).compute()
    assert np.isnan(ones) if cls is RocAuc else ones == 1
    with pytest.raises(OverflowError) as error:
        (state | masked).finalize()
    if cls is RocAuc:
        snapshot("too_many_scores", str(error.value))


def test_sizes_that_mean_nothing(snapshot):
    texts = []
    for options in ({"size": 5}, {"bins": None, "size": 0}, {"bins": 0}, {"low": 1.0}):
        with pytest.raises(ConfigError) as error:
            validate(RocAuc(preds="preds", labels="batch", **options))
        texts.append(str(error.value))
    snapshot("sizes", "\n\n".join(texts))
    validate(RocAuc(preds="preds", labels="batch", bins=None, low=1.0))


def test_equal_sizes_give_one_class_of_states():
    of = lambda size: RocAuc(preds="preds", labels="batch", bins=None, size=size).from_values(*[jnp.ones(2)] * 2, EVERY)
    assert type(of(4)) is type(of(4))
    assert type(of(4)) is not type(of(5))


def test_counts_past_what_float32_holds():
    """Each of 2^24 + 1 negatives below one positive: in float32 the last one is lost."""
    counts = np.array([2**24 + 1, 2**24], np.int32)
    state = RocAuc(preds="preds", labels="batch", bins=2).from_values(jnp.array([0.1, 0.9]), jnp.array([0, 1]), EVERY)
    state = dataclasses.replace(jax.device_get(state), negatives=counts)
    assert state.compute() == (2**24 + 1 + 2**23) / (2**25 + 1)


@pytest.mark.parametrize("cls", [RocAuc, AveragePrecision])
def test_scores_outside_and_nan(cls):
    metric, labels, every = cls(preds="preds", labels="batch"), jnp.array([0, 1, 1]), jnp.ones(3, bool)
    for outside in (-9.0, 1.001, jnp.inf, -jnp.inf):
        state = metric.from_values(jnp.array([0.0, 1.0, outside]), labels, every)
        assert jnp.isnan(state.compute())
        assert state.invalid == 1
        hidden = metric.from_values(jnp.array([0.0, 1.0, outside]), labels, jnp.array([True, True, False]))
        assert hidden.compute() == 1
    nan = metric.from_values(jnp.array([0.0, 1.0, jnp.nan]), labels, every)
    assert jnp.isnan(nan.compute())
    assert nan.invalid == 1
    with pytest.raises(ConfigError, match="no bins"):
        validate(cls(preds="preds", labels="batch", bins=0))
