"""A small classifier, written as one writes Equinox models: for one example, knowing nothing of the trainer."""

import equinox as eqx
import jax

from equikd.typing import Array, Float, PRNGKeyArray, typechecked


class Classifier(eqx.Module):
    """An image to class scores: a multilayer perceptron with dropout."""

    hidden: tuple[eqx.nn.Linear, ...]
    output: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, pixels: int, classes: int, width: int, depth: int, dropout: float, *, key: PRNGKeyArray) -> None:
        """Build the layers.

        Args:
            pixels: number of inputs.
            classes: number of outputs.
            width: units of a hidden layer.
            depth: number of hidden layers.
            dropout: probability that a hidden unit is dropped, in [0, 1).
            key: PRNG key of the initial weights.
        """
        *hidden, last = jax.random.split(key, depth + 1)
        sizes = (pixels, *[width] * depth)
        self.hidden = tuple(eqx.nn.Linear(n, width, key=k) for n, k in zip(sizes[:-1], hidden, strict=True))
        self.output = eqx.nn.Linear(sizes[-1], classes, key=last)
        self.dropout = eqx.nn.Dropout(dropout)

    @typechecked
    def __call__(self, x: Float[Array, "h w"], *, key: PRNGKeyArray | None = None) -> Float[Array, " classes"]:
        """Class scores (logits) of one image with pixels in [0, 1]."""
        features = x.reshape(-1)
        keys = [None] * len(self.hidden) if key is None else list(jax.random.split(key, len(self.hidden)))
        for layer, layer_key in zip(self.hidden, keys, strict=True):
            features = self.dropout(jax.nn.relu(layer(features)), key=layer_key)
        return self.output(features)
