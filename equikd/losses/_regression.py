"""Losses of predicted numbers: how far each element is from its target.

All elements of a row weigh the same: values have the shape of the predictions, and axes that the mask does not have are
averaged over. So the mean of a loss is the mean over all elements of the rows that count, as in the metrics of the same
names. Predictions and targets have one shape; nothing broadcasts, so `[b, 1]` against `[b]` is an error instead of a
`b x b` table of errors.
"""

import jax.numpy as jnp
import optax

from equikd.config import config
from equikd.losses._base import Loss, widened
from equikd.typing import Array, Float, Num
from equikd.wiring import KeyPath


@config
class AbsoluteError(Loss):
    """The absolute error of each element, |preds - targets|; its mean is the mean absolute error.

    Where both are equal the gradient is 0. Computed in float32 at least.

    Example:
        >>> loss = AbsoluteError(preds="preds", targets="batch.y")
        >>> loss.values(jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 4.0]])).tolist()
        [[1.0, 2.0]]
    """

    depends_on = "element"

    preds: KeyPath
    """Key path of the predictions, float `b *n`."""
    targets: KeyPath
    """Key path of the targets, `b *n`, any numeric dtype."""

    def values(self, preds: Float[Array, " b *n"], targets: Num[Array, " b *n"]) -> Float[Array, " b *n"]:
        """The absolute error of each element."""
        preds, targets = widened(preds, targets)
        error = preds - targets
        return error * jnp.sign(error)  # the gradient of jnp.abs at 0 is 1, a pull downwards where nothing is wrong


@config
class SquaredError(Loss):
    """The squared error of each element, (preds - targets)^2; its mean is the mean squared error.

    `optax.losses.squared_error`, without the factor 1/2 of `optax.losses.l2_loss`. Computed in float32 at least.

    Example:
        >>> loss = SquaredError(preds="preds", targets="batch.y", weight=0.5)
        >>> loss.values(jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 4.0]])).tolist()
        [[1.0, 4.0]]
    """

    depends_on = "element"

    preds: KeyPath
    """Key path of the predictions, float `b *n`."""
    targets: KeyPath
    """Key path of the targets, `b *n`, any numeric dtype."""

    def values(self, preds: Float[Array, " b *n"], targets: Num[Array, " b *n"]) -> Float[Array, " b *n"]:
        """The squared error of each element."""
        return optax.losses.squared_error(*widened(preds, targets))


@config
class Huber(Loss):
    """The Huber loss of each element's error e: e^2 / 2 where |e| <= delta, and delta (|e| - delta / 2) beyond.

    `optax.losses.huber_loss`; near 0 it is half of `SquaredError`, far out delta times `AbsoluteError` less a constant,
    and its slope is e held between -delta and delta (Huber 1964, doi:10.1214/aoms/1177703732). In float32 at least.

    Example:
        >>> loss = Huber(preds="preds", targets="batch.y", delta=2.0)
        >>> loss.values(jnp.array([1.0, 5.0]), jnp.array([0.0, 0.0])).tolist()
        [0.5, 8.0]
    """

    depends_on = "element"

    preds: KeyPath
    """Key path of the predictions, float `b *n`."""
    targets: KeyPath
    """Key path of the targets, `b *n`, any numeric dtype."""
    delta: float = 1.0
    """Error at which the square turns into a line, above 0; a traced float."""

    def validate(self) -> None:
        """Refuse a delta that is not above 0."""
        if isinstance(self.delta, float) and not self.delta > 0:
            raise ValueError(f"delta must be above 0, got {self.delta}")

    def values(self, preds: Float[Array, " b *n"], targets: Num[Array, " b *n"]) -> Float[Array, " b *n"]:
        """The Huber loss of each element."""
        preds, targets = widened(preds, targets)
        return optax.losses.huber_loss(preds, targets, delta=jnp.asarray(self.delta, preds.dtype))
