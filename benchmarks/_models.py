"""The models of the tasks in Equinox: ours, and those of the peers that are written with Equinox."""

from typing import Any

import equinox as eqx
import jax
import optax

from benchmarks._task import DEEP, Task


class Block(eqx.Module):
    """Attention and a net of one hidden layer, each behind a norm and beside a skip."""

    attention: eqx.nn.MultiheadAttention
    before_attention: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    before_mlp: eqx.nn.LayerNorm

    def __init__(self, *, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(DEEP.heads, DEEP.width, **biases, key=first)
        self.before_attention = eqx.nn.LayerNorm(DEEP.width)
        self.mlp = eqx.nn.MLP(DEEP.width, DEEP.width, 2 * DEEP.width, 1, jax.nn.gelu, key=second)
        self.before_mlp = eqx.nn.LayerNorm(DEEP.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`tokens width` to the same."""
        normed = jax.vmap(self.before_attention)(x)
        x = x + self.attention(normed, normed, normed)
        return x + jax.vmap(lambda token: self.mlp(self.before_mlp(token)))(x)


class Transformer(eqx.Module):
    """Rows of numbers to the logits of a class."""

    embedding: eqx.nn.Linear
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        first, last, *keys = jax.random.split(key, DEEP.blocks + 2)
        self.embedding = eqx.nn.Linear(DEEP.shape[-1], DEEP.width, key=first)
        self.blocks = [Block(key=key) for key in keys]
        self.head = eqx.nn.Linear(DEEP.width, DEEP.classes, key=last)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`tokens features` to `classes`."""
        x = jax.vmap(self.embedding)(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=0))


def make_model(task: Task) -> Any:
    """The model of a task."""
    key = jax.random.key(0)
    return Transformer(key=key) if task.blocks else eqx.nn.MLP(task.features, task.classes, task.width, 2, key=key)


def loss_of(model: Any, images: Any, labels: Any) -> jax.Array:
    """The mean cross entropy."""
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
