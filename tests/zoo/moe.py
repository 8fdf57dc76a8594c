"""A mixture of experts: a router picks the one network that computes, by `jax.lax.switch`.

Fedus et al. 2021, "Switch transformers", arXiv:2101.03961. For one example only the chosen expert runs; mapped over a
batch the choice differs by row, so all run and the results are selected.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Mixture(eqx.Module):
    """The most probable expert's output, times its probability, through which the router learns."""

    router: eqx.nn.Linear
    experts: list[eqx.nn.MLP]

    def __init__(self, dim: int, experts: int, *, key: PRNGKeyArray) -> None:
        router, *keys = jax.random.split(key, 1 + experts)
        self.router = eqx.nn.Linear(dim, experts, use_bias=False, key=router)
        self.experts = [eqx.nn.MLP(dim, dim, 2 * dim, 1, key=each) for each in keys]

    def __call__(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        probabilities = jax.nn.softmax(self.router(x))
        chosen = jnp.argmax(probabilities)
        branches = [lambda x, expert=expert: expert(x) for expert in self.experts]
        return probabilities[chosen] * jax.lax.switch(chosen, branches, x)


class MixtureClassifier(eqx.Module):
    """An image to class scores."""

    embedding: eqx.nn.Linear
    mixture: Mixture
    head: eqx.nn.Linear
    dim: int = eqx.field(static=True)

    def __init__(self, pixels: int, classes: int, dim: int = 16, experts: int = 3, *, key: PRNGKeyArray) -> None:
        embedding, mixture, head = jax.random.split(key, 3)
        self.embedding = eqx.nn.Linear(pixels, dim, key=embedding)
        self.mixture = Mixture(dim, experts, key=mixture)
        self.head = eqx.nn.Linear(dim, classes, key=head)
        self.dim = dim

    def __call__(self, x: Float[Array, "h w"]) -> Float[Array, " classes"]:
        features = jax.nn.relu(self.embedding(x.reshape(-1)))
        return self.head(features + self.mixture(features))
