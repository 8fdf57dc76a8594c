"""Schedules that rise along a line to a peak, and then do something else: cosine, exponential, 1/sqrt, stable-decay."""

from typing import Any

import jax.numpy as jnp

from equikd.config import config, field
from equikd.optim._base import (
    Schedule,
    as_float,
    cosine,
    exponential,
    known,
    line,
    out_of_range,
    refuse,
    share,
    signed,
    weak,
)


def _after_warmup(schedule: Any, count: Any, then: Any) -> Any:
    """The line from `init_value` to `peak_value` over `warmup_steps`, then another value."""
    warmup = as_float(schedule.warmup_steps)
    up = line(as_float(count), schedule.init_value, schedule.peak_value, warmup)
    return weak(jnp.where(as_float(count) < warmup, up, then))


@config
class WarmupCosine(Schedule):
    """A line up to the peak, then half a cosine down, as `optax.warmup_cosine_decay_schedule`.

    `Linear` from `init_value` to `peak_value` over the first `warmup_steps`, then `Cosine` to `end_value` over the
    remaining `decay_steps - warmup_steps`.

    Example:
        >>> schedule = WarmupCosine(0.0, 3e-4, warmup_steps=10, decay_steps=100)
        >>> [float(f"{schedule(step):.1e}") for step in (0, 5, 10, 100)]
        [0.0, 0.00015, 0.0003, 0.0]
    """

    init_value: float
    """Value at the start of the warm-up."""
    peak_value: float
    """Value at its end."""
    warmup_steps: int = field(dynamic=True)
    """Steps of the warm-up; 0: it starts at the peak."""
    decay_steps: int = field(dynamic=True)
    """Steps of the whole schedule, the warm-up included."""
    end_value: float = 0.0
    """Value at the end and after it."""
    exponent: float = 1.0
    """Power of the cosine; above 1, it falls faster at first."""

    def validate(self) -> None:
        """Refuse a warm-up that is negative, or as long as the whole schedule."""
        problems = out_of_range(self, not_negative=("warmup_steps", "exponent"))
        warmup, decay = self.warmup_steps, self.decay_steps
        if known(warmup, decay) and decay <= warmup:
            problems.append(f"decay_steps counts the warm-up too and must exceed warmup_steps={warmup}, got {decay}")
        refuse(problems)

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        count, warmup, steps = as_float(count), as_float(self.warmup_steps), as_float(self.decay_steps)
        no_peak = self.peak_value == 0
        alpha = jnp.where(no_peak, 0.0, self.end_value / jnp.where(no_peak, 1.0, self.peak_value))
        return _after_warmup(self, count, cosine(count - warmup, self.peak_value, steps - warmup, alpha, self.exponent))


@config
class WarmupExponential(Schedule):
    """A line up to the peak, then an exponential, as `optax.warmup_exponential_decay_schedule`.

    `Linear` from `init_value` to `peak_value` over the first `warmup_steps`, then `Exponential` from there.

    Example:
        >>> schedule = WarmupExponential(0.0, 1.0, warmup_steps=10, transition_steps=100, decay_rate=0.25)
        >>> [schedule(step).item() for step in (0, 5, 10, 60, 110)]
        [0.0, 0.5, 1.0, 0.5, 0.25]
    """

    init_value: float
    """Value at the start of the warm-up."""
    peak_value: float
    """Value at its end."""
    warmup_steps: int = field(dynamic=True)
    """Steps of the warm-up; 0: it starts at the peak."""
    transition_steps: int = field(dynamic=True)
    """Steps in which the value is multiplied by `decay_rate` once; 0: the value stays at the peak."""
    decay_rate: float
    """Factor; below 1 the value falls, above 1 it grows; 0: the value stays at the peak."""
    transition_begin: int = field(dynamic=True, default=0)
    """Steps between the end of the warm-up and the start of the decay."""
    staircase: bool = False
    """Whether the decay goes down in stairs of `transition_steps` steps."""
    end_value: float | None = field(dynamic=True, default=None)
    """Where the decay stops: a lower bound if `decay_rate` is below 1, else an upper one. None: nowhere."""

    def validate(self) -> None:
        """Refuse negative counts, and a negative factor."""
        names = ("transition_steps", "decay_rate", "warmup_steps", "transition_begin")
        refuse(out_of_range(self, not_negative=names))

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        since = signed(count) - self.warmup_steps - jnp.maximum(self.transition_begin, 0)
        numbers = (self.transition_steps, self.decay_rate, self.staircase, self.end_value)
        return _after_warmup(self, count, exponential(since, self.peak_value, *numbers))


@config
class InverseSquareRoot(Schedule):
    """A line up to the peak, then down with the square root of the step, without an end.

    `Linear` from `init_value` to `peak_value` over the first `warmup_steps`, then peak x sqrt(warmup_steps / count); a
    warm-up of 0 counts as 1 here. Optax has no such schedule. Vaswani et al. 2017, Attention Is All You Need,
    arXiv:1706.03762, section 5.3, where the peak is (d_model x warmup_steps)^-0.5. With `init_value` equal to the peak
    it is T5's: 1 / sqrt(max(count, k)), Raffel et al. 2020, arXiv:1910.10683, section 3.1.2.

    Example:
        >>> schedule = InverseSquareRoot(0.0, 1.0, warmup_steps=25)
        >>> [float(f"{schedule(step):.6f}") for step in (0, 5, 25, 100)]
        [0.0, 0.2, 1.0, 0.5]
    """

    init_value: float
    """Value at the start of the warm-up."""
    peak_value: float
    """Value at its end."""
    warmup_steps: int = field(dynamic=True)
    """Steps of the warm-up, and the scale of the decay: after four times as many the value is half the peak."""

    def validate(self) -> None:
        """Refuse a negative warm-up."""
        refuse(out_of_range(self, not_negative=("warmup_steps",)))

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        scale = jnp.maximum(as_float(self.warmup_steps), 1)
        return _after_warmup(self, count, self.peak_value * jnp.sqrt(scale / jnp.maximum(as_float(count), scale)))


@config
class WarmupStableDecay(Schedule):
    """A line up to the peak, a plateau, and a cooldown at the end ("WSD", trapezoidal).

    `Linear` from `init_value` to `peak_value` over the first `warmup_steps`; the peak; and over the last
    `cooldown_steps` of `total_steps`, with p the share of the cooldown that is over: peak + (end - peak) p^power. Optax
    has no such schedule. Hu et al. 2024, MiniCPM, arXiv:2404.06395, section 4; the shapes of the cooldown, a line and
    1 - sqrt (`power=0.5`), are those of Haegele et al. 2024, Scaling Laws and Compute-Optimal Training Beyond Fixed
    Training Durations, arXiv:2405.18392, section 3.

    Example:
        >>> schedule = WarmupStableDecay(0.0, 1.0, warmup_steps=10, cooldown_steps=20, total_steps=100)
        >>> [schedule(step).item() for step in (0, 5, 10, 80, 90, 100)]
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """

    init_value: float
    """Value at the start of the warm-up."""
    peak_value: float
    """Value at its end and on the plateau."""
    warmup_steps: int = field(dynamic=True)
    """Steps of the warm-up; 0: it starts at the peak."""
    cooldown_steps: int = field(dynamic=True)
    """Steps of the cooldown; 0: the plateau goes on."""
    total_steps: int = field(dynamic=True)
    """Steps of the whole schedule, `ref("num_steps")` in a trainer; the plateau is what the other two phases leave."""
    end_value: float = 0.0
    """Value at the end and after it."""
    power: float = 1.0
    """Shape of the cooldown: 1 is a line; 0.5 falls faster at first."""

    def validate(self) -> None:
        """Refuse negative counts, and a warm-up and a cooldown that overlap."""
        problems = out_of_range(self, not_negative=("warmup_steps", "cooldown_steps"), positive=("power",))
        warmup, cooldown, total = self.warmup_steps, self.cooldown_steps, self.total_steps
        if known(warmup, cooldown, total) and warmup + cooldown > total:
            least = f"warmup_steps={warmup} plus cooldown_steps={cooldown}"
            problems.append(f"total_steps must not be less than {least}, got {total}")
        refuse(problems)

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        cooldown = as_float(self.cooldown_steps)
        over = share(as_float(count) - (as_float(self.total_steps) - cooldown), cooldown)
        down = (self.peak_value - self.end_value) * (1 - over**self.power) + self.end_value
        return _after_warmup(self, count, down)
