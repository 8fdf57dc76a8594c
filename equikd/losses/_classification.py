"""Losses of class labels, from logits (unnormalised log probabilities).

A label that is no class makes its value nan, and with it the loss of the batch: an int label below 0 or not below the
number of classes. Indexing alone would take -1 for the last class. A program that is compiled cannot raise, so the loss
itself has to tell; its gradient stays that of the other rows, to which such a row adds 0. Labels that mean "ignore"
(-1, -100) belong into the mask, `mask="batch.keep"`, and are then never looked at.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from equikd.config import config, field
from equikd.losses._base import Loss, widened
from equikd.typing import Array, Bool, Float, Integer, Num
from equikd.wiring import KeyPath


def _checked(labels: Any, classes: int) -> tuple[Any, Any]:
    """Labels with 0 for ints that are no class, and which of them are one (None where all are, as in floats)."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        return labels, None
    # An 8-bit label cannot be compared with 1000 classes, nor can it index them from the end.
    wide = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    right = (wide >= 0) & (wide < classes)
    return jnp.where(right, wide, jnp.zeros_like(wide)), right


def _nan_where_wrong(values: Any, right: Any) -> Any:
    return values if right is None else jnp.where(right, values, jnp.full_like(values, jnp.nan))


@config
class SoftmaxCrossEntropy(Loss):
    """Cross entropy of softmax(logits): -sum_k y_k log softmax(logits)_k, one value for each row (or token).

    With label smoothing s the target is (1 - s) y + s / classes (Szegedy et al. 2016, arXiv:1512.00567, section 7).
    From `optax.losses.softmax_cross_entropy_with_integer_labels` and `safe_softmax_cross_entropy`. In float32 at least.
    Classes may be ruled out by logits of -inf. An int label outside 0 to classes - 1, -1 too, gives nan (see
    `_classification.py`); labels with an axis of classes are taken as they are, and not normalised.

    Example:
        >>> loss = SoftmaxCrossEntropy(logits="preds.logits", labels="batch.label", label_smoothing=0.1)
        >>> print(loss.values(jnp.array([[0.0, 0.0], [0.0, 99.0]]), jnp.array([1, 1])).round(2))
        [0.69 4.95]
    """

    depends_on = "element"

    logits: KeyPath
    """Key path of unnormalised log probabilities, float `b *n classes`."""
    labels: KeyPath
    """Key path of the labels: class indices, int `b *n`, or one-hot or probabilities, `b *n classes`."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all classes, from 0 to 1; a traced float."""

    def validate(self) -> None:
        """Refuse a smoothing outside [0, 1]."""
        if isinstance(self.label_smoothing, float) and not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be between 0 and 1, got {self.label_smoothing}")

    def values(
        self,
        logits: Float[Array, "b *n classes"],
        labels: Integer[Array, " b *n"] | Num[Array, "b *n classes"] | Bool[Array, "b *n classes"],
    ) -> Float[Array, " b *n"]:
        """The cross entropy of each row."""
        right = None
        if labels.ndim == logits.ndim:
            logits, labels = widened(logits, labels)
            entropy = optax.losses.safe_softmax_cross_entropy(logits, labels)
        else:
            (logits,) = widened(logits)
            labels, right = _checked(labels, logits.shape[-1])
            entropy = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
        smoothing = jnp.asarray(self.label_smoothing, logits.dtype)
        even = jax.nn.logsumexp(logits, axis=-1) - logits.mean(axis=-1)
        # A class with logit -inf makes this inf, and 0 x inf nan; the value of the smoothing is not known in the trace.
        even = jnp.where((smoothing > 0) | jnp.isfinite(even), even, 0)
        return _nan_where_wrong((1 - smoothing) * entropy + smoothing * even, right)


@config
class SigmoidBinaryCrossEntropy(Loss):
    """Cross entropy of p = sigmoid(logits): -y log p - (1 - y) log(1 - p), one value for each element.

    For two classes, and for several labels of a row that do not exclude each other. It is
    `optax.losses.sigmoid_binary_cross_entropy`, in float32 at least; logits are finite. An int label other than 0 and 1
    gives nan (see `_classification.py`); floats are taken as the probability of 1.

    Example:
        >>> loss = SigmoidBinaryCrossEntropy(logits="preds", labels="batch.label")
        >>> print(loss.values(jnp.array([0.0, 9.0, 9.0]), jnp.array([1, 1, -1])).round(2))
        [0.69 0.    nan]
    """

    depends_on = "element"

    logits: KeyPath
    """Key path of the log odds of 1, float `b *n`."""
    labels: KeyPath
    """Key path of the labels, bool, 0 or 1, or probabilities, `b *n`."""

    def values(
        self, logits: Float[Array, " b *n"], labels: Num[Array, " b *n"] | Bool[Array, " b *n"]
    ) -> Float[Array, " b *n"]:
        """The cross entropy of each element."""
        labels, right = _checked(labels, 2)
        return _nan_where_wrong(optax.losses.sigmoid_binary_cross_entropy(*widened(logits, labels)), right)


@config
class Focal(Loss):
    """The focal loss, -alpha_t (1 - p_t)^gamma log p_t, one value for each element.

    p_t is the probability that sigmoid(logits) gives to the label, and alpha_t is alpha for 1, 1 - alpha for 0, and 1
    where alpha is None. Elements that are easy weigh less (Lin et al. 2017, arXiv:1708.02002, who take gamma 2 and
    alpha 0.25). It is `optax.losses.sigmoid_focal_loss`, whose defaults are these, in float32 at least; logits are
    finite. An int label other than 0 and 1 gives nan (see `_classification.py`); floats are taken as the probability
    of 1.

    Example:
        >>> loss = Focal(logits="preds", labels="batch.label", gamma=2.0)
        >>> print(loss.values(jnp.array([0.0, 3.0, -3.0]), jnp.array([1, 1, 1])).round(2))
        [0.17 0.   2.77]
    """

    depends_on = "element"

    logits: KeyPath
    """Key path of the log odds of 1, float `b *n`."""
    labels: KeyPath
    """Key path of the labels, bool, 0 or 1, or probabilities, `b *n`."""
    gamma: float = 2.0
    """How much less easy elements weigh, 0 (cross entropy) or above; a traced float."""
    alpha: float | None = field(default=None, dynamic=True)
    """Weight of label 1 against label 0, between 0 and 1; None: both weigh 1. A traced float where it is one."""

    def validate(self) -> None:
        """Refuse a gamma below 0, and an alpha outside [0, 1]."""
        if isinstance(self.gamma, float) and not self.gamma >= 0:
            raise ValueError(f"gamma must be 0 or above, got {self.gamma}")
        if isinstance(self.alpha, float) and not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be between 0 and 1, or None, got {self.alpha}")

    def values(
        self, logits: Float[Array, " b *n"], labels: Num[Array, " b *n"] | Bool[Array, " b *n"]
    ) -> Float[Array, " b *n"]:
        """The focal loss of each element."""
        labels, right = _checked(labels, 2)
        logits, labels = widened(logits, labels)
        gamma = jnp.asarray(self.gamma, logits.dtype)
        alpha = None if self.alpha is None else jnp.asarray(self.alpha, logits.dtype)
        return _nan_where_wrong(optax.losses.sigmoid_focal_loss(logits, labels, alpha=alpha, gamma=gamma), right)
