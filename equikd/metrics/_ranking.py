"""Metrics of binary scores over all thresholds, with fixed memory: the scores are counted in bins.

Exact curves need all scores at once. Here a state holds how many positives and negatives lie in each of some bins, and
the value is exactly scikit-learn's for scores rounded down to the edges of their bins: two scores in one bin count as
equal. With 1000 bins the area under the ROC curve is off by some 1e-4 at most where scores are spread out.
"""

from typing import Any

import jax.numpy as jnp

from equikd.config import config
from equikd.errors import ConfigError, message
from equikd.metrics._base import Metric
from equikd.metrics._classification import positive
from equikd.metrics._elements import arrays_of, counted, each, wide
from equikd.metrics._state import State, static_field, sum_field
from equikd.typing import Array, Bool, Float, Int, Integer
from equikd.wiring import KeyPath


class ScoreCounts(State):
    """How many positives and negatives have a score in each bin.

    Attributes:
        positives: int32, one for each bin, the lowest first.
        negatives: int32, as `positives`.
        invalid: number of scores that are nan.
        summary: `"roc_auc"` or `"average_precision"`.

    Example:
        >>> state = ScoreCounts(jnp.array([0, 1, 1]), jnp.array([1, 1, 0]), jnp.int32(0), "roc_auc")
        >>> (state | state).compute().item()
        0.875
    """

    positives: Int[Array, " bins"] = sum_field()
    negatives: Int[Array, " bins"] = sum_field()
    invalid: Int[Array, ""] = sum_field()
    summary: str = static_field(default="roc_auc")

    def compute(self) -> Float[Array, ""]:
        """The area; nan without a positive, for the ROC curve also without a negative, and if any score is nan."""
        arrays = arrays_of(self.positives)
        positives, negatives = self.positives.astype(arrays.float32), self.negatives.astype(arrays.float32)
        share = positives / positives.sum()
        if self.summary == "roc_auc":
            # A positive wins against the negatives below it, and half against those in its bin.
            below = arrays.cumsum(negatives) - negatives
            value = (share * (below + 0.5 * negatives)).sum() / negatives.sum()
        else:
            found = arrays.cumsum(positives[::-1])[::-1]
            taken = found + arrays.cumsum(negatives[::-1])[::-1]
            value = (share * found / arrays.maximum(taken, 1)).sum()
        return arrays.where(self.invalid > 0, arrays.full_like(value, arrays.nan), value)


def _counts(metric: Any, preds: Any, labels: Any, mask: Any, summary: str) -> ScoreCounts:
    keep, scores, right = each(preds, mask), wide(preds), positive(labels)
    valid = ~jnp.isnan(scores)
    low, high = jnp.asarray(metric.low, scores.dtype), jnp.asarray(metric.high, scores.dtype)
    position = jnp.clip(jnp.floor((scores - low) / (high - low) * metric.bins), 0, metric.bins - 1)
    index = jnp.where(keep & valid, position, jnp.zeros_like(position)).astype(jnp.int32)
    return ScoreCounts(
        counted(index, keep & valid & right, metric.bins),
        counted(index, keep & valid & ~right, metric.bins),
        (keep & ~valid).sum(dtype=jnp.int32),
        summary,
    )


def _refuse(metric: Any) -> None:
    if not (metric.bins >= 1 and metric.low < metric.high):
        name, got = type(metric).__name__, f"bins={metric.bins}, low={metric.low}, high={metric.high}"
        raise ConfigError(message(f"{name}: no bins", got=got, expected="bins >= 1 and low < high"))


@config
class RocAuc(Metric):
    """The area under the ROC curve: how often a positive scores above a negative, ties counting half.

    scikit-learn's `roc_auc_score(labels, preds)` for scores rounded down to a bin (Fawcett 2006, "An introduction to
    ROC analysis").

    Scores are counted in `bins` of equal width from `low` to `high`; those outside belong to the first or last bin. For
    logits choose a range that holds them, such as -10 to 10. A nan among the scores that count makes it nan; of nothing
    it is nan.

    Example:
        >>> scores, labels = jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([0, 0, 1, 1])
        >>> metric = RocAuc(preds="preds", labels="batch.label")
        >>> round(metric.from_values(scores, labels, jnp.ones(4, bool)).compute().item(), 4)
        0.75
    """

    preds: KeyPath
    """Key path of the scores of the positive class, float `b *n`."""
    labels: KeyPath
    """Key path of the labels, bool, or numbers of which those above 0.5 are positive, `b *n`."""
    bins: int = 1000
    """Number of bins: what is kept of the scores."""
    low: float = 0.0
    """Lower edge of the first bin."""
    high: float = 1.0
    """Upper edge of the last bin."""

    def validate(self) -> None:
        """Refuse a range without width, or no bins."""
        _refuse(self)

    def from_values(
        self,
        preds: Float[Array, " b *n"],
        labels: Bool[Array, " b *n"] | Integer[Array, " b *n"] | Float[Array, " b *n"],
        mask: Bool[Array, "b ..."],
    ) -> ScoreCounts:
        """Positives and negatives by bin, over what the mask keeps."""
        return _counts(self, preds, labels, mask, "roc_auc")


@config
class AveragePrecision(Metric):
    """The area under the precision-recall curve: sum of (R_i - R_{i-1}) P_i over falling thresholds.

    scikit-learn's `average_precision_score(labels, preds)` for scores rounded down to a bin, without interpolation.

    Scores are counted in `bins` of equal width from `low` to `high`; those outside belong to the first or last bin. For
    logits choose a range that holds them, such as -10 to 10. A nan among the scores that count makes it nan; of nothing
    it is nan.

    Example:
        >>> scores, labels = jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([0, 0, 1, 1])
        >>> metric = AveragePrecision(preds="preds", labels="batch.label")
        >>> round(metric.from_values(scores, labels, jnp.ones(4, bool)).compute().item(), 4)
        0.8333
    """

    preds: KeyPath
    """Key path of the scores of the positive class, float `b *n`."""
    labels: KeyPath
    """Key path of the labels, bool, or numbers of which those above 0.5 are positive, `b *n`."""
    bins: int = 1000
    """Number of bins: what is kept of the scores."""
    low: float = 0.0
    """Lower edge of the first bin."""
    high: float = 1.0
    """Upper edge of the last bin."""

    def validate(self) -> None:
        """Refuse a range without width, or no bins."""
        _refuse(self)

    def from_values(
        self,
        preds: Float[Array, " b *n"],
        labels: Bool[Array, " b *n"] | Integer[Array, " b *n"] | Float[Array, " b *n"],
        mask: Bool[Array, "b ..."],
    ) -> ScoreCounts:
        """Positives and negatives by bin, over what the mask keeps."""
        return _counts(self, preds, labels, mask, "average_precision")
