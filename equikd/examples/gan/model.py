"""Generator and discriminator in one model: for one image and one vector of noise, knowing nothing of the trainer."""

from typing import NamedTuple

import equinox as eqx
import jax

from equikd.typing import Array, Float, PRNGKeyArray, typechecked


class Generator(eqx.Module):
    """Noise to an image: a multilayer perceptron."""

    layers: eqx.nn.MLP
    size: int = eqx.field(static=True)

    def __init__(self, noise: int, size: int, width: int, *, key: PRNGKeyArray) -> None:
        """Build the layers.

        Args:
            noise: numbers in a vector of noise.
            size: height and width of an image.
            width: units of each of the two hidden layers.
            key: PRNG key of the initial weights.
        """
        self.layers = eqx.nn.MLP(noise, size * size, width, 2, activation=jax.nn.relu, key=key)
        self.size = size

    @typechecked
    def __call__(self, noise: Float[Array, " z"]) -> Float[Array, "{self.size} {self.size}"]:
        """An image with pixels in [0, 1]."""
        return jax.nn.sigmoid(self.layers(noise)).reshape(self.size, self.size)


class Discriminator(eqx.Module):
    """An image to a score, high for real ones: a multilayer perceptron."""

    layers: eqx.nn.MLP

    def __init__(self, size: int, width: int, *, key: PRNGKeyArray) -> None:
        """Build the layers.

        Args:
            size: height and width of an image.
            width: units of each of the two hidden layers.
            key: PRNG key of the initial weights.
        """
        self.layers = eqx.nn.MLP(size * size, "scalar", width, 2, activation=leaky, key=key)

    @typechecked
    def __call__(self, image: Float[Array, "h w"]) -> Float[Array, ""]:
        """The log odds that the image is real."""
        return self.layers(2 * image.reshape(-1) - 1)


def leaky(x: jax.Array) -> jax.Array:
    """The activation of discriminators (Radford et al. 2016, arXiv:1511.06434): a dead unit would teach nothing."""
    return jax.nn.leaky_relu(x, 0.2)


class Verdicts(NamedTuple):
    """A sample, and what the discriminator says.

    Attributes:
        sample: the generated image, in [0, 1].
        real: score of the real image.
        fake: score of the sample.
    """

    sample: Float[Array, "h w"]
    real: Float[Array, ""]
    fake: Float[Array, ""]


class Gan(eqx.Module):
    """The two players."""

    generator: Generator
    discriminator: Discriminator

    def __call__(self, image: Float[Array, "h w"], noise: Float[Array, " z"]) -> Verdicts:
        """Judge a real image and one made of noise."""
        sample = self.generator(noise)
        return Verdicts(sample, self.discriminator(image), self.discriminator(sample))
