"""Metrics of classifiers that look at the class chosen: accuracies, and the confusion matrix.

Scores are logits or probabilities, whichever the model gives: only their order matters. Of classes with equal scores
the first is chosen, as by `argmax`. Rows that do not count may have any label, also one that is no class.
"""

from typing import Any

import jax.numpy as jnp

from equikd.config import config
from equikd.errors import ConfigError, WiringError, message
from equikd.metrics._average import Average
from equikd.metrics._base import Metric
from equikd.metrics._elements import class_index, counted, each, wide
from equikd.metrics._state import State, static_field, sum_field
from equikd.typing import Array, Bool, Float, Int, Integer, Num
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
        known = jnp.ones((), bool)
        if labels.ndim == preds.ndim:
            labels, known = labels.argmax(axis=-1), ~undefined(labels).any(axis=-1)
        chosen = preds.argmax(axis=-1).astype(jnp.int32)
        return Average.of((chosen == class_index(labels, preds.shape[-1])) & known, mask)


@config
class TopKAccuracy(Metric):
    """The share of rows whose label is among the k most likely classes: mean of [rank(label) <= k].

    scikit-learn's `top_k_accuracy_score`, except that of classes with equal scores the first ranks higher, as in
    `Accuracy`. A label that is no class, or whose score is nan, is wrong; nan of nothing.

    Example:
        >>> logits, labels = jnp.array([[2.0, 1.0, 0.0], [0.0, 3.0, 4.0]]), jnp.array([1, 0])
        >>> metric = TopKAccuracy(preds="preds.logits", labels="batch.label", k=2)
        >>> metric.from_values(logits, labels, jnp.ones(2, bool)).compute().item()
        0.5
    """

    preds: KeyPath
    """Key path of logits or probabilities, float `b *n classes`."""
    labels: KeyPath
    """Key path of the class indices, int `b *n`."""
    k: int = 5
    """How many classes may be tried."""

    def validate(self) -> None:
        """Refuse k < 1."""
        if self.k < 1:
            raise ConfigError(message("TopKAccuracy.k: no class may be tried", got=str(self.k), expected="k >= 1"))

    def from_values(
        self, preds: Float[Array, "b *n classes"], labels: Integer[Array, " b *n"], mask: Bool[Array, "b ..."]
    ) -> Average:
        """Number of labels that rank high enough and of labels, over what the mask keeps."""
        classes = jnp.arange(preds.shape[-1], dtype=jnp.int32)
        labels = class_index(labels, preds.shape[-1])[..., None]
        is_label = classes == labels
        own = jnp.where(is_label, preds, jnp.full_like(preds, -jnp.inf)).max(axis=-1, keepdims=True)
        behind = (own > preds) | ((own == preds) & (classes >= labels))
        rank = jnp.sum(~behind, axis=-1, dtype=jnp.int32)  # a nan is behind nothing
        return Average.of(is_label.any(axis=-1) & (rank < self.k), mask)


@config
class BinaryAccuracy(Metric):
    """The share of elements on the right side of a threshold: mean of [(preds > threshold) = label].

    scikit-learn's `accuracy_score(labels, preds > threshold)`. A nan is wrong; nan of nothing.

    Example:
        >>> probabilities, labels = jnp.array([0.9, 0.2, 0.7, 0.1]), jnp.array([1, 0, 0, 0])
        >>> metric = BinaryAccuracy(preds="preds", labels="batch.label")
        >>> metric.from_values(probabilities, labels, jnp.ones(4, bool)).compute().item()
        0.75
    """

    preds: KeyPath
    """Key path of probabilities (or of logits: threshold 0), float `b *n`."""
    labels: KeyPath
    """Key path of the labels, bool, or numbers of which those above 0.5 are positive, `b *n`."""
    threshold: float = 0.5
    """What lies above is predicted to be positive."""

    def from_values(
        self,
        preds: Float[Array, " b *n"],
        labels: Bool[Array, " b *n"] | Integer[Array, " b *n"] | Float[Array, " b *n"],
        mask: Bool[Array, "b ..."],
    ) -> Average:
        """Number of right predictions and of predictions, over what the mask keeps."""
        preds = wide(preds)
        threshold = jnp.asarray(self.threshold, preds.dtype)
        right = jnp.where(positive(labels), preds > threshold, preds <= threshold)
        return Average.of(right & ~undefined(labels), mask)


def undefined(labels: Any) -> Any:
    """Which labels are nan."""
    return jnp.isnan(labels) if jnp.issubdtype(labels.dtype, jnp.inexact) else jnp.zeros(labels.shape, bool)


def positive(labels: Any) -> Any:
    """Which binary labels are positive: True, or a number above 0.5."""
    return labels if labels.dtype == jnp.bool_ else wide(labels) > 0.5


class Confusions(State):
    """How often each class was taken for each class.

    Attributes:
        counts: int32 (int64 under x64), `true predicted`.
        max_classes: with more classes, there are no results.

    Example:
        >>> state = Confusions(jnp.array([[3, 1], [0, 2]]))
        >>> {name: row["predicted_1"].item() for name, row in (state | state).compute().items()}
        {'true_0': 2, 'true_1': 4}
    """

    counts: Int[Array, "classes classes"] = sum_field()
    max_classes: int = static_field(default=20)

    def compute(self) -> dict[str, dict[str, Any]]:
        """The counts by name, `true_I.predicted_J`; the matrix itself is `counts`.

        Raises:
            WiringError: there are more classes than `max_classes`.
        """
        size = len(self.counts)
        if size > self.max_classes:
            what, fix = f"a confusion matrix of {size} classes gives {size**2} results", f"max_classes={size}"
            raise WiringError(message(what, expected=f"at most {self.max_classes} classes", fix=fix))
        return {f"true_{i}": {f"predicted_{j}": self.counts[i, j] for j in range(size)} for i in range(size)}


@config
class ConfusionMatrix(Metric):
    """How often each class was taken for each class, scikit-learn's `confusion_matrix(labels, argmax(preds))`.

    Results are counts named `true_I.predicted_J`, 0 of nothing; the matrix, `true predicted`, is the field `counts` of
    the state. Each cell is a result of its own, so many classes are refused unless `max_classes` says otherwise. A
    label that is no class counts nowhere.

    Example:
        >>> logits, labels = jnp.array([[2.0, 1.0], [0.0, 3.0]]), jnp.array([0, 0])
        >>> metric = ConfusionMatrix(preds="preds.logits", labels="batch.label")
        >>> metric.from_values(logits, labels, jnp.ones(2, bool)).counts.tolist()
        [[1, 1], [0, 0]]
    """

    preds: KeyPath
    """Key path of logits or probabilities, float `b *n classes`."""
    labels: KeyPath
    """Key path of the class indices, int `b *n`."""
    max_classes: int = 20
    """With more classes than this, results are refused; the state has the matrix all the same."""

    def from_values(
        self, preds: Float[Array, "b *n classes"], labels: Integer[Array, " b *n"], mask: Bool[Array, "b ..."]
    ) -> Confusions:
        """Counts over what the mask keeps."""
        classes = preds.shape[-1]
        keep, labels = each(labels, mask), class_index(labels, classes)
        chosen = preds.argmax(axis=-1).astype(jnp.int32)
        cells = counted(jnp.maximum(labels, 0) * classes + chosen, keep & (labels >= 0), classes**2)
        return Confusions(cells.reshape(classes, classes), self.max_classes)
