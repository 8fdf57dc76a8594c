"""The deep model of the benchmarks: a transformer of 12 blocks with about 200 parameter leaves, small in all else."""

from typing import Any

import numpy as np
import optax

import equikd as ek
from benchmarks import _task
from benchmarks._models import Transformer as Transformer
from benchmarks._task import DEEP

BLOCKS, BATCH = DEEP.blocks, DEEP.batch


def load() -> dict[str, np.ndarray]:
    """Images of noise, rows first, and labels."""
    return _task.load(DEEP.name)


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
