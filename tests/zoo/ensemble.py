"""An ensemble: members of one class, stacked, which `eqx.filter_vmap` builds and calls at once.

Lakshminarayanan et al. 2016, "Simple and scalable predictive uncertainty estimation using deep ensembles",
arXiv:1612.01474.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray


class Ensemble(eqx.Module):
    """An image to class scores: the mean of the members' log probabilities."""

    members: eqx.nn.MLP  # one module whose arrays have an axis of members
    size: int = eqx.field(static=True)

    def __init__(self, pixels: int, classes: int, size: int = 3, width: int = 16, *, key: PRNGKeyArray) -> None:
        build = lambda key: eqx.nn.MLP(pixels, classes, width, 1, key=key)
        self.members = eqx.filter_vmap(build)(jax.random.split(key, size))
        self.size = size

    def __call__(self, x: Float[Array, "h w"]) -> Float[Array, " classes"]:
        logits = eqx.filter_vmap(lambda member, x: member(x), in_axes=(eqx.if_array(0), None))(
            self.members, x.reshape(-1)
        )
        return jax.nn.log_softmax(logits).mean(axis=0)
