"""Metrics of images: how far a picture is from the true one, by squared error and by structure."""

import jax.numpy as jnp
import numpy as np

from equikd.config import config
from equikd.errors import ConfigError, WiringError, message
from equikd.metrics._average import Average
from equikd.metrics._base import Metric
from equikd.metrics._elements import kept, together
from equikd.typing import Array, Bool, Float
from equikd.wiring import KeyPath


@config
class _OfImages(Metric):
    """What both of these compare."""

    preds: KeyPath
    """Key path of the predicted images, float `b h w c`; PSNR takes any `b *n`, SSIM sides of 11 pixels at least."""
    targets: KeyPath
    """Key path of the true images, float, of the same shape."""
    data_range: float = 1.0
    """Distance from the smallest possible value to the largest: 1 for images in [0, 1], 2 in [-1, 1]."""

    def validate(self) -> None:
        """Refuse a range that is not positive."""
        if not self.data_range > 0:
            what, got = f"{type(self).__name__}.data_range: images without a range", str(self.data_range)
            raise ConfigError(message(what, got=got, expected="data_range > 0"))


@config
class PSNR(_OfImages):
    """Peak signal-to-noise ratio in decibels, a mean over images: mean of 10 log10(data_range^2 / mse(image)).

    scikit-image's `peak_signal_noise_ratio(targets, preds, data_range=...)` of each image, averaged. An image without
    error makes it inf; nan of nothing.

    Example:
        >>> preds, targets = jnp.full((1, 2, 2, 1), 0.1), jnp.zeros((1, 2, 2, 1))
        >>> metric = PSNR(preds="preds", targets="batch.image")
        >>> round(metric.from_values(preds, targets, jnp.ones(1, bool)).compute().item(), 3)
        20.0
    """

    def from_values(
        self, preds: Float[Array, " b *n"], targets: Float[Array, " b *n"], mask: Bool[Array, " b"]
    ) -> Average:
        """Sum and count of the ratios of the images that the mask keeps."""
        preds, targets = together(preds, targets)
        squares = jnp.square(kept(preds, mask) - kept(targets, mask))
        errors = squares.mean(axis=tuple(range(1, squares.ndim)))
        errors = jnp.where(mask, errors, jnp.ones_like(errors))
        return Average.of(20 * jnp.log10(jnp.asarray(self.data_range, squares.dtype)) - 10 * jnp.log10(errors), mask)


_RADIUS = 5  # of the window: int(3.5 * sigma + 0.5), as scikit-image has it
_WIDTH = 2 * _RADIUS + 1
_WINDOW = np.exp(-0.5 * (np.arange(-_RADIUS, _RADIUS + 1) / 1.5) ** 2)
_WINDOW /= _WINDOW.sum()


def _smoothed(images: Float[Array, "... h w c"], axis: int) -> Float[Array, "..."]:
    """Weighted means over windows that lie wholly inside, along an axis counted from the end; no matrix unit rounds."""
    size = images.shape[axis] - _WIDTH + 1
    cut = lambda start: jnp.moveaxis(jnp.moveaxis(images, axis, 0)[start : start + size], 0, axis)
    return sum((cut(i) * weight for i, weight in enumerate(_WINDOW.tolist())), start=jnp.zeros((), images.dtype))


@config
class SSIM(_OfImages):
    """Structural similarity, a mean over images: how alike brightness, contrast and structure are in small windows.

    Wang, Bovik, Sheikh and Simoncelli (2004), "Image quality assessment: from error visibility to structural
    similarity". With means m, variances v and the covariance in a Gaussian window of 11 x 11 pixels (sigma 1.5), L the
    `data_range`, C1 = (0.01 L)^2 and C2 = (0.03 L)^2:

        (2 m_p m_t + C1) (2 cov + C2) / ((m_p^2 + m_t^2 + C1) (v_p + v_t + C2))

    averaged over all windows that lie wholly inside the image, over channels and over images. It is scikit-image's
    `structural_similarity(target, pred, gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
    data_range=..., channel_axis=-1)`, which pads the borders and then leaves them out. Grey images have c = 1. 1 is the
    best; nan of nothing.

    Raises:
        WiringError: (from `from_values`) images are smaller than the window.

    Example:
        >>> targets = jnp.linspace(0, 1, 2 * 16 * 16).reshape(2, 16, 16, 1)
        >>> metric = SSIM(preds="preds", targets="batch.image")
        >>> metric.from_values(targets, targets, jnp.ones(2, bool)).compute().item()
        1.0
    """

    def from_values(
        self, preds: Float[Array, "b h w c"], targets: Float[Array, "b h w c"], mask: Bool[Array, " b"]
    ) -> Average:
        """Sum and count of the similarities of the images that the mask keeps."""
        if min(preds.shape[1:3]) < _WIDTH:
            what, (height, width) = f"SSIM has a window of {_WIDTH} x {_WIDTH} pixels", preds.shape[1:3]
            expected = f"b h w c, with h and w of {_WIDTH} pixels at least"
            raise WiringError(message(what, got=f"images of {height} x {width}", expected=expected))
        preds, targets = together(preds, targets)
        preds, targets = kept(preds, mask), kept(targets, mask)
        # Variances do not change with an offset, but E[x^2] - E[x]^2 loses its digits where there is one.
        offset = targets.mean(axis=(1, 2), keepdims=True)
        x, y = preds - offset, targets - offset
        maps = _smoothed(_smoothed(jnp.stack([x, y, x * x, y * y, x * y]), -3), -2)
        mean_x, mean_y, variance_x, variance_y, covariance = maps
        variances = (variance_x - mean_x * mean_x) + (variance_y - mean_y * mean_y)
        covariance = covariance - mean_x * mean_y
        mean_x, mean_y = mean_x + offset, mean_y + offset
        scale = jnp.square(jnp.asarray(self.data_range, preds.dtype))
        c1, c2 = 0.01**2 * scale, 0.03**2 * scale
        brightness = (2 * mean_x * mean_y + c1) / (mean_x * mean_x + mean_y * mean_y + c1)
        return Average.of(brightness * (2 * covariance + c2) / (variances + c2), mask)
