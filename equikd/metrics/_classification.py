"""Metrics of classifiers."""

import jax.numpy as jnp

from equikd.config import config
from equikd.metrics._average import Average
from equikd.metrics._base import Metric
from equikd.typing import Array, Bool, Float, Integer, Num
from equikd.wiring import KeyPath


@config
class Accuracy(Metric):
    """The share of rows whose most likely class is the right one: mean of [argmax(preds) = label].

    The value of scikit-learn's `accuracy_score(labels, argmax(preds))`; of classes with equal scores the first counts.

    Example:
        >>> logits, labels = jnp.array([[2.0, 1.0], [0.0, 3.0]]), jnp.array([0, 0])
        >>> accuracy = Accuracy(preds="preds.logits", labels="batch.label")
        >>> accuracy.from_values(logits, labels, jnp.ones(2, bool)).compute().item()
        0.5
    """

    preds: KeyPath
    """Key path of logits or probabilities, float `b *n classes`."""
    labels: KeyPath
    """Key path of the labels: class indices, int `b *n`, or one-hot, `b *n classes`."""

    def from_values(
        self,
        preds: Float[Array, "b *n classes"],
        labels: Integer[Array, " b *n"] | Num[Array, "b *n classes"] | Bool[Array, "b *n classes"],
        mask: Bool[Array, "b ..."],
    ) -> Average:
        """Number of right predictions and of predictions, over the rows that the mask keeps."""
        labels = labels.argmax(axis=-1) if labels.ndim == preds.ndim else labels
        return Average.of(preds.argmax(axis=-1) == labels.astype(jnp.int32), mask)
