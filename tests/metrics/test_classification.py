"""Accuracy: equal to scikit-learn's on the rows that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from sklearn.metrics import accuracy_score

from equikd.metrics import Accuracy

ACCURACY = Accuracy(preds="preds", labels="batch.label")


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


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
