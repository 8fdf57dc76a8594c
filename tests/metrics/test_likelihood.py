"""Perplexity, token accuracy and calibration: equal to scikit-learn's and to the plain formula."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn.metrics import accuracy_score, log_loss

from equikd.config import validate
from equikd.errors import ConfigError
from equikd.metrics import ExpectedCalibrationError, Perplexity, TokenAccuracy


def drawing(shape, classes=5, ignored=False):
    def draw(random, rows):
        logits = random.normal(0, 2, (rows, *shape, classes)).astype(np.float32)
        labels = np.where(random.random((rows, *shape)) < 0.5, logits.argmax(-1), random.integers(0, classes))
        if ignored:
            labels = np.where(random.random(labels.shape) < 0.2, -100, labels)
            labels.flat[0] = 0
        return {"logits": logits, "labels": labels.astype(np.int32)}

    return draw


def perplexity(logits, labels):
    return np.exp(log_loss(labels, softmax(logits.astype(np.float64), axis=-1), labels=range(logits.shape[-1])))


def accuracy(logits, labels):
    return accuracy_score(labels, logits.argmax(-1))


@pytest.mark.parametrize(("shape", "ignored"), [((), False), ((4,), False), ((4,), True)])
@pytest.mark.parametrize(("cls", "reference"), [(Perplexity, perplexity), (TokenAccuracy, accuracy)])
def test_tokens_equal_sklearn(cls, reference, shape, ignored, equals_reference):
    def expected(logits, labels):
        counts = labels != -100
        return reference(logits[counts], labels[counts])

    metric = cls(logits="preds", labels="batch", ignore_label=-100 if ignored else None)
    by_element = "labels" if shape else None
    empty = equals_reference(metric, drawing(shape, ignored=ignored), expected, by_element=by_element)
    assert np.isnan(empty[""])


@pytest.mark.parametrize("cls", [Perplexity, TokenAccuracy])
def test_every_token_weighs_the_same_when_texts_differ_in_length(cls):
    arrays = drawing((4,))(np.random.default_rng(0), 2)
    labels = arrays["labels"].copy()
    labels[1, 1:] = -100
    logits = jnp.asarray(arrays["logits"])
    state = cls(logits="preds", labels="batch", ignore_label=-100).from_values(
        logits, jnp.asarray(labels), jnp.ones(2, bool)
    )
    reference = perplexity if cls is Perplexity else accuracy
    kept = labels != -100
    np.testing.assert_allclose(state.compute(), reference(arrays["logits"][kept], labels[kept]), rtol=1e-5)


def test_perplexity_of_a_label_that_is_no_class_and_of_the_impossible():
    metric, every = Perplexity(logits="preds", labels="batch"), jnp.ones(1, bool)
    for label in (-1, 3):
        assert jnp.isnan(metric.from_values(jnp.zeros((1, 3)), jnp.array([label]), every).compute())
    state = metric.from_values(jnp.array([[0.0, 1e4]], jnp.float32), jnp.array([0]), every)
    assert np.isinf(state.finalize().compute())
    np.testing.assert_allclose(
        metric.from_values(jnp.zeros((1, 3), jnp.bfloat16), jnp.array([2]), every).compute(), 3, rtol=1e-5
    )


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("bins", [1, 15])
def test_calibration_equals_the_formula(bins, shape, equals_reference):
    def expected(logits, labels):
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.ravel()
        confidence = np.exp(log_softmax(logits, axis=-1)).max(-1)
        right, error = logits.argmax(-1) == labels, 0.0
        edges = np.linspace(0, 1, bins + 1)
        for low, high in itertools.pairwise(edges):
            inside = (confidence > low) & (confidence <= high)
            if inside.any():
                error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
        return error

    metric = ExpectedCalibrationError(logits="preds", labels="batch", bins=bins)
    empty = equals_reference(metric, drawing(shape), expected, atol=1e-6)
    assert np.isnan(empty[""])


def test_calibration_shows_nan_and_needs_bins():
    metric = ExpectedCalibrationError(logits="preds", labels="batch")
    logits = jnp.array([[0.0, 1.0], [jnp.nan, 0.0]])
    assert jnp.isnan(metric.from_values(logits, jnp.array([0, 0]), jnp.ones(2, bool)).compute())
    with pytest.raises(ConfigError, match="no bins"):
        validate(ExpectedCalibrationError(logits="preds", labels="batch", bins=0))


def test_calibration_of_one_large_batch_does_not_drift():
    """Added one after the other in float32, these confidences give 0.007 for 0."""
    rows = 1_000_000
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.7, 0.3])), (rows, 2))
    labels = jnp.asarray(np.tile(np.repeat([0, 1], [7, 3]), rows // 10))
    metric = ExpectedCalibrationError(logits="preds", labels="batch.label")
    assert jax.jit(metric.from_values)(logits, labels, jnp.ones(rows, bool)).finalize().compute() < 1e-5
