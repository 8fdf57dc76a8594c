"""Metrics of images: equal to the plain formula over the images that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from equikd.config import validate
from equikd.errors import ConfigError, WiringError
from equikd.metrics import PSNR, SSIM


def test_psnr_equals_the_formula(equals_reference):
    def draw(random, rows):
        targets = random.random((rows, 4, 3, 2)).astype(np.float32)
        noise = random.normal(0, 0.1, targets.shape) * random.random((rows, 1, 1, 1))
        return {"targets": targets, "preds": (targets + noise).astype(np.float32)}

    def reference(preds, targets):
        errors = np.square(preds.astype(np.float64) - targets).mean(axis=(1, 2, 3))
        return np.mean(10 * np.log10(2.0**2 / errors))

    empty = equals_reference(PSNR(preds="preds", targets="batch", data_range=2.0), draw, reference)
    assert np.isnan(empty[""])


def test_psnr_without_error_and_under_a_gradient():
    metric, images = PSNR(preds="preds", targets="batch"), jnp.ones((2, 2, 2))
    assert metric.from_values(images, images, jnp.ones(2, bool)).compute() == jnp.inf
    mask, targets = jnp.array([True, False]), images.at[1].set(jnp.nan)
    gradient = jax.grad(lambda preds: metric.from_values(preds, targets, mask).compute())(images * 0.5)
    assert jnp.isfinite(gradient).all()
    assert (gradient[1] == 0).all()
    with pytest.raises(ConfigError, match="data_range > 0"):
        validate(PSNR(preds="preds", targets="batch", data_range=0.0))


def similarity(x, y, data_range):
    """Of two images `h w c`, as scikit-image computes it: filters that reflect at the borders, which are cut off."""
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    maps = []
    for one, other in zip(
        np.moveaxis(x, -1, 0).astype(np.float64), np.moveaxis(y, -1, 0).astype(np.float64), strict=True
    ):
        smooth = lambda image: gaussian_filter(image, sigma=1.5, truncate=3.5)
        mean_1, mean_2 = smooth(one), smooth(other)
        variance_1, variance_2 = smooth(one * one) - mean_1**2, smooth(other * other) - mean_2**2
        covariance = smooth(one * other) - mean_1 * mean_2
        top = (2 * mean_1 * mean_2 + c1) * (2 * covariance + c2)
        maps.append((top / ((mean_1**2 + mean_2**2 + c1) * (variance_1 + variance_2 + c2)))[5:-5, 5:-5])
    return np.mean(maps)


@pytest.mark.parametrize(("shape", "low", "data_range"), [((14, 11, 3), 0, 1.0), ((16, 17, 1), 100, 255.0)])
def test_ssim_equals_scipy(shape, low, data_range, equals_reference):
    def draw(random, rows):
        targets = low + random.random((rows, *shape)) * data_range / 4
        noise = random.normal(0, 0.1, targets.shape) * random.random((rows, 1, 1, 1)) * data_range
        return {"targets": targets.astype(np.float32), "preds": (targets + noise).astype(np.float32)}

    def reference(preds, targets):
        return np.mean([similarity(*pair, data_range) for pair in zip(preds, targets, strict=True)])

    metric = SSIM(preds="preds", targets="batch", data_range=data_range)
    assert np.isnan(equals_reference(metric, draw, reference)[""])


def test_ssim_of_what_is_alike_unlike_small_and_masked(snapshot):
    metric, images = SSIM(preds="preds", targets="batch"), jnp.full((2, 12, 12, 1), 0.5).at[:, 3].set(0.9)
    both = jnp.ones(2, bool)
    value = jax.jit(lambda preds, targets, mask: metric.from_values(preds, targets, mask).compute())
    assert value(images, images, both) == 1
    assert value(images, 1 - images, both) < 0.5
    assert value(images.astype(jnp.bfloat16), images, both).dtype == jnp.float32
    mask, targets = jnp.array([True, False]), images.at[1].set(jnp.nan)
    assert value(images, targets, mask) == 1
    assert jnp.isnan(value(images, targets, both))
    gradient = jax.jit(jax.grad(value))(images * 0.5, targets, mask)
    assert jnp.isfinite(gradient).all()
    assert (gradient[1] == 0).all()
    with pytest.raises(WiringError) as error:
        metric.from_values(images[:, :10], images[:, :10], both)
    snapshot("ssim_small", str(error.value))
    with pytest.raises(ConfigError, match=r"SSIM\.data_range"):
        validate(SSIM(preds="preds", targets="batch", data_range=-1.0))
