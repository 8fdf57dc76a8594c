"""Precision, recall and F1: equal to scikit-learn's over all rows, never a mean over batches."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_score, recall_score

from equikd.metrics import F1, Precision, Recall

REFERENCES = [(Precision, precision_score), (Recall, recall_score), (F1, f1_score)]


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("average", ["micro", "macro", "per_class"])
@pytest.mark.parametrize(("cls", "reference"), REFERENCES)
def test_equals_sklearn(cls, reference, average, shape, equals_reference):
    def draw(random, rows):
        preds = random.normal(size=(rows, *shape, 6)).astype(np.float32)
        preds[..., 5] -= 2  # seldom predicted, and class 4 is seldom true
        labels = np.minimum(random.integers(0, 6, (rows, *shape)), random.integers(0, 9, (rows, *shape)))
        return {"preds": preds, "labels": labels.astype(np.int32)}

    def expected(preds, labels):
        labels, chosen = labels.ravel(), preds.reshape(-1, 6).argmax(-1)
        if average != "per_class":
            return reference(labels, chosen, average=average, zero_division=0)
        scores = reference(labels, chosen, average=None, labels=range(6), zero_division=0)
        return {f"class_{i}": score if i in {*labels, *chosen} else np.nan for i, score in enumerate(scores)}

    metric = cls(preds="preds", labels="batch", average=average)
    empty = equals_reference(metric, draw, expected, by_element="labels" if shape else None)
    assert all(np.isnan(value) for value in empty.values())


def test_f1_is_the_same_for_every_batch_size():  # case 20
    random = np.random.default_rng(0)
    preds, labels = jnp.asarray(random.normal(size=(24, 3))), jnp.asarray(random.integers(0, 3, 24))
    metric = F1(preds="preds", labels="batch")
    values = []
    for size in (1, 5, 24):
        parts = [slice(start, start + size) for start in range(0, 24, size)]
        states = [metric.from_values(preds[at], labels[at], jnp.ones(len(labels[at]), bool)) for at in parts]
        values.append(functools.reduce(lambda a, b: a | b, states).compute().item())
    assert len(set(values)) == 1
    np.testing.assert_allclose(values[0], f1_score(labels, preds.argmax(-1), average="macro"), rtol=1e-6)


def test_a_label_that_is_no_class_is_a_false_positive():
    metric = Precision(preds="preds", labels="batch", average="micro")
    state = metric.from_values(jnp.eye(2), jnp.array([0, -1]), jnp.ones(2, bool))
    assert (state.compute(), state.true.tolist()) == (0.5, [1, 0])
