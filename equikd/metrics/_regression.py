"""Metrics of predicted numbers: errors, and the share of the variance that a model explains."""

from typing import Any

import jax.numpy as jnp

from equikd.config import config
from equikd.metrics._average import Average
from equikd.metrics._base import Metric
from equikd.metrics._elements import arrays_of, kept, together
from equikd.metrics._moments import Moments, moments_field
from equikd.metrics._state import State, state_field
from equikd.typing import Array, Bool, Float, Integer
from equikd.wiring import KeyPath


def _errors(preds: Any, targets: Any, mask: Any) -> Any:
    """Preds - targets in float32 at least, 0 where the mask is False."""
    preds, targets = together(preds, targets)
    return kept(preds, mask) - kept(targets, mask)


@config
class _OfNumbers(Metric):
    """What all of these compare."""

    preds: KeyPath
    """Key path of the predictions, float `b *n`."""
    targets: KeyPath
    """Key path of the targets, float or int `b *n`."""


@config
class MeanSquaredError(_OfNumbers):
    """mean((preds - targets)^2), scikit-learn's `mean_squared_error`; nan of nothing.

    Example:
        >>> preds, targets = jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0])
        >>> metric = MeanSquaredError(preds="preds", targets="batch.y")
        >>> metric.from_values(preds, targets, jnp.ones(2, bool)).compute().item()
        2.0
    """

    def from_values(
        self,
        preds: Float[Array, " b *n"],
        targets: Float[Array, " b *n"] | Integer[Array, " b *n"],
        mask: Bool[Array, "b ..."],
    ) -> Average:
        """Sum and count of the squared errors that the mask keeps."""
        return Average.of(jnp.square(_errors(preds, targets, mask)), mask)


class RootAverage(State):
    """The root of a mean.

    Attributes:
        average: of the squares.

    Example:
        >>> RootAverage(Average.of(jnp.array([1.0, 7.0]))).compute().item()
        2.0
    """

    average: Average = state_field()

    def compute(self) -> Float[Array, ""]:
        """sqrt(mean); nan of nothing."""
        mean = self.average.compute()
        return arrays_of(mean).sqrt(mean)


@config
class RootMeanSquaredError(_OfNumbers):
    """sqrt(mean((preds - targets)^2)), scikit-learn's `root_mean_squared_error`; nan of nothing.

    The root of the mean over all rows, which a mean of the batches' roots is not.

    Example:
        >>> preds, targets = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])
        >>> metric = RootMeanSquaredError(preds="preds", targets="batch.y")
        >>> metric.from_values(preds, targets, jnp.ones(2, bool)).compute().item()
        2.0
    """

    def from_values(
        self,
        preds: Float[Array, " b *n"],
        targets: Float[Array, " b *n"] | Integer[Array, " b *n"],
        mask: Bool[Array, "b ..."],
    ) -> RootAverage:
        """Sum and count of the squared errors that the mask keeps."""
        return RootAverage(Average.of(jnp.square(_errors(preds, targets, mask)), mask))


@config
class MeanAbsoluteError(_OfNumbers):
    """mean(|preds - targets|), scikit-learn's `mean_absolute_error`; nan of nothing.

    Example:
        >>> preds, targets = jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0])
        >>> metric = MeanAbsoluteError(preds="preds", targets="batch.y")
        >>> metric.from_values(preds, targets, jnp.ones(2, bool)).compute().item()
        1.0
    """

    def from_values(
        self,
        preds: Float[Array, " b *n"],
        targets: Float[Array, " b *n"] | Integer[Array, " b *n"],
        mask: Bool[Array, "b ..."],
    ) -> Average:
        """Sum and count of the absolute errors that the mask keeps."""
        return Average.of(jnp.abs(_errors(preds, targets, mask)), mask)


class Explained(State):
    """The share of the variance of targets that predictions explain.

    Attributes:
        errors: mean of the squared errors.
        targets: moments of the targets.

    Example:
        >>> targets = jnp.array([0.0, 2.0])
        >>> Explained(Average.of(jnp.array([0.5, 0.5])), Moments.of(targets, jnp.ones(2, bool))).compute().item()
        0.5
    """

    errors: Average = state_field()
    targets: Moments = moments_field()

    def compute(self) -> Float[Array, ""]:
        """1 - mean squared error / variance; nan of nothing."""
        return 1 - self.errors.compute() / self.targets.variance()


@config
class R2(_OfNumbers):
    """The coefficient of determination: 1 - sum((preds - targets)^2) / sum((targets - mean(targets))^2).

    All elements are one set, as in scikit-learn's `r2_score(targets.ravel(), preds.ravel())`. Of nothing it is nan; of
    targets that are all the same -inf, or nan where they are all predicted. The mean of the targets is that over all
    rows, whatever the batches: see `_moments.py`.

    Example:
        >>> preds, targets = jnp.array([1.0, 1.0, 4.0]), jnp.array([0.0, 2.0, 4.0])
        >>> R2(preds="preds", targets="batch.y").from_values(preds, targets, jnp.ones(3, bool)).compute().item()
        0.75
    """

    def from_values(
        self,
        preds: Float[Array, " b *n"],
        targets: Float[Array, " b *n"] | Integer[Array, " b *n"],
        mask: Bool[Array, "b ..."],
    ) -> Explained:
        """Squared errors, and the moments of the targets, over what the mask keeps."""
        errors = _errors(preds, targets, mask)
        return Explained(Average.of(jnp.square(errors), mask), Moments.of(targets, mask))
