"""Precision, recall and F1 of classifiers, from counts that are summed over all rows.

An F1 averaged over batches is no F1: it depends on how the rows were split. So the state holds, for each class, how
often it was predicted rightly, predicted, and true, and the score is computed once from the sums.
"""

from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from equikd.config import config
from equikd.metrics._base import Metric
from equikd.metrics._elements import arrays_of, class_index, counted, each, floats
from equikd.metrics._state import State, static_field, sum_field
from equikd.typing import Array, Bool, Float, Int, Integer
from equikd.wiring import KeyPath


class ClassCounts(State):
    """How often each class was predicted rightly, predicted, and true.

    Attributes:
        right: int32 (int64 under x64), one for each class.
        predicted: as `right`.
        true: as `right`.
        score: `"precision"`, `"recall"` or `"f1"`.
        average: `"micro"`, `"macro"` or `"per_class"`.

    Example:
        >>> counts = ClassCounts(jnp.array([1, 1]), jnp.array([1, 2]), jnp.array([2, 1]), "precision", "per_class")
        >>> {name: score.item() for name, score in counts.compute().items()}
        {'class_0': 1.0, 'class_1': 0.5}
    """

    right: Int[Array, " classes"] = sum_field()
    predicted: Int[Array, " classes"] = sum_field()
    true: Int[Array, " classes"] = sum_field()
    score: str = static_field(default="f1")
    average: str = static_field(default="macro")

    def compute(self) -> Any:
        """The score, or a dict of one for each class, `class_0`, `class_1`, ...; nan of nothing."""
        one, two = {
            "precision": (self.predicted, self.predicted),
            "recall": (self.true, self.true),
            "f1": (self.predicted, self.true),
        }[self.score]
        arrays = arrays_of(self.right)
        right, one, two = (floats(count) for count in (self.right, one, two))  # as ints, twice a count may not fit
        both = 0.5 * (one + two)  # F1 = 2 right / (predicted + true)
        if self.average == "micro":
            return right.sum() / both.sum()
        seen = (self.predicted > 0) | (self.true > 0)
        scores = arrays.where(seen, right / arrays.maximum(both, 0.5), arrays.full_like(right, arrays.nan))
        if self.average == "per_class":
            return {f"class_{i}": scores[i] for i in range(len(scores))}
        return arrays.where(seen, scores, arrays.zeros_like(scores)).sum() / seen.sum().astype(scores.dtype)


@config
class _OfClasses(Metric):
    """A score of how well classes are found; a subclass says which."""

    score: ClassVar[str]
    """`"precision"`, `"recall"` or `"f1"`."""

    preds: KeyPath
    """Key path of logits or probabilities, float `b *n classes`."""
    labels: KeyPath
    """Key path of the class indices, int `b *n`."""
    average: Literal["micro", "macro", "per_class"] = "macro"
    """How the scores of the classes become one."""

    def from_values(
        self, preds: Float[Array, "b *n classes"], labels: Integer[Array, " b *n"], mask: Bool[Array, "b ..."]
    ) -> ClassCounts:
        """Counts by class over what the mask keeps; a label that is no class is true of none."""
        classes = preds.shape[-1]
        keep, labels = each(labels, mask), class_index(labels, classes)
        chosen = preds.argmax(axis=-1).astype(jnp.int32)
        right = counted(chosen, keep & (chosen == labels), classes)
        predicted, true = counted(chosen, keep, classes), counted(labels, keep, classes)
        return ClassCounts(right, predicted, true, self.score, self.average)


@config
class Precision(_OfClasses):
    """How many predictions of a class are right: right / predicted.

    scikit-learn's `precision_score(labels, argmax(preds), average=...)`, from counts over all rows. `"micro"` adds the
    counts of all classes first; `"macro"` is the mean over the classes that occur in labels or predictions;
    `"per_class"` gives a result for each class, `class_0`, `class_1`, ..., nan where the class does not occur. That of
    a class that is never predicted counts 0.
    Of nothing it is nan.

    Example:
        >>> logits = jnp.array([[2.0, 1.0], [0.0, 3.0], [0.0, 1.0], [1.0, 0.0]])
        >>> metric = Precision(preds="preds.logits", labels="batch.label")
        >>> round(metric.from_values(logits, jnp.array([0, 1, 0, 0]), jnp.ones(4, bool)).compute().item(), 3)
        0.75
    """

    score = "precision"


@config
class Recall(_OfClasses):
    """How many rows of a class are found: right / true.

    scikit-learn's `recall_score(labels, argmax(preds), average=...)`, from counts over all rows. `"micro"` adds the
    counts of all classes first; `"macro"` is the mean over the classes that occur in labels or predictions;
    `"per_class"` gives a result for each class, `class_0`, `class_1`, ..., nan where the class does not occur. That of
    a class that is predicted but never true counts 0.
    Of nothing it is nan.

    Example:
        >>> logits = jnp.array([[2.0, 1.0], [0.0, 3.0], [0.0, 1.0], [1.0, 0.0]])
        >>> metric = Recall(preds="preds.logits", labels="batch.label")
        >>> round(metric.from_values(logits, jnp.array([0, 1, 0, 0]), jnp.ones(4, bool)).compute().item(), 3)
        0.833
    """

    score = "recall"


@config
class F1(_OfClasses):
    """The harmonic mean of precision and recall: 2 right / (predicted + true).

    scikit-learn's `f1_score(labels, argmax(preds), average=...)`, from counts over all rows. `"micro"` adds the
    counts of all classes first; `"macro"` is the mean over the classes that occur in labels or predictions;
    `"per_class"` gives a result for each class, `class_0`, `class_1`, ..., nan where the class does not occur.
    Of nothing it is nan.

    Example:
        >>> logits = jnp.array([[2.0, 1.0], [0.0, 3.0], [0.0, 1.0], [1.0, 0.0]])
        >>> metric = F1(preds="preds.logits", labels="batch.label")
        >>> round(metric.from_values(logits, jnp.array([0, 1, 0, 0]), jnp.ones(4, bool)).compute().item(), 3)
        0.733
    """

    score = "f1"
