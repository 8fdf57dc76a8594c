"""A language model whose layers are one stacked module, scanned over, and recomputed in the backward pass.

Radford et al. 2019, "Language models are unsupervised multitask learners". Scanning keeps the program, and the time to
compile it, the same for any depth; `eqx.filter_checkpoint` keeps the memory of one layer instead of all.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


class Block(eqx.Module):
    """Attention to the tokens before, then a small network for each token; dropout on both."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, dim: int, heads: int, rate: float, *, key: PRNGKeyArray) -> None:
        attention, mlp = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(dim), eqx.nn.LayerNorm(dim)
        self.attention = eqx.nn.MultiheadAttention(heads, dim, key=attention)
        self.mlp = eqx.nn.MLP(dim, dim, 2 * dim, 1, activation=jax.nn.gelu, key=mlp)
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x: Float[Array, "t d"], *, key: PRNGKeyArray | None = None) -> Float[Array, "t d"]:
        of_attention, of_mlp = (None, None) if key is None else jax.random.split(key)
        before = jnp.tril(jnp.ones((len(x), len(x)), bool))
        y = jax.vmap(self.norm1)(x)
        x = x + self.dropout(self.attention(y, y, y, mask=before), key=of_attention)
        return x + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norm2)(x)), key=of_mlp)


class GPT(eqx.Module):
    """Tokens to scores of the next token, at each place."""

    embedding: eqx.nn.Embedding
    positions: Float[Array, "t d"]
    blocks: Block  # one module whose arrays have an axis of layers
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    depth: int = eqx.field(static=True)

    def __init__(
        self,
        words: int,
        length: int,
        dim: int = 16,
        heads: int = 2,
        depth: int = 3,
        rate: float = 0.1,
        *,
        key: PRNGKeyArray,
    ) -> None:
        embedding, positions, blocks, head = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(words, dim, key=embedding)
        self.positions = 0.02 * jax.random.normal(positions, (length, dim))
        self.blocks = eqx.filter_vmap(lambda key: Block(dim, heads, rate, key=key))(jax.random.split(blocks, depth))
        self.norm = eqx.nn.LayerNorm(dim)
        self.head = eqx.nn.Linear(dim, words, use_bias=False, key=head)
        self.depth = depth

    def __call__(self, tokens: Int[Array, " t"], *, key: PRNGKeyArray | None = None) -> Float[Array, "t words"]:
        x = jax.vmap(self.embedding)(tokens) + self.positions[: len(tokens)]
        stacked, shared = eqx.partition(self.blocks, eqx.is_array)

        def layer(x, of_layer):
            arrays, key = of_layer
            block = eqx.combine(arrays, shared)
            return eqx.filter_checkpoint(block)(x, key=key), None

        keys = None if key is None else jax.random.split(key, self.depth)
        x, _ = jax.lax.scan(layer, x, (stacked, keys))
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))
