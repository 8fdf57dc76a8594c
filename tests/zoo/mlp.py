"""A multilayer perceptron with dropout: the plain model that each part of a trainer must get right first.

Dropout after Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from overfitting". One
`eqx.nn.Dropout` serves two places, since it holds no parameters; so it is a module that one forward pass calls twice.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray


class Classifier(eqx.Module):
    """An image to class scores."""

    body: eqx.nn.MLP
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    classes: int = eqx.field(static=True)

    def __init__(
        self, pixels: int, classes: int, width: int = 32, depth: int = 2, rate: float = 0.1, *, key: PRNGKeyArray
    ) -> None:
        body, head = jax.random.split(key)
        self.body = eqx.nn.MLP(pixels, width, width, depth, final_activation=jax.nn.relu, key=body)
        self.head = eqx.nn.Linear(width, classes, key=head)
        self.dropout = eqx.nn.Dropout(rate)
        self.classes = classes

    def __call__(self, x: Float[Array, "h w"], *, key: PRNGKeyArray | None = None) -> Float[Array, " classes"]:
        of_pixels, of_features = (None, None) if key is None else jax.random.split(key)
        pixels = self.dropout(x.reshape(-1), key=of_pixels)
        features = self.dropout(self.body(pixels), key=of_features)
        return self.head(features)
