"""The digits experiment: a few named settings, and the trainer that they describe."""

from typing import Any

import numpy as np
import optax

from equikd import Trainer, lazy
from equikd.config import config
from equikd.data import InMemory
from equikd.evals import Eval
from equikd.examples.digits.model import Classifier
from equikd.losses import SoftmaxCrossEntropy
from equikd.metrics import Accuracy
from equikd.train import Checkpoints


@config
class Digits:
    """Settings of the digits experiment."""

    learning_rate: float = 3e-3
    """Step size of AdamW."""
    weight_decay: float = 1e-4
    """Decoupled weight decay of AdamW."""
    dropout: float = 0.1
    """Probability that a hidden unit is dropped."""
    width: int = 128
    """Units of each hidden layer."""
    depth: int = 2
    """Number of hidden layers."""
    batch_size: int = 128
    """Images in a training batch."""
    num_steps: int = 1000
    """Optimizer updates."""

    def validate(self) -> None:
        """Refuse settings that cannot train."""
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if min(self.width, self.depth, self.batch_size, self.num_steps) < 1:
            raise ValueError("width, depth, batch_size and num_steps must be at least 1")


def load(split: str) -> dict[str, np.ndarray]:
    """The images and labels of one split.

    Args:
        split: `"train"` (1,437 images) or `"test"` (360); the same ones each time.

    Returns:
        `image`: float32 `n 8 8` in [0, 1]; `label`: int32 `n` in 0..9.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        error.add_note('to install what the examples need: pip install "equikd[examples]"')
        raise

    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits["target"]))
    cut = int(0.8 * len(order))
    rows = {"train": order[:cut], "test": order[cut:]}[split]
    images, labels = digits["images"][rows] / 16, digits["target"][rows]
    return {"image": images.astype(np.float32), "label": labels.astype(np.int32)}


def get_config(args: Digits = Digits()) -> Trainer:
    """The trainer for these settings."""
    return Trainer(
        model=lazy(Classifier)(pixels=64, classes=10, width=args.width, depth=args.depth, dropout=args.dropout),
        inputs={"x": "batch.image"},
        optimizer=lazy(optax.adamw)(learning_rate=args.learning_rate, weight_decay=args.weight_decay),
        losses={"ce": SoftmaxCrossEntropy(logits="preds", labels="batch.label")},
        metrics={"accuracy": Accuracy(preds="preds", labels="batch.label")},
        train_data=InMemory(lazy(load)("train"), batch_size=args.batch_size),
        num_steps=args.num_steps,
        evals={"test": Eval(data=InMemory(lazy(load)("test"), batch_size=360), every=200)},
        checkpoints=Checkpoints(every=500),
    )
