"""Metrics of binary scores over all thresholds: areas under curves, with fixed memory or exact.

A curve needs all scores at once. *Binned*, a state holds how many positives and negatives lie in each of some bins, and
the value is exactly scikit-learn's for scores rounded down to the edges of their bins: two scores in one bin count as
equal. With 1000 bins the area under the ROC curve is off by some 1e-4 at most where scores are spread out. It costs the
same everywhere, so it is the default. *Exact* (`bins=None`), a state keeps each score: in evals as many as there are,
and in a training interval up to a `size`.

Both end in counts by score, from the lowest to the highest, and one formula for each area.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from equikd.config import config
from equikd.errors import ConfigError, message
from equikd.metrics._base import Metric
from equikd.metrics._classification import positive, undefined
from equikd.metrics._elements import arrays_of, counted, each, floats, wide
from equikd.metrics._rows import Rows
from equikd.metrics._state import State, concat_field, static_field, sum_field
from equikd.metrics._sums import count_dtype
from equikd.typing import Array, Bool, Float, Int, Integer
from equikd.wiring import KeyPath


def area(positives: Any, negatives: Any, curve: str) -> Any:
    """The area under a curve, from how many positives and negatives have each score, the lowest first.

    Args:
        positives: counts as floats, `n`.
        negatives: as `positives`.
        curve: `"roc"`, or `"precision_recall"`.

    Returns:
        A float scalar; nan without a positive, for the ROC curve also without a negative.
    """
    arrays = arrays_of(positives, negatives)
    share = positives / positives.sum()
    if curve == "roc":
        # A positive wins against the negatives below it, and half against those of its own score.
        below = arrays.cumsum(negatives) - negatives
        return (share * (below + 0.5 * negatives)).sum() / negatives.sum()
    found = arrays.cumsum(positives[::-1])[::-1]
    taken = found + arrays.cumsum(negatives[::-1])[::-1]
    value = (share * found / arrays.maximum(taken, 1)).sum()
    return value / arrays.where(positives.sum() > 0, 1.0, arrays.nan)  # of no score at all the sum is 0


class ScoreCounts(State):
    """How many positives and negatives have a score in each bin.

    Attributes:
        positives: int32 (int64 under x64), one for each bin, the lowest first.
        negatives: as `positives`.
        invalid: number of scores that are nan, or outside the bins.
        curve: `"roc"` or `"precision_recall"`.

    Example:
        >>> state = ScoreCounts(jnp.array([0, 1, 1]), jnp.array([1, 1, 0]), jnp.int32(0), "roc")
        >>> (state | state).compute().item()
        0.875
    """

    positives: Int[Array, " bins"] = sum_field()
    negatives: Int[Array, " bins"] = sum_field()
    invalid: Int[Array, ""] = sum_field()
    curve: str = static_field(default="roc")

    def compute(self) -> Float[Array, ""]:
        """The area; nan without a positive, of the ROC curve also without a negative, and with an invalid score."""
        value = area(floats(self.positives), floats(self.negatives), self.curve)
        arrays = arrays_of(value)
        return arrays.where(self.invalid > 0, arrays.full_like(value, arrays.nan), value)


@functools.cache  # the state's class is part of the program: one for each size, for good
def scores_with(size: int | None) -> Callable[[Rows, str], State]:
    """The class of states that keep each score, at most `size` of them where it is not None."""

    class Scores(State):
        """Scores and labels.

        Attributes:
            rows: `score`, float32 or float64, and `positive`, bool.
            curve: `"roc"` or `"precision_recall"`.
        """

        __qualname__ = "Scores"
        rows: Rows = concat_field(size=size)
        curve: str = static_field(default="roc")

        def compute(self) -> Any:
            """The area in float64, on the host; nan where `ScoreCounts` is."""
            rows = self.rows.real()
            scores, right = rows["score"].ravel(), rows["positive"].ravel()
            if np.isnan(scores).any():
                return np.float64(np.nan)
            levels, place = np.unique(scores, return_inverse=True)
            of = lambda which: np.bincount(place, weights=which, minlength=len(levels))
            return np.float64(area(of(right), of(~right), self.curve))

    return Scores


@config
class _OverThresholds(Metric):
    """The area under a curve; a subclass says which."""

    curve: ClassVar[str]
    """`"roc"` or `"precision_recall"`."""

    preds: KeyPath
    """Key path of the scores of the positive class, float `b *n`."""
    labels: KeyPath
    """Key path of the labels, bool, or numbers of which those above 0.5 are positive, `b *n`."""
    bins: int | None = 1000
    """Number of bins: what is kept of the scores. None: each score, so that the value is exact; for evals, or with a
    `size`."""
    low: float = 0.0
    """Lower edge of the first bin; a score below makes the result nan."""
    high: float = 1.0
    """Upper edge of the last bin, which holds it; a score above makes the result nan."""
    size: int | None = None
    """With `bins=None`: how many scores there is room for, so that the metric works in training intervals too. More of
    them are an error, when the value is read. None: any number, in evals alone."""

    def validate(self) -> None:
        """Refuse a range without width, no bins, no room, and a size for bins."""
        name = type(self).__name__
        if self.bins is not None and not (self.bins >= 1 and self.low < self.high):
            got, expected = f"bins={self.bins}, low={self.low}, high={self.high}", "bins >= 1 and low < high"
            raise ConfigError(message(f"{name}: no bins", got=got, expected=expected))
        if self.size is not None and self.bins is not None:
            got, fix = f"bins={self.bins}, size={self.size}", f"bins=None, size={self.size}; or no size"
            raise ConfigError(message(f"{name}.size: bins need no room for scores", got=got, fix=fix))
        if self.size is not None and self.size < 1:
            raise ConfigError(message(f"{name}.size: no room for scores", got=str(self.size), expected="size >= 1"))

    def from_values(
        self,
        preds: Float[Array, " b *n"],
        labels: Bool[Array, " b *n"] | Integer[Array, " b *n"] | Float[Array, " b *n"],
        mask: Bool[Array, "b ..."],
    ) -> State:
        """Scores and labels over what the mask keeps: counts by bin, or each of them."""
        keep, scores, right = each(preds, mask), wide(preds), positive(labels)
        scores = jnp.where(undefined(labels), jnp.full_like(scores, jnp.nan), scores)
        if self.bins is None:
            rows = Rows({"score": scores.ravel(), "positive": right.ravel()}, keep.ravel())
            return scores_with(self.size)(rows, self.curve)
        low, high = jnp.asarray(self.low, scores.dtype), jnp.asarray(self.high, scores.dtype)
        valid = (scores >= low) & (scores <= high)  # not of a nan
        position = jnp.clip(jnp.floor((scores - low) / (high - low) * self.bins), 0, self.bins - 1)
        index = jnp.where(keep & valid, position, jnp.zeros_like(position)).astype(jnp.int32)
        return ScoreCounts(
            counted(index, keep & valid & right, self.bins),
            counted(index, keep & valid & ~right, self.bins),
            (keep & ~valid).sum(dtype=count_dtype()),
            self.curve,
        )


@config
class RocAuc(_OverThresholds):
    """The area under the ROC curve: how often a positive scores above a negative, ties counting half.

    With `bins=None` it is scikit-learn's `roc_auc_score(labels, preds)`, in float64 (Fawcett 2006, "An introduction to
    ROC analysis"). With bins it is the same of scores rounded down to a bin: they are counted in `bins` of equal width
    from `low` to `high`; a score outside would be lost in the last one, so it makes the result nan. For logits choose a
    range that holds them, such as -100 to 100. A nan among the scores that count makes it nan as well; of one class
    alone, and of nothing, it is nan.

    Example:
        >>> scores, labels = jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([0, 0, 1, 1])
        >>> metric = RocAuc(preds="preds", labels="batch.label", bins=None)
        >>> metric.from_values(scores, labels, jnp.ones(4, bool)).compute().item()
        0.75
    """

    curve = "roc"


@config
class AveragePrecision(_OverThresholds):
    """The area under the precision-recall curve: sum of (R_i - R_{i-1}) P_i over falling thresholds.

    With `bins=None` it is scikit-learn's `average_precision_score(labels, preds)`, in float64, without interpolation
    (Manning, Raghavan and Schuetze 2008, "Introduction to information retrieval", 8.4). With bins it is the same of
    scores rounded down to a bin: they are counted in `bins` of equal width from `low` to `high`; a score outside would
    be lost in the last one, so it makes the result nan. For logits choose a range that holds them, such as -100 to 100.
    A nan among the scores that count makes it nan as well; without a positive, and of nothing, it is nan.

    Example:
        >>> scores, labels = jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([0, 0, 1, 1])
        >>> metric = AveragePrecision(preds="preds", labels="batch.label", bins=None)
        >>> round(metric.from_values(scores, labels, jnp.ones(4, bool)).compute().item(), 4)
        0.8333
    """

    curve = "precision_recall"
