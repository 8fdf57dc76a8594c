"""The adversarial experiment: a few named settings, and the trainer that they describe."""

import numpy as np
import optax

from equikd import Trainer, lazy
from equikd.config import config
from equikd.data import InMemory
from equikd.evals import Eval
from equikd.examples.digits import load
from equikd.examples.gan.losses import Verdict
from equikd.examples.gan.metrics import FrechetDistance, VerdictAccuracy
from equikd.examples.gan.model import Discriminator, Gan, Generator
from equikd.examples.gan.step import adversarial_step
from equikd.metrics import ShowImages
from equikd.train import Checkpoints


@config
class Adversarial:
    """Settings of the adversarial experiment."""

    learning_rate: float = 2e-3
    """Step size of the generator's Adam."""
    discriminator_rate: float = 1e-3
    """Step size of the discriminator's Adam; a slower one leaves the generator something to win."""
    b1: float = 0.5
    """Momentum of both; 0.9 makes the players swing (Radford et al. 2016)."""
    noise: int = 32
    """Numbers that a sample is made of."""
    width: int = 256
    """Units of each hidden layer."""
    batch_size: int = 128
    """Real images in a training batch, and samples."""
    num_steps: int = 6000
    """Updates of both players."""

    def validate(self) -> None:
        """Refuse settings that cannot train."""
        if not min(self.learning_rate, self.discriminator_rate) > 0:
            raise ValueError("learning_rate and discriminator_rate must be positive")
        if not 0 <= self.b1 < 1:
            raise ValueError(f"b1 must be in [0, 1), got {self.b1}")
        if min(self.noise, self.width, self.batch_size, self.num_steps) < 1:
            raise ValueError("noise, width, batch_size and num_steps must be at least 1")


def load_with_noise(split: str, size: int) -> dict[str, np.ndarray]:
    """The images of a split, each with noise to make a sample of: the same in each eval, so that samples compare.

    Args:
        split: as in `load`.
        size: numbers that a sample is made of.

    Returns:
        `image`: float32 `n 8 8`; `noise`: float32 `n z`, normal.
    """
    images = load(split)["image"]
    return {"image": images, "noise": np.random.default_rng(0).normal(size=(len(images), size)).astype(np.float32)}


def get_config(args: Adversarial = Adversarial()) -> Trainer:
    """The trainer for these settings."""
    return Trainer(
        model=lazy(Gan)(
            generator=lazy(Generator)(noise=args.noise, size=8, width=args.width),
            discriminator=lazy(Discriminator)(size=8, width=args.width),
        ),
        inputs={"image": "batch.image", "noise": "batch.noise"},
        step=adversarial_step,
        losses={
            "real": Verdict("preds.real", real=True),
            "fake": Verdict("preds.fake", real=False),
            "generator": Verdict("preds.fake", real=True),
        },
        metrics={
            "real_accuracy": VerdictAccuracy("preds.real", real=True),
            "fake_accuracy": VerdictAccuracy("preds.fake", real=False),
        },
        optimizer={
            "generator.**": lazy(optax.adam)(args.learning_rate, b1=args.b1),
            "discriminator.**": lazy(optax.adam)(args.discriminator_rate, b1=args.b1),
        },
        train_data=InMemory(lazy(load)("train"), batch_size=args.batch_size),
        num_steps=args.num_steps,
        log_every=500,
        evals={
            "test": Eval(
                data=InMemory(lazy(load_with_noise)("test", args.noise), batch_size=360),
                every=1000,
                at=(0,),
                metrics={
                    "real_accuracy": VerdictAccuracy("preds.real", real=True),
                    "fake_accuracy": VerdictAccuracy("preds.fake", real=False),
                    "distance": FrechetDistance(real="batch.image", fake="preds.sample"),
                    "samples": ShowImages("preds.sample", n=64, columns=8, scale=4),
                },
            )
        },
        checkpoints=Checkpoints(every=2000),
    )
