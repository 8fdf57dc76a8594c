"""Metrics of images."""

import jax.numpy as jnp

from equikd.config import config
from equikd.errors import ConfigError, message
from equikd.metrics._average import Average
from equikd.metrics._base import Metric
from equikd.metrics._elements import kept
from equikd.typing import Array, Bool, Float
from equikd.wiring import KeyPath


@config
class PSNR(Metric):
    """Peak signal-to-noise ratio in decibels, a mean over images: mean of 10 log10(data_range^2 / mse(image)).

    scikit-image's `peak_signal_noise_ratio(targets, preds, data_range=...)` of each image, averaged. An image without
    error makes it inf; nan of nothing.

    Example:
        >>> preds, targets = jnp.full((1, 2, 2, 1), 0.1), jnp.zeros((1, 2, 2, 1))
        >>> metric = PSNR(preds="preds", targets="batch.image")
        >>> round(metric.from_values(preds, targets, jnp.ones(1, bool)).compute().item(), 3)
        20.0
    """

    preds: KeyPath
    """Key path of the predicted images, float `b *n`, such as `b h w c`."""
    targets: KeyPath
    """Key path of the true images, float `b *n`."""
    data_range: float = 1.0
    """Distance from the smallest possible value to the largest: 1 for images in [0, 1], 2 in [-1, 1]."""

    def validate(self) -> None:
        """Refuse a range that is not positive."""
        if not self.data_range > 0:
            what, got = "PSNR.data_range: images without a range", str(self.data_range)
            raise ConfigError(message(what, got=got, expected="data_range > 0"))

    def from_values(
        self, preds: Float[Array, " b *n"], targets: Float[Array, " b *n"], mask: Bool[Array, " b"]
    ) -> Average:
        """Sum and count of the ratios of the images that the mask keeps."""
        preds, targets = kept(preds, mask), kept(targets, mask)
        dtype = jnp.promote_types(preds.dtype, targets.dtype)
        squares = jnp.square(preds.astype(dtype) - targets.astype(dtype))
        errors = squares.mean(axis=tuple(range(1, squares.ndim)))
        errors = jnp.where(mask, errors, jnp.ones_like(errors))
        return Average.of(20 * jnp.log10(jnp.asarray(self.data_range, dtype)) - 10 * jnp.log10(errors), mask)
