"""A small experiment with all that a resume must restore, as a config module for the command line and for tests.

BatchNorm and dropout, rows that do not fill whole batches, a warm-up schedule, an eval, intervals that do not divide
each other. `STOP_AT=137` ends the process at that step, in the way that `STOP_HOW` says.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import equikd as ek


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, width: int, dropout: float, *, key: jax.Array) -> None:
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(6, width, key=first)
        self.norm = eqx.nn.BatchNorm(width, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(dropout)
        self.last = eqx.nn.Linear(width, 3, key=last)

    def __call__(self, x: jax.Array, state: eqx.nn.State, *, key: jax.Array | None = None) -> Any:
        features, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jax.nn.relu(features), key=key)), state


def load(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Rows of three overlapping clouds."""
    draw = np.random.default_rng(seed)
    label = draw.integers(0, 3, rows)
    return {"x": (draw.normal(size=(rows, 6)) + label[:, None]).astype(np.float32), "label": label.astype(np.int32)}


@ek.config.config
class Stop:
    """A writer that ends the process at the step `STOP_AT`: by `kill`, `interrupt` or `error`."""

    def open(self, run: Any) -> "Stopping":
        return Stopping(run.workdir)


class Stopping:
    def __init__(self, workdir: Path | None) -> None:
        self.workdir, self.closed = workdir, False
        self.at, self.how = int(os.environ.get("STOP_AT", "-1")), os.environ.get("STOP_HOW", "interrupt")

    def tick(self, step: int) -> None:
        if step != self.at:
            return
        if self.how == "kill":
            newest = self.workdir / "checkpoints" / str(step // 50 * 50)
            while not newest.exists():  # it is written in the background
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if self.how == "interrupt" else OSError("no space left on device")

    def write(self, record: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@ek.config.config
class Args:
    """Settings of the experiment."""

    learning_rate: float = 1e-2
    """Peak of the learning rate."""
    width: int = 16
    """Hidden units."""
    log_every: int = 30
    """Steps in a training interval."""
    save_every: int = 50
    """Steps between checkpoints."""
    eval_every: int = 70
    """Steps between evals."""
    num_steps: int = 200
    """Updates."""


def get_config(args: Args = Args()) -> ek.Trainer:
    test = ek.data.InMemory(ek.lazy(load)(50, seed=1), batch_size=32)
    return ek.Trainer(
        model=ek.lazy(Net)(args.width, dropout=0.3),
        inputs={"x": "batch.x"},
        losses={"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label")},
        metrics={"accuracy": ek.metrics.Accuracy(preds="preds", labels="batch.label")},
        optimizer=ek.lazy(optax.adamw)(
            ek.optim.WarmupCosine(0.0, args.learning_rate, warmup_steps=20, decay_steps=1000)
        ),
        train_data=ek.data.InMemory(ek.lazy(load)(300, seed=0), batch_size=32),
        evals={"test": ek.evals.Eval(data=test, every=args.eval_every)},
        num_steps=args.num_steps,
        log_every=args.log_every,
        checkpoints=ek.train.Checkpoints(every=args.save_every),
        writers=(Stop(),),
    )
