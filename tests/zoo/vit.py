"""A vision transformer: an image is a sentence of patches, and a class token collects what is in it.

Dosovitskiy et al. 2020, "An image is worth 16x16 words", arXiv:2010.11929; the layers normalise before they compute.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Block(eqx.Module):
    """Attention among the tokens, then a small network for each of them."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, dim: int, heads: int, *, key: PRNGKeyArray) -> None:
        attention, mlp = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(dim), eqx.nn.LayerNorm(dim)
        self.attention = eqx.nn.MultiheadAttention(heads, dim, key=attention)
        self.mlp = eqx.nn.MLP(dim, dim, 2 * dim, 1, activation=jax.nn.gelu, key=mlp)

    def __call__(self, x: Float[Array, "t d"]) -> Float[Array, "t d"]:
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class VisionTransformer(eqx.Module):
    """A grey image to class scores."""

    embedding: eqx.nn.Linear
    class_token: Float[Array, " d"]
    positions: Float[Array, "t d"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        classes: int,
        patch: int = 4,
        dim: int = 16,
        heads: int = 2,
        depth: int = 2,
        *,
        key: PRNGKeyArray,
    ) -> None:
        embedding, token, positions, head, *keys = jax.random.split(key, 4 + depth)
        self.embedding = eqx.nn.Linear(patch * patch, dim, key=embedding)
        self.class_token = 0.02 * jax.random.normal(token, (dim,))
        self.positions = 0.02 * jax.random.normal(positions, (1 + (size // patch) ** 2, dim))
        self.blocks = [Block(dim, heads, key=each) for each in keys]
        self.norm = eqx.nn.LayerNorm(dim)
        self.head = eqx.nn.Linear(dim, classes, key=head)
        self.patch = patch

    def patches(self, x: Float[Array, "h w"]) -> Float[Array, "n p"]:
        """The pixels of each patch, row by row."""
        rows, columns = x.shape[0] // self.patch, x.shape[1] // self.patch
        tiles = x.reshape(rows, self.patch, columns, self.patch).swapaxes(1, 2)
        return tiles.reshape(rows * columns, self.patch * self.patch)

    def __call__(self, x: Float[Array, "h w"]) -> Float[Array, " classes"]:
        tokens = jax.vmap(self.embedding)(self.patches(x))
        tokens = jnp.concatenate([self.class_token[None], tokens]) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens[0]))
