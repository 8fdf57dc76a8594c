"""An experiment for gradient accumulation: rows for several losses, each with a mask of its own."""

from typing import Any

import equinox as eqx
import numpy as np
import optax

import equikd as ek
from equikd.typing import Array, Float
from tests.train._small import BATCH, CLASSES, FEATURES, arrays, quick

SGD = ek.lazy(optax.sgd)(learning_rate=0.5)


def rows_of(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows for two losses, each with a mask of its own."""
    draw = np.random.default_rng(seed)
    return {
        **arrays(count, seed),
        "y": draw.normal(size=(count, CLASSES)).astype(np.float32),
        "known": draw.random(count) < 0.5,
        "parts": draw.random((count, CLASSES)) < 0.7,
    }


def two_losses(**more: Any) -> dict[str, Any]:
    """Two losses under different masks, one under the batch's own, and a penalty."""
    return {
        "mae": ek.losses.AbsoluteError(preds="preds", targets="batch.y", weight=0.2),
        "ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label", mask="batch.known"),
        "mse": ek.losses.SquaredError(preds="preds", targets="batch.y", mask="batch.parts", weight=0.3),
        "l2": ek.losses.ParameterL2(weight=1e-2),
        **more,
    }


def make(accumulate: int, rows: int = BATCH, **fields: Any) -> ek.Trainer:
    made: dict[str, Any] = {
        "model": ek.lazy(eqx.nn.Linear)(FEATURES, CLASSES),
        "inputs": {"x": "batch.x"},
        "losses": two_losses(),
        "metrics": {},
        "optimizer": SGD,
        "train_data": ek.data.InMemory(rows_of(rows), batch_size=rows),
    }
    return quick(accumulate=accumulate, **made | fields)


def stepped(trainer: ek.Trainer, batch: Any = None) -> Any:
    """The state after one step on the trainer's first batch, and the results."""
    state = trainer.init()
    state, aux = ek.train.step(trainer, state, next(trainer.batches(state)) if batch is None else batch)
    return state, {name: float(np.asarray(value)) for name, value in aux.results().items()}


@ek.config.config
class Unmasked(ek.metrics.Metric):
    preds: ek.KeyPath

    def from_values(self, preds: Float[Array, "b d"]) -> ek.metrics.Average:
        return ek.metrics.Average.of(preds.mean(-1))
