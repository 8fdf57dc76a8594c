"""Settings of a run that do not enter its step: when checkpoints are saved, and when training ends."""

import math
from typing import Literal

from equikd.config import config


@config
class Checkpoints:
    """When checkpoints are saved, and how many are kept. The end of training is always saved."""

    every: int | None = 1000
    """Steps between two checkpoints; None: only at the end."""
    keep: int = 3
    """How many of the newest are kept."""

    def validate(self) -> None:
        """Refuse intervals and counts below one."""
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")


@config(kw_only=True)
class StopAfter:
    """A limit besides `num_steps`, which schedules read and which stays as it is. The first that is reached counts.

    Final evals run, and the end is saved, as at `num_steps`.
    """

    steps: int | None = None
    """Updates in all, those of earlier sessions included; None: no such limit."""
    seconds: float | None = None
    """Wall-clock time from the call of `train` on, in seconds, looked at after each step; leave time for the final
    evals. The same command then goes on. None: no such limit."""

    def validate(self) -> None:
        """Refuse limits that are not positive, and none at all."""
        if self.steps is None and self.seconds is None:
            raise ValueError("give steps, seconds or both")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")


@config
class EarlyStop:
    """Training ends when a result has not improved for some time. Final evals run, and the end is saved.

    What has been seen stands in the checkpoints, so that a resumed run ends where it would have ended. A value that is
    not finite is no improvement. Training results are read one interval late, and count one interval late. The state
    in the end is the last one, not that of the best value.

    Example:
        >>> EarlyStop("test/accuracy", mode="max", patience=3).better(0.9, than=0.8)
        True
    """

    result: str
    """Name of the result, `split/name`, such as `test/loss`."""
    patience: int = 5
    """Values in a row without an improvement, after which training ends."""
    min_delta: float = 0.0
    """By how much a value must be better than the best before it, to count as an improvement."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger values are better."""

    def validate(self) -> None:
        """Refuse a patience below one, and a change that is negative."""
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")
        if not 0 <= self.min_delta < math.inf:
            raise ValueError(f"min_delta must be finite and not negative, got {self.min_delta}")

    def better(self, value: float, than: float | None) -> bool:
        """Whether a value is an improvement; the first one is."""
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        return value < than - self.min_delta if self.mode == "min" else value > than + self.min_delta
