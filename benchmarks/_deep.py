"""The deep model of the benchmarks: a transformer of 12 blocks with about 200 parameter leaves, small in all else."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import equikd as ek

BLOCKS, WIDTH, HEADS, TOKENS, CLASSES, BATCH = 12, 32, 4, 8, 10, 8


class Block(eqx.Module):
    """Attention and a net of one hidden layer, each behind a norm and beside a skip."""

    attention: eqx.nn.MultiheadAttention
    before_attention: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    before_mlp: eqx.nn.LayerNorm

    def __init__(self, *, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, **biases, key=first)
        self.before_attention = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=second)
        self.before_mlp = eqx.nn.LayerNorm(WIDTH)

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
        first, last, *keys = jax.random.split(key, BLOCKS + 2)
        self.embedding = eqx.nn.Linear(TOKENS, WIDTH, key=first)
        self.blocks = [Block(key=key) for key in keys]
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=last)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`tokens features` to `classes`."""
        x = jax.vmap(self.embedding)(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=0))


def load(rows: int = 64) -> dict[str, np.ndarray]:
    """Images of noise, rows first, and labels."""
    draw = np.random.default_rng(0)
    image = draw.normal(size=(rows, TOKENS, TOKENS)).astype(np.float32)
    return {"image": image, "label": draw.integers(0, CLASSES, rows).astype(np.int32)}


def make_trainer(**fields: Any) -> ek.Trainer:
    """The experiment, with the loss alone."""
    given: dict[str, Any] = {
        "model": ek.lazy(Transformer)(),
        "inputs": {"x": "batch.image"},
        "losses": {"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label")},
        "optimizer": ek.lazy(optax.adam)(1e-3),
        "train_data": ek.data.InMemory(load(), batch_size=BATCH),
        "num_steps": 100,
        "checkpoints": None,
        "writers": (),
    }
    return ek.Trainer(**(given | fields))
