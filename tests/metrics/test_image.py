"""Metrics of images: equal to the plain formula over the images that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equikd.config import validate
from equikd.errors import ConfigError
from equikd.metrics import PSNR


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
