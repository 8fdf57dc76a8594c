"""Kauldron: a `kd.train.Trainer` whose parts find each other by key, on flax.linen."""

# pyright: reportMissingImports=false

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # it imports TensorFlow, which has much to say

import flax.linen as nn
import jax.numpy as jnp
import optax
from kauldron import kd, kontext
from kauldron.inspect.profile_utils import NoopProfiler

from benchmarks._task import RATE, Clock, Task, load
from benchmarks.peers import linen
from benchmarks.peers._peer import Peer, Training


class Model(nn.Module):
    """The model of `benchmarks.peers.linen`, told what it takes from the batch."""

    inner: nn.Module
    image: kontext.Key = kontext.REQUIRED

    @nn.compact
    def __call__(self, image: Any) -> Any:
        """The logits."""
        return {"logits": self.inner(image)}


class Ticking(NoopProfiler):
    """Calls the clock after each step: the trainer calls its profiler then."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, step: int) -> None:
        """A step has been made; the first is number 0."""
        self.clock.tick(step + 1)


def batch_of(images: Any, labels: Any) -> dict[str, Any]:
    """As the losses want it."""
    return {"image": images, "label": labels[:, None]}


def make_trainer(task: Task, num_steps: int, folder: Path, **fields: Any) -> Any:
    """The experiment, with loss and accuracy."""
    keys: Any = {"logits": "preds.logits", "labels": "batch.label"}
    return kd.train.Trainer(
        workdir=folder,
        seed=0,
        train_ds=kd.data.InMemoryPipeline(
            loader=lambda: batch_of(*load(task.name).values()), batch_size=task.batch, shuffle=True
        ),
        model=Model(linen.model_of(task), image="batch.image"),
        optimizer=optax.adam(RATE),
        train_losses={"ce": kd.losses.SoftmaxCrossEntropyWithIntLabels(**keys)},
        train_metrics={"accuracy": kd.metrics.Accuracy(**keys)},
        num_train_steps=num_steps - 1,  # it makes one more
        log_metrics_every=task.log_every,
        **fields,
    )


def start(task: Task) -> Training:
    """The trainer's step, in a loop by hand."""
    trainer = make_trainer(task, 1, Path())

    def train(batches: Iterable[Any]) -> Iterator[Any]:
        state = trainer.init_state()
        for batch in batches:
            state, _ = trainer.trainstep.step(state, batch)
            yield state.step

    return train


def fit(task: Task, num_steps: int, clock: Clock, folder: Path) -> None:
    """The trainer's own loop, its progress bar kept to itself."""
    with contextlib.redirect_stderr(io.StringIO()):
        make_trainer(task, num_steps, folder, profiler=Ticking(clock)).train()


def place(images: Any, labels: Any) -> Any:
    """On the device."""
    return batch_of(jnp.asarray(images), jnp.asarray(labels))


PEER = Peer(start, place=place, fit=fit)
