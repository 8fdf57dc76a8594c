"""A config of the size of a real experiment, importable so that it can be written as JSON."""

from typing import Any

import optax

import equikd as ek

NODES = 6


@ek.config.config
class Experiment:
    """20 floats in 6 parts, this one included."""

    optimizer: Any
    schedule: ek.optim.WarmupCosine
    losses: dict[str, ek.losses.Loss]
    scale: float = 1.0
    shift: float = 0.5
    rates: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)


def experiment() -> Experiment:
    """The config that is measured, built anew."""
    return Experiment(
        optimizer=ek.lazy(optax.adamw)(1e-3, b1=0.9, b2=0.999, eps=1e-8, eps_root=1e-12, weight_decay=1e-4),
        schedule=ek.optim.WarmupCosine(0.1, 1.0, warmup_steps=10, decay_steps=100, end_value=0.01),
        losses={
            "ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label", label_smoothing=0.1),
            "mse": ek.losses.SquaredError(
                preds="preds", targets="batch.x", weight=ek.lazy(optax.constant_schedule)(0.3)
            ),
        },
    )
