"""Accuracies and the confusion matrix: equal to scikit-learn's on the rows that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from sklearn.metrics import accuracy_score, confusion_matrix, top_k_accuracy_score

from equikd.config import validate
from equikd.errors import ConfigError, WiringError
from equikd.metrics import (
    F1,
    Accuracy,
    BinaryAccuracy,
    ConfusionMatrix,
    Perplexity,
    TokenAccuracy,
    TopKAccuracy,
    empty_state,
)
from equikd.metrics import ExpectedCalibrationError as Calibrated

ACCURACY = Accuracy(preds="preds", labels="batch.label")


@pytest.mark.parametrize("label_dtype", [np.int32, np.uint8, np.int8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_sklearn(label_dtype, dtype):
    random = np.random.default_rng(0)
    preds = random.normal(size=(40, 5)).astype(np.float32)
    labels, mask = random.integers(0, 5, 40).astype(label_dtype), random.random(40) < 0.7
    expected = accuracy_score(labels[mask], preds[mask].argmax(-1))
    preds[~mask] = np.nan
    state = ACCURACY.from_values(jnp.asarray(preds, dtype), jnp.asarray(labels), jnp.asarray(mask))
    assert state.count == mask.sum()
    np.testing.assert_allclose(state.compute(), expected, atol=1e-6 if dtype == jnp.float32 else 0.05)


def test_one_hot_labels_and_tokens():
    preds = jnp.array([[[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.3, 0.7]]])
    labels = jnp.array([[0, 0], [0, 1]])
    for given in (
        labels,
        jax.nn.one_hot(labels, 2),
        jax.nn.one_hot(labels, 2, dtype=bool),
        jnp.eye(2, dtype=int)[labels],
    ):
        assert ACCURACY.from_values(preds, given, jnp.ones(2, bool)).compute() == 0.75
    assert ACCURACY.from_values(preds, labels, jnp.array([[True, False], [True, True]])).compute() == 1


def test_wrong_shapes_are_refused():
    for labels in (jnp.zeros(3, jnp.int32), jnp.zeros((2, 4)), jnp.zeros(2)):
        with pytest.raises(TypeCheckError):
            ACCURACY.from_values(jnp.zeros((2, 3)), labels, jnp.ones(2, bool))


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_equals_sklearn(k, shape, equals_reference):
    def draw(random, rows):
        preds = random.normal(size=(rows, *shape, 5)).astype(np.float32)
        return {"preds": preds, "labels": random.integers(0, 5, (rows, *shape)).astype(np.int32)}

    def reference(preds, labels):
        return top_k_accuracy_score(labels.ravel(), preds.reshape(-1, 5), k=k, labels=range(5))

    metric = TopKAccuracy(preds="preds", labels="batch", k=k)
    empty = equals_reference(metric, draw, reference, by_element="labels" if shape else None)
    assert np.isnan(empty[""])


def test_top_k_of_equal_scores_labels_that_are_no_class_and_nan():
    scores, every = jnp.zeros((3, 3)), jnp.ones(3, bool)
    count = lambda k, scores, labels: (
        TopKAccuracy(preds="preds", labels="batch", k=k).from_values(scores, jnp.asarray(labels), every).total
    )
    assert [count(k, scores, [0, 1, 2]) for k in (1, 2, 3, 4)] == [1, 2, 3, 3]
    assert count(1, scores, [0, 0, 0]) == ACCURACY.from_values(scores, jnp.zeros(3, jnp.int32), every).total
    assert count(9, scores, [-1, 3, 99]) == 0
    assert count(2, jnp.full((3, 3), -jnp.inf), [0, -1, 3]) == 1
    assert count(2, scores.at[:, 0].set(jnp.nan), [0, 1, 2]) == 1
    with pytest.raises(ConfigError, match="k >= 1"):
        validate(TopKAccuracy(preds="preds", labels="batch", k=0))


@pytest.mark.parametrize("kind", [np.int32, np.bool_, np.float32])
def test_binary_accuracy_equals_sklearn(kind, equals_reference):
    def draw(random, rows):
        return {
            "preds": random.random((rows, 2)).astype(np.float32),
            "labels": random.integers(0, 2, (rows, 2)).astype(kind),
        }

    def reference(preds, labels):
        return accuracy_score(labels.ravel() > 0.5, preds.ravel() > 0.25)

    metric = BinaryAccuracy(preds="preds", labels="batch", threshold=0.25)
    assert np.isnan(equals_reference(metric, draw, reference)[""])


def test_a_nan_is_never_right():
    preds, labels = jnp.array([jnp.nan, jnp.nan]), jnp.array([0, 1])
    assert BinaryAccuracy(preds="preds", labels="batch").from_values(preds, labels, jnp.ones(2, bool)).compute() == 0


@pytest.mark.parametrize("shape", [(), (3,)])
def test_confusion_matrix_equals_sklearn(shape, equals_reference):
    def draw(random, rows):
        preds = random.normal(size=(rows, *shape, 4)).astype(np.float32)
        return {"preds": preds, "labels": random.integers(0, 4, (rows, *shape)).astype(np.int8)}

    def reference(preds, labels):
        matrix = confusion_matrix(labels.ravel(), preds.reshape(-1, 4).argmax(-1), labels=range(4))
        return {f"true_{i}": {f"predicted_{j}": matrix[i, j] for j in range(4)} for i in range(4)}

    empty = equals_reference(ConfusionMatrix(preds="preds", labels="batch"), draw, reference)
    assert not any(empty.values())


def test_a_confusion_matrix_has_a_limit_and_counts_classes_only():
    metric = ConfusionMatrix(preds="preds", labels="batch", max_classes=2)
    state = metric.from_values(jnp.zeros((4, 3)), jnp.array([0, -1, 3, 2]), jnp.ones(4, bool))
    assert state.counts.tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 0]]
    with pytest.raises(WiringError, match="3 classes gives 9 results"):
        state.compute()


@pytest.mark.parametrize("cls", [Accuracy, TopKAccuracy, ConfusionMatrix, F1, Perplexity, TokenAccuracy, Calibrated])
def test_64_bit_scores_and_labels(cls):
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        scores, labels = jnp.asarray(random.normal(size=(8, 3))), jnp.asarray(random.integers(0, 3, 8))
        assert (scores.dtype, labels.dtype) == (jnp.float64, jnp.int64)
        metric = cls("preds", "batch.label")
        state = metric.from_values(scores, labels, jnp.ones(8, bool))
        half = metric.from_values(scores.astype(jnp.float32), labels.astype(jnp.int32), jnp.ones(8, bool))
        values, expected = (jax.tree.leaves(one.finalize().compute()) for one in (state | empty_state(state), half))
        np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_a_label_that_is_nan_is_wrong():
    every = jnp.ones(2, bool)
    binary = BinaryAccuracy(preds="preds", labels="batch")
    assert binary.from_values(jnp.array([0.1, 0.7]), jnp.array([jnp.nan, 1.0]), every).compute() == 0.5
    one_hot = jnp.array([[jnp.nan, jnp.nan], [1.0, 0.0]])
    assert (
        Accuracy(preds="preds", labels="batch").from_values(jnp.eye(2)[:1].repeat(2, 0), one_hot, every).compute()
        == 0.5
    )
