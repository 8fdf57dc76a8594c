"""The balancing experiment: a few named settings, and the trainer that they describe."""

import optax

from equikd import Trainer, lazy, ref
from equikd.config import config
from equikd.data import InMemory
from equikd.evals import Eval
from equikd.examples.dqn.cartpole import starts, transitions
from equikd.examples.dqn.losses import TemporalDifference
from equikd.examples.dqn.model import Player, QNetwork
from equikd.examples.dqn.step import SlowTarget, slow_copy
from equikd.metrics import Max, Mean, Min
from equikd.optim import Cosine
from equikd.train import Checkpoints


@config
class Balancing:
    """Settings of the balancing experiment."""

    learning_rate: float = 3e-3
    """Step size of Adam at the first step; it falls to 0."""
    rate: float = 0.05
    """Part of the way that the target network follows in one step; 1.0 is no target network."""
    discount: float = 0.99
    """Worth of what happens a step later; a small one does not see the end of the track coming."""
    width: int = 64
    """Units of each hidden layer."""
    transitions: int = 20_000
    """Recorded moves to learn from."""
    batch_size: int = 256
    """Moves in a training batch."""
    num_steps: int = 3000
    """Optimizer updates."""

    def validate(self) -> None:
        """Refuse settings that cannot train."""
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {self.rate}")
        if not 0 <= self.discount <= 1:
            raise ValueError(f"discount must be in [0, 1], got {self.discount}")
        if min(self.width, self.transitions, self.batch_size, self.num_steps) < 1:
            raise ValueError("width, transitions, batch_size and num_steps must be at least 1")


def get_config(args: Balancing = Balancing()) -> Trainer:
    """The trainer for these settings."""
    return Trainer(
        model=lazy(QNetwork)(width=args.width),
        inputs={"state": "batch.state"},
        step=SlowTarget(rate=args.rate, discount=args.discount),
        init_extra=slow_copy,
        losses={"td": TemporalDifference(values_of="preds", action="batch.action", target="batch.target")},
        metrics={"best_value": Max("preds")},
        optimizer=lazy(optax.adam)(Cosine(args.learning_rate, ref("num_steps"))),
        train_data=InMemory(lazy(transitions)(args.transitions), batch_size=args.batch_size),
        num_steps=args.num_steps,
        log_every=500,
        evals={
            "play": Eval(
                data=InMemory(lazy(starts)(64), batch_size=64),
                transform=Player,
                every=500,
                at=(0,),
                losses={},
                metrics={"steps": Mean("preds"), "least_steps": Min("preds")},
            )
        },
        checkpoints=Checkpoints(every=1000),
    )
