"""Timing on a machine that has other things to do: contestants take turns, and only ratios within a turn are compared.

A *contestant* is a function that does a piece of work and returns the seconds it took, per step where there are steps.
In each round all contestants run once, in random order, so whatever slows the machine for a second slows all of them; a
round's *ratio* is a contestant's time over the baseline's in the same round. `ratios` and `times` give the quartiles
over all rounds: the median is the figure, the other two say how far to trust it.

    rounds = interleave({"bare": bare, "ours": ours}, rounds=50)
    finish(step_over_bare=ratios(rounds, "ours", "bare"))

The last line of a benchmark is `RESULT {json}`, for programs; what stands above it is for people.
"""

import argparse
import json
import math
import os
import platform
import random
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

Contestant = Callable[[], float]
Rounds = dict[str, np.ndarray]
"""Contestant -> seconds of each round."""


class Quartiles(NamedTuple):
    """Lower quartile, median and upper quartile of some numbers."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Any) -> "Quartiles":
        """Those of an array.

        Raises:
            ValueError: it is empty or holds nan: a round was not measured.
        """
        values = np.asarray(values, float)
        if not values.size or np.isnan(values).any():
            raise ValueError(f"quartiles of {values.size} numbers, {int(np.isnan(values).sum())} of them nan")
        return cls(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())

    def times(self, factor: float) -> "Quartiles":
        """All three in another unit."""
        return Quartiles(*(factor * value for value in self))

    def __str__(self) -> str:
        return f"{self.median:9.3f}   ({self.low:.3f} .. {self.high:.3f})"


def interleave(contestants: Mapping[str, Contestant], *, rounds: int, warmup: int = 1, seed: int = 0) -> Rounds:
    """Each contestant once a round, in random order.

    Args:
        contestants: name -> function that returns the seconds its work took.
        rounds: how many are kept.
        warmup: how many rounds before those are thrown away, with their compilations.
        seed: of the order.

    Returns:
        Name -> float64 `rounds`.
    """
    order, draw = list(contestants), random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-warmup, rounds):
        draw.shuffle(order)
        for name in order:
            taken = contestants[name]()
            if number >= 0:
                seconds[name].append(taken)
    return {name: np.array(values) for name, values in seconds.items()}


def stopwatch(work: Callable[[], Any], *, steps: int = 1, clock: Callable[[], float] = time.perf_counter) -> Contestant:
    """A contestant from work that is timed as a whole, over its number of steps.

    Args:
        work: what is timed; it must wait for its own results.
        steps: how many steps it makes.
        clock: `time.process_time` counts what all threads of this process compute, however busy the machine is.
    """

    def timed() -> float:
        start = clock()
        work()
        return (clock() - start) / steps

    return timed


def times(rounds: Rounds, name: str) -> Quartiles:
    """Seconds of a contestant."""
    return Quartiles.of(rounds[name])


def ratios(rounds: Rounds, name: str, baseline: str) -> Quartiles:
    """A contestant's time over the baseline's in the same round."""
    return Quartiles.of(rounds[name] / rounds[baseline])


def show(rounds: Rounds, baseline: str, *, unit: str = "us", per_second: float = 1e6) -> None:
    """One line for each contestant: its time, and its ratio to the baseline, with quartiles."""
    width = max(map(len, rounds))
    for name in rounds:
        time_, ratio = times(rounds, name).times(per_second), ratios(rounds, name, baseline)
        print(f"{name:{width}} {time_} {unit}   x {ratio}", flush=True)


def quick(description: str, arguments: list[str] | None = None) -> bool:
    """Whether the command line asks for the short form: `--quick`, fewer rounds, wider quartiles."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: for a first look, and for CI")
    return parser.parse_args(arguments).quick


def machine() -> dict[str, Any]:
    """What a figure depends on; `load` is the mean number of busy processes in the last minute, ours included."""
    packages = ("jax", "jaxlib", "equinox", "optax", "numpy")
    facts = {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {**facts, "system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count(), "load": load}


def finish(**figures: Any) -> None:
    """Print the last line: `RESULT {json}`. A `Quartiles` becomes its median, and `NAME_quartiles` beside it.

    Raises:
        ValueError: a figure is nan or infinite.
    """
    values: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Quartiles):
            values |= {name: rounded(value.median), f"{name}_quartiles": [rounded(value.low), rounded(value.high)]}
        else:
            values[name] = rounded(value) if isinstance(value, float) else value
    print("RESULT " + json.dumps(values | {"machine": machine()}, allow_nan=False), flush=True)


def rounded(value: float) -> float:
    """Four significant digits; more would be noise."""
    return float(f"{value:.4g}") if math.isfinite(value) else value
