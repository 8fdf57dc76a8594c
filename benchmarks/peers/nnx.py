"""Flax's newer interface: modules that hold their arrays, an `nnx.Optimizer` that changes them, and `nnx.jit`."""

# pyright: reportMissingImports=false

from collections.abc import Iterable, Iterator
from typing import Any

import optax
from flax import nnx

from benchmarks._task import RATE, Task
from benchmarks.peers._peer import Peer, Training


class MLP(nnx.Module):
    """Two hidden layers."""

    def __init__(self, task: Task, *, rngs: Any) -> None:
        self.first = nnx.Linear(task.features, task.width, rngs=rngs)
        self.second = nnx.Linear(task.width, task.width, rngs=rngs)
        self.head = nnx.Linear(task.width, task.classes, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """`batch features` to `batch classes`."""
        return self.head(nnx.relu(self.second(nnx.relu(self.first(x)))))


class Block(nnx.Module):
    """A block of the transformer."""

    def __init__(self, task: Task, *, rngs: Any) -> None:
        width = task.width
        self.attention = nnx.MultiHeadAttention(task.heads, width, decode=False, rngs=rngs)
        self.before_attention, self.before_mlp = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """`batch tokens width` to the same."""
        x = x + self.attention(self.before_attention(x))
        return x + self.down(nnx.gelu(self.up(self.before_mlp(x))))


class Transformer(nnx.Module):
    """The model of `benchmarks._models`."""

    def __init__(self, task: Task, *, rngs: Any) -> None:
        self.embedding = nnx.Linear(task.shape[-1], task.width, rngs=rngs)
        self.blocks = nnx.List([Block(task, rngs=rngs) for _ in range(task.blocks)])
        self.head = nnx.Linear(task.width, task.classes, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """`batch tokens features` to `batch classes`."""
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=1))


def start(task: Task) -> Training:
    """Compiles at the first batch."""

    @nnx.jit
    def train_step(model: Any, optimizer: Any, images: Any, labels: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    def train(batches: Iterable[Any]) -> Iterator[Any]:
        model = (Transformer if task.blocks else MLP)(task, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)
        for images, labels in batches:
            yield train_step(model, optimizer, images, labels)

    return train


PEER = Peer(start)
