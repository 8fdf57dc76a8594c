"""One-cycle schedules: up, down and out, in phases that are shares of the whole.

Smith and Topin 2017, Super-Convergence, arXiv:1708.07120. A phase ends on a whole step, the share times the steps,
rounded down; so the value does not depend smoothly on a share, and the gradient for it is 0.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from equikd.config import config, field
from equikd.optim._base import Schedule, as_float, known, out_of_range, refuse, share, weak


@config
class CosineOneCycle(Schedule):
    """Up to the peak and down, both along half a cosine, as `optax.cosine_onecycle_schedule`.

    From `peak_value / div_factor` to the peak, over `pct_start` of the steps; then to the initial value divided by
    `final_div_factor`.

    Example:
        >>> schedule = CosineOneCycle(transition_steps=100, peak_value=1.0)
        >>> [float(f"{schedule(step):.2g}") for step in (0, 30, 65, 100)]
        [0.04, 1.0, 0.5, 4e-06]
    """

    transition_steps: int = field(dynamic=True)
    """Steps of the whole cycle."""
    peak_value: float
    """The largest value."""
    pct_start: float = 0.3
    """Share of the steps in which the value rises."""
    div_factor: float = 25.0
    """Peak over initial value."""
    final_div_factor: float = 1e4
    """Initial over final value."""

    def validate(self) -> None:
        """Refuse numbers that are not positive, and phases without a step."""
        refuse(_problems(self, "pct_start"))

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        first = self.peak_value / self.div_factor
        steps = as_float(self.transition_steps)
        ends = (_end(self.pct_start, steps), steps)
        return _phases(count, ends, (first, self.peak_value, first / self.final_div_factor), _half_cosine)


@config
class LinearOneCycle(Schedule):
    """Up to the peak, down again, and out, along three lines, as `optax.linear_onecycle_schedule`.

    From `peak_value / div_factor` to the peak, over `pct_start` of the steps; back, until `pct_final` of them; then to
    the initial value divided by `final_div_factor`.

    Example:
        >>> schedule = LinearOneCycle(transition_steps=100, peak_value=1.0)
        >>> [float(f"{schedule(step):.2g}") for step in (0, 30, 85, 100)]
        [0.04, 1.0, 0.04, 4e-06]
    """

    transition_steps: int = field(dynamic=True)
    """Steps of the whole cycle."""
    peak_value: float
    """The largest value."""
    pct_start: float = 0.3
    """Share of the steps in which the value rises."""
    pct_final: float = 0.85
    """Share of the steps after which it is back at the initial value."""
    div_factor: float = 25.0
    """Peak over initial value."""
    final_div_factor: float = 1e4
    """Initial over final value."""

    def validate(self) -> None:
        """Refuse numbers that are not positive, and phases without a step."""
        refuse(_problems(self, "pct_start", "pct_final"))

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        first = self.peak_value / self.div_factor
        steps = as_float(self.transition_steps)
        ends = (_end(self.pct_start, steps), _end(self.pct_final, steps), steps)
        return _phases(count, ends, (first, self.peak_value, first, first / self.final_div_factor), _straight)


def _end(part: Any, steps: Any) -> Any:
    """The last step of a phase, `floor(part * steps)`, where 0.9 of 10 steps is 9 although a float32 0.9 is less."""
    return jnp.floor(part * steps * (1 + 2.0**-21))


def _phases(count: Any, ends: tuple[Any, ...], values: tuple[Any, ...], curve: Callable[..., Any]) -> Any:
    """From value to value, each phase along a curve until its end; the last value from then on."""
    count, made = as_float(count), values[-1]
    starts = (0.0, *ends[:-1])
    for start, end, before, after in reversed(list(zip(starts, ends, values[:-1], values[1:], strict=True))):
        made = jnp.where(count < end, curve(before, after, share(count - start, end - start)), made)
    return weak(made)


def _straight(start: Any, end: Any, part: Any) -> Any:
    return (end - start) * part + start


def _half_cosine(start: Any, end: Any, part: Any) -> Any:
    return end + (start - end) / 2.0 * (jnp.cos(jnp.pi * part) + 1)


def _problems(schedule: Any, *shares: str) -> list[str]:
    problems = out_of_range(
        schedule, positive=("transition_steps", "div_factor", "final_div_factor"), not_negative=shares
    )
    steps, parts = schedule.transition_steps, [getattr(schedule, name) for name in shares]
    if problems or not known(steps, *parts):
        return problems
    ends = [*(_end(part, steps) for part in parts), steps]
    ends = [int(end) if math.isfinite(end) else end for end in ends]
    if all(end < following for end, following in itertools.pairwise(ends)):
        return []
    named = " and ".join(f"{name}={part}" for name, part in zip(shares, parts, strict=True))
    text = f"{named} must leave each phase a step of transition_steps={steps}"
    return [f"{text}, got phases that end at {', '.join(map(str, ends))}"]
