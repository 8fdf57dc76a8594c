"""A deep equilibrium model: one layer applied until nothing changes, as if the network had no end.

Bai et al. 2019, "Deep equilibrium models", arXiv:1909.01377. A while loop has no reverse derivative; as is usual, the
loop is held constant and the layer applied once more at the equilibrium: the gradient goes through that application
alone (Fung et al. 2021, "Jacobian-free backpropagation", arXiv:2103.12803; "phantom gradients", arXiv:2111.05177).
"""

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

Tree = TypeVar("Tree")


def constant(tree: Tree) -> Tree:
    """The same tree, of whose arrays no gradient is taken."""
    return jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf) if eqx.is_array(leaf) else leaf, tree)


class Cell(eqx.Module):
    """One application of the layer, z -> tanh(W z + x)."""

    weights: eqx.nn.Linear

    def __init__(self, dim: int, *, key: PRNGKeyArray) -> None:
        self.weights = eqx.nn.Linear(dim, dim, use_bias=False, key=key)

    def __call__(self, z: Float[Array, " d"], x: Float[Array, " d"]) -> Float[Array, " d"]:
        return jnp.tanh(self.weights(z) + x)


class Equilibrium(eqx.Module):
    """An image to class scores, from the fixed point of a cell."""

    embedding: eqx.nn.Linear
    cell: Cell
    head: eqx.nn.Linear
    tolerance: float = eqx.field(static=True)
    most: int = eqx.field(static=True)

    def __init__(
        self,
        pixels: int,
        classes: int,
        dim: int = 24,
        tolerance: float = 1e-3,
        most: int = 20,
        *,
        key: PRNGKeyArray,
    ) -> None:
        embedding, cell, head = jax.random.split(key, 3)
        self.embedding = eqx.nn.Linear(pixels, dim, key=embedding)
        self.cell = Cell(dim, key=cell)
        self.head = eqx.nn.Linear(dim, classes, key=head)
        self.tolerance, self.most = tolerance, most

    def equilibrium(self, x: Float[Array, " d"]) -> tuple[Float[Array, " d"], Int[Array, ""]]:
        """The fixed point, held constant, and the number of iterations to it."""
        cell, x = constant((self.cell, x))

        def goes_on(carry):
            _, change, steps = carry
            return (change > self.tolerance) & (steps < self.most)

        def iterate(carry):
            z, _, steps = carry
            new = cell(z, x)
            return new, jnp.abs(new - z).max(), steps + 1

        z, _, steps = jax.lax.while_loop(goes_on, iterate, (jnp.zeros_like(x), jnp.inf, 0))
        return z, steps

    def __call__(self, x: Float[Array, "h w"]) -> Float[Array, " classes"]:
        x = self.embedding(x.reshape(-1))
        z, _ = self.equilibrium(x)
        return self.head(self.cell(z, x))
