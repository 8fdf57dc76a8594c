"""A variational autoencoder: an image to a distribution of codes, and a code drawn from it back to an image.

Kingma and Welling 2013, "Auto-encoding variational Bayes", arXiv:1312.6114.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Encoded(NamedTuple):
    """What the losses need: the image again, as logits of its pixels, and the normal distribution of its code."""

    reconstruction: Float[Array, "h w"]
    mean: Float[Array, " latent"]
    log_variance: Float[Array, " latent"]


class VariationalAutoencoder(eqx.Module):
    """Encoder, the two parameters of the code's distribution, decoder."""

    encoder: eqx.nn.MLP
    mean: eqx.nn.Linear
    log_variance: eqx.nn.Linear
    decoder: eqx.nn.MLP
    latent: int = eqx.field(static=True)

    def __init__(self, pixels: int, latent: int = 4, width: int = 32, *, key: PRNGKeyArray) -> None:
        encoder, mean, log_variance, decoder = jax.random.split(key, 4)
        self.encoder = eqx.nn.MLP(pixels, width, width, 1, final_activation=jax.nn.relu, key=encoder)
        self.mean = eqx.nn.Linear(width, latent, key=mean)
        self.log_variance = eqx.nn.Linear(width, latent, key=log_variance)
        self.decoder = eqx.nn.MLP(latent, pixels, width, 1, key=decoder)
        self.latent = latent

    def __call__(self, x: Float[Array, "h w"], *, key: PRNGKeyArray | None = None) -> Encoded:
        """The image again; without a key its code is the mean, not a sample."""
        features = self.encoder(x.reshape(-1))
        mean, log_variance = self.mean(features), self.log_variance(features)
        code = mean
        if key is not None:
            code = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape)
        return Encoded(self.decoder(code).reshape(x.shape), mean, log_variance)
