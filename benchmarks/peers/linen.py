"""Flax's older interface: modules without arrays, a `TrainState`, and a donated `jax.jit`."""

# pyright: reportMissingImports=false

from collections.abc import Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import optax
from flax.training.train_state import TrainState

from benchmarks._task import RATE, Task, load
from benchmarks.peers._peer import Peer, Training


class MLP(nn.Module):
    """Two hidden layers."""

    width: int
    classes: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """`batch features` to `batch classes`."""
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.classes)(x)


class Transformer(nn.Module):
    """The model of `benchmarks._models`."""

    blocks: int
    heads: int
    width: int
    classes: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """`batch tokens features` to `batch classes`."""
        x = nn.Dense(self.width)(x)
        for _ in range(self.blocks):
            x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
            hidden = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(hidden)
        return nn.Dense(self.classes)(x.mean(axis=1))


def model_of(task: Task) -> Any:
    """The model of a task."""
    if task.blocks:
        return Transformer(task.blocks, task.heads, task.width, task.classes)
    return MLP(task.width, task.classes)


def start(task: Task) -> Training:
    """Compiles at the first batch."""
    model = model_of(task)
    variables = jax.jit(model.init)(jax.random.key(0), load(task.name)["image"][:1])
    optimizer = optax.adam(RATE)

    def train_step(state: Any, images: Any, labels: Any) -> Any:
        def loss_of(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    train_step = jax.jit(train_step, donate_argnums=0)

    def train(batches: Iterable[Any]) -> Iterator[Any]:
        params = jax.tree.map(lambda leaf: leaf.copy(), variables["params"])
        state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
        for images, labels in batches:
            state, loss = train_step(state, images, labels)
            yield loss

    return train


PEER = Peer(start)
