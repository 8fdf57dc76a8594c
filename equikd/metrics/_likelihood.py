"""Metrics of predicted probabilities and of tokens: perplexity, token accuracy, calibration.

Tokens count one by one: the value over texts of different lengths is that over all their tokens, never a mean of means
of texts. Tokens that do not count are named by a mask `b t`, or by a label of their own (`ignore_label`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equikd.config import config
from equikd.errors import ConfigError, message
from equikd.metrics._average import Average
from equikd.metrics._base import Metric
from equikd.metrics._elements import arrays_of, class_index, counted, each, summed, wide
from equikd.metrics._state import State, state_field, sum_field
from equikd.metrics._sums import TwoFloat
from equikd.typing import Array, Bool, Float, Int, Integer
from equikd.wiring import KeyPath


def _tokens(labels: Any, mask: Any, ignore_label: int | None) -> Any:
    """Which tokens count, of the shape of the labels."""
    keep = each(labels, mask)
    return keep if ignore_label is None else keep & (labels.astype(jnp.int32) != ignore_label)


class ExpAverage(State):
    """e to the power of a mean.

    Attributes:
        average: of the exponents.

    Example:
        >>> ExpAverage(Average.of(jnp.log(jnp.array([1.0, 4.0])))).compute().round(3).item()
        2.0
    """

    average: Average = state_field()

    def compute(self) -> Float[Array, ""]:
        """exp(mean); nan of nothing."""
        mean = self.average.compute()
        with np.errstate(over="ignore"):  # inf is the right value
            return arrays_of(mean).exp(mean)


@config
class _OfTokens(Metric):
    """What is said of tokens."""

    logits: KeyPath
    """Key path of the logits, float `b *n classes`."""
    labels: KeyPath
    """Key path of the class indices, int `b *n`."""
    ignore_label: int | None = None
    """Tokens with this label do not count."""


@config
class Perplexity(_OfTokens):
    """e to the mean negative log likelihood of a token: exp(-mean(log softmax(logits)[label])).

    Jelinek et al. (1977), "Perplexity: a measure of the difficulty of speech recognition tasks"; scikit-learn's
    `exp(log_loss(labels, softmax(logits)))`. All tokens weigh the same. A label that is no class makes it nan, unless
    it is masked or ignored; nan of nothing.

    Example:
        >>> logits, labels = jnp.zeros((2, 3, 4)), jnp.array([[0, 1, 2], [3, -100, -100]])
        >>> metric = Perplexity(logits="preds", labels="batch.next", ignore_label=-100)
        >>> metric.from_values(logits, labels, jnp.ones(2, bool)).compute().round(3).item()
        4.0
    """

    def from_values(
        self, logits: Float[Array, "b *n classes"], labels: Integer[Array, " b *n"], mask: Bool[Array, "b ..."]
    ) -> ExpAverage:
        """Sum and count of the negative log likelihoods that the mask keeps."""
        keep, classes = _tokens(labels, mask, self.ignore_label), logits.shape[-1]
        logits = wide(logits)
        logits = jnp.where(keep[..., None], logits, jnp.zeros_like(logits))
        labels = class_index(labels, classes)
        inside = labels >= 0
        chosen = jnp.maximum(labels, 0)[..., None]
        log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=-1)[..., 0]
        values = jnp.where(inside, -log_likelihood, jnp.full_like(log_likelihood, jnp.nan))
        return ExpAverage(Average.of(values, keep))


@config
class TokenAccuracy(_OfTokens):
    """The share of tokens whose most likely class is the right one: mean of [argmax(logits) = label].

    scikit-learn's `accuracy_score` over all tokens that count, each weighing the same; nan of nothing.

    Example:
        >>> logits, labels = jnp.array([[[2.0, 1.0], [0.0, 3.0], [0.0, 0.0]]]), jnp.array([[0, 0, -100]])
        >>> metric = TokenAccuracy(logits="preds", labels="batch.next", ignore_label=-100)
        >>> metric.from_values(logits, labels, jnp.ones(1, bool)).compute().item()
        0.5
    """

    def from_values(
        self, logits: Float[Array, "b *n classes"], labels: Integer[Array, " b *n"], mask: Bool[Array, "b ..."]
    ) -> Average:
        """Number of right predictions and of predictions, over the tokens that count."""
        right = logits.argmax(axis=-1).astype(jnp.int32) == class_index(labels, logits.shape[-1])
        return Average.of(right, _tokens(labels, mask, self.ignore_label))


class Calibration(State):
    """Confidence and accuracy by bin of confidence.

    Attributes:
        confidence: sum of the confidences in each bin, float32 and its error.
        right: how many predictions in each bin are right, int32 (int64 under x64).
        counts: how many predictions there are in each bin, as `right`.

    Example:
        >>> state = Calibration(jnp.array([0.0, 1.75]), jnp.array([0, 1]), jnp.array([0, 2]))
        >>> (state | state).compute().item()
        0.375
    """

    confidence: TwoFloat = sum_field(exact=True)
    right: Int[Array, " bins"] = sum_field()
    counts: Int[Array, " bins"] = sum_field()

    def compute(self) -> Float[Array, ""]:
        """Sum of |right - confidence| / count; nan of nothing."""
        # The counts are taken away from the larger part first, where they cancel, so that the errors are not lost.
        high, low = self.confidence.high, self.confidence.low
        gaps = abs((high - self.right.astype(high.dtype)) + low)
        return gaps.sum() / self.counts.sum().astype(high.dtype)


@config
class ExpectedCalibrationError(Metric):
    """How far confidence is from accuracy: sum over bins of count / n * |accuracy - mean confidence|.

    Guo et al. (2017), "On calibration of modern neural networks": the confidence is the largest probability, and the
    bins, of equal width, hold their upper edges. Of nothing it is nan.

    Example:
        >>> logits, labels = jnp.log(jnp.array([[0.9, 0.1], [0.2, 0.8]])), jnp.array([0, 0])
        >>> metric = ExpectedCalibrationError(logits="preds.logits", labels="batch.label")
        >>> round(metric.from_values(logits, labels, jnp.ones(2, bool)).compute().item(), 3)
        0.45
    """

    logits: KeyPath
    """Key path of the logits, float `b *n classes`; of probabilities p, their logarithm."""
    labels: KeyPath
    """Key path of the class indices, int `b *n`."""
    bins: int = 15
    """Number of bins."""

    def validate(self) -> None:
        """Refuse to have no bins."""
        if self.bins < 1:
            what = "ExpectedCalibrationError.bins: no bins"
            raise ConfigError(message(what, got=str(self.bins), expected="bins >= 1"))

    def from_values(
        self, logits: Float[Array, "b *n classes"], labels: Integer[Array, " b *n"], mask: Bool[Array, "b ..."]
    ) -> Calibration:
        """Confidences, right predictions and predictions by bin, over what the mask keeps."""
        keep, logits = each(labels, mask), wide(logits)
        logits = jnp.where(keep[..., None], logits, jnp.zeros_like(logits))
        confidence = jax.nn.softmax(logits).max(axis=-1)
        right = logits.argmax(axis=-1).astype(jnp.int32) == class_index(labels, logits.shape[-1])
        position = jnp.clip(jnp.ceil(confidence * self.bins) - 1, 0, self.bins - 1)
        position = jnp.where(jnp.isnan(position), jnp.zeros_like(position), position)
        index = position.astype(jnp.int32)
        weights = jnp.where(keep, confidence, jnp.zeros_like(confidence))
        return Calibration(
            summed(index, weights, self.bins), counted(index, keep & right, self.bins), counted(index, keep, self.bins)
        )
