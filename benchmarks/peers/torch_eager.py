"""PyTorch as it comes: eager, a `DataLoader`, `backward` and an optimizer's `step`."""

# pyright: reportMissingImports=false

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks._task import RATE, Task, load
from benchmarks.peers._peer import Peer, Training


class Block(nn.Module):
    """A block of the transformer."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(task.width, task.heads, batch_first=True)
        self.before_attention, self.before_mlp = nn.LayerNorm(task.width), nn.LayerNorm(task.width)
        self.mlp = nn.Sequential(
            nn.Linear(task.width, 2 * task.width), nn.GELU(), nn.Linear(2 * task.width, task.width)
        )

    def forward(self, x: Any) -> Any:
        """`batch tokens width` to the same."""
        normed = self.before_attention(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """The model of `benchmarks._models`."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.embedding = nn.Linear(task.shape[-1], task.width)
        self.blocks = nn.Sequential(*(Block(task) for _ in range(task.blocks)))
        self.head = nn.Linear(task.width, task.classes)

    def forward(self, x: Any) -> Any:
        """`batch tokens features` to `batch classes`."""
        return self.head(self.blocks(self.embedding(x)).mean(dim=1))


def make_model(task: Task) -> nn.Module:
    """The model of a task."""
    torch.manual_seed(0)
    if task.blocks:
        return Transformer(task)
    inner = nn.Linear(task.width, task.width)
    first, last = nn.Linear(task.features, task.width), nn.Linear(task.width, task.classes)
    return nn.Sequential(first, nn.ReLU(), inner, nn.ReLU(), last)


def loader(task: Task) -> Any:
    """Shuffled batches of one epoch."""
    dataset = torch.utils.data.TensorDataset(*place(*load(task.name).values()))
    return torch.utils.data.DataLoader(dataset, batch_size=task.batch, shuffle=True, drop_last=True)


def batches(task: Task) -> Iterator[Any]:
    """Shuffled batches without end."""
    of_one_epoch = loader(task)
    while True:
        yield from of_one_epoch


def place(images: Any, labels: Any) -> Any:
    """Tensors; the loss wants its labels as int64."""
    return torch.from_numpy(images), torch.from_numpy(labels).long()


def start(task: Task) -> Training:
    """Compiles nothing."""
    loss_of = nn.CrossEntropyLoss()

    def train(batches: Iterable[Any]) -> Iterator[Any]:
        model = make_model(task)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            yield loss.detach()

    return train


PEER = Peer(start, batches, place, wait=float)
