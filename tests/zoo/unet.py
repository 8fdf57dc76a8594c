"""A U-Net: an image to an image, on the way down to less resolution and up again, with skips across.

Ronneberger et al. 2015, "U-Net: convolutional networks for biomedical image segmentation", arXiv:1505.04597; with group
normalisation, as in the networks of diffusion models.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class ConvBlock(eqx.Module):
    """A convolution, its normalisation, and the nonlinearity."""

    conv: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm

    def __init__(self, inputs: int, outputs: int, groups: int, *, key: PRNGKeyArray) -> None:
        self.conv = eqx.nn.Conv2d(inputs, outputs, 3, padding=1, key=key)
        self.norm = eqx.nn.GroupNorm(groups, outputs)

    def __call__(self, x: Float[Array, "c h w"]) -> Float[Array, "d h w"]:
        return jax.nn.silu(self.norm(self.conv(x)))


class UNet(eqx.Module):
    """A grey image to another of the same size, both halved once for each number of channels."""

    downs: list[ConvBlock]
    pool: eqx.nn.MaxPool2d
    middle: ConvBlock
    lifts: list[eqx.nn.ConvTranspose2d]
    ups: list[ConvBlock]
    head: eqx.nn.Conv2d
    channels: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, channels: tuple[int, ...] = (4, 8), groups: int = 2, *, key: PRNGKeyArray) -> None:
        down, middle, lift, up, head = jax.random.split(key, 5)
        pairs = list(zip((1, *channels), channels, strict=False))
        deeper = list(zip((*channels[1:], 2 * channels[-1]), channels, strict=True))
        split = lambda key: jax.random.split(key, len(channels))
        self.downs = [ConvBlock(*pair, groups, key=each) for pair, each in zip(pairs, split(down), strict=True)]
        self.pool = eqx.nn.MaxPool2d(2, stride=2)
        self.middle = ConvBlock(channels[-1], 2 * channels[-1], groups, key=middle)
        self.lifts = [
            eqx.nn.ConvTranspose2d(below, here, 2, stride=2, key=each)
            for (below, here), each in zip(deeper, split(lift), strict=True)
        ]
        self.ups = [ConvBlock(2 * n, n, groups, key=each) for n, each in zip(channels, split(up), strict=True)]
        self.head = eqx.nn.Conv2d(channels[0], 1, 1, key=head)
        self.channels = channels

    def __call__(self, x: Float[Array, "h w"]) -> Float[Array, "h w"]:
        features, skips = x[None], []
        for down in self.downs:
            skips.append(down(features))
            features = self.pool(skips[-1])
        features = self.middle(features)
        for skip, lift, up in reversed(list(zip(skips, self.lifts, self.ups, strict=True))):
            features = up(jnp.concatenate([skip, lift(features)]))
        return self.head(features)[0]
