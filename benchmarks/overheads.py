"""What the services of a run cost: each alone, over the same run without any.

The tiny model (64-128-128-10, batch 32, adam), the whole `trainer.train(workdir)` with metrics.jsonl, logging every 100
steps. A run's figure is its median interval of 100 steps, so neither start-up nor compilation counts.
  `none`        without guard, averages, progress, checkpoints
  `guard`       `guard=ek.train.StopOnNonFinite()`, the default
  `ema`         `ek.optim.Ema(...)`, an average of the parameters
  `progress`    `ek.train.Console()` on a terminal (a pseudo-terminal that somebody reads)
  `checkpoint`  `ek.train.Checkpoints(every=100)`: here, that is a checkpoint every hundredth of a second

A step takes 0.1 ms, a tenth of it Python. What costs one pass over the gradients or parameters (guard, average) is a
larger part of such a step than of any that has work to do: the tiny model has 27,000 parameters and a batch of 32.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax

import equikd as ek
from benchmarks._timing import Rounds, finish, interleave, quick, ratios, show, times
from benchmarks._tiny import LOG_EVERY, OPENED, RATE, ClockWriter, OnTerminal, make_trainer

NONE = {"guard": None, "checkpoints": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": NONE,
    "guard": NONE | {"guard": ek.train.StopOnNonFinite()},
    "ema": NONE | {"optimizer": ek.optim.Ema(ek.lazy(optax.adam)(RATE), decay=0.999)},
    "progress": NONE | {"writers": (OnTerminal(), ClockWriter())},
    "checkpoint": NONE | {"checkpoints": ek.train.Checkpoints(every=100)},
}


def run_of(fields: dict[str, Any], num_steps: int) -> Callable[[], float]:
    """A whole run; gives the seconds of a step."""
    trainer = ek.override(make_trainer(num_steps), fields)

    def work() -> float:
        with tempfile.TemporaryDirectory() as folder:
            trainer.train(Path(folder) / "run")
        return OPENED.pop().seconds_per_step()[0]

    return work


def race(rounds: int, num_steps: int = 10 * LOG_EVERY) -> Rounds:
    """All of them."""
    return interleave({name: run_of(fields, num_steps) for name, fields in VARIANTS.items()}, rounds=rounds)


def main() -> None:
    """Run the race and print the figures."""
    rounds = race(15 if quick(__doc__ or "") else 80)
    print("time of a step of the whole loop, and ratio to the one without of the same round (quartiles)")
    show(rounds, "none")
    finish(
        ema_over_none=ratios(rounds, "ema", "none"),
        guard_over_none=ratios(rounds, "guard", "none"),
        progress_over_none=ratios(rounds, "progress", "none"),
        checkpoint_every_100_over_none=ratios(rounds, "checkpoint", "none"),
        step_without_us=times(rounds, "none").times(1e6),
    )


if __name__ == "__main__":
    main()
