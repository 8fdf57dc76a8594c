"""The small experiment with all features that have a state, at a speed at which a signal can meet each part of it."""

import time
from collections.abc import Iterator
from typing import Any

import optax

import equikd as ek
from tests.train import _experiment


def slowly(rows: int, seed: int, seconds: float) -> Iterator[Any]:
    """Batches that take their time, for ever."""
    data = ek.data.InMemory(_experiment.load(rows, 0), batch_size=32)
    for batch in data.batches(0, seed):
        time.sleep(seconds)
        yield batch


def once(rows: int, seconds: float) -> Iterator[Any]:
    """The same for an eval."""
    for batch in ek.data.InMemory(_experiment.load(rows, 1), batch_size=32).epoch():
        time.sleep(seconds)
        yield batch


def get_config() -> ek.Trainer:
    test = ek.data.Iterable(ek.lazy.partial(once)(rows=100, seconds=0.05))
    return ek.override(
        _experiment.get_config(_experiment.Args(width=8, num_steps=120, log_every=30, save_every=20)),
        {
            "accumulate": 2,
            "train_data": ek.data.Iterable(ek.lazy.partial(slowly)(rows=300, seconds=0.004)),
            "evals": {
                "test": ek.evals.Eval(data=test, every=10),
                "averaged": ek.evals.Eval(data=test, every=30, transform=ek.optim.averaged),
            },
            "optimizer": ek.optim.Ema(
                ek.lazy(optax.adamw)(ek.optim.WarmupCosine(0.0, 1e-2, warmup_steps=20, decay_steps=1000)), decay=0.9
            ),
            "writers": (ek.train.Console(),),
        },
    )
