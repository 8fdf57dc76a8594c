"""Schedules: floats that change with the step, and whose own numbers are traced.

A schedule is a config class that is called with the number of updates made so far: the first update sees `schedule(0)`.
Its floats and its step counts are leaves, so that a sweep over peaks, warm-ups and lengths shares one program; optax's
own schedules branch in Python on most of these. On the same numbers the values are optax's. One serves as the argument
of an optimizer, `lazy(optax.adamw)(WarmupCosine(0.0, 3e-4, 100, 1000))`, and as the weight of a loss.

They never branch: whatever the traced numbers are, the value is finite. Numbers that make no sense are refused by
`validate`, on the host.
"""

import abc
from typing import Any

import jax.numpy as jnp

from equikd._compat import weaken
from equikd.config import config, field
from equikd.typing import Array, Float, Int


class Schedule(abc.ABC):
    """Base of all schedules: a function of the step. Subclasses are config classes.

    Example:
        >>> @config
        ... class Halving(Schedule):
        ...     init_value: float
        ...     def __call__(self, count):
        ...         return self.init_value * 0.5**count
        >>> Halving(1.0)(2)
        0.25
    """

    @abc.abstractmethod
    def __call__(self, count: int | Int[Array, ""]) -> float | Float[Array, ""]:
        """The value for the update that `count` updates went before."""


def _float(count: Any) -> Any:
    """A step count in JAX's default float: exact up to 2^24 in float32, and divisible by traced counts."""
    return jnp.asarray(count, dtype=float)


def _weak(value: Any) -> Any:
    """A scalar that promotes like a Python float, as all hyperparameters in the trace do: bf16 stays bf16."""
    return weaken(value) if getattr(value, "ndim", None) == 0 else value


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


def _known(*counts: Any) -> bool:
    """Whether counts are plain ints: a reference or a tracer cannot be compared on the host."""
    return all(type(count) is int for count in counts)


@config
class Constant(Schedule):
    """The same value at every step, as `optax.constant_schedule`.

    Example:
        >>> Constant(0.5)(7)
        0.5
    """

    value: float
    """The value."""

    def __call__(self, count: Any) -> Any:
        """The value."""
        del count
        return _weak(self.value)


@config
class Linear(Schedule):
    """A line from one value to another, constant before and after, as `optax.linear_schedule`.

    With p = clip((count - begin) / steps, 0, 1): init + p (end - init).

    Example:
        >>> Linear(1.0, 0.0, transition_steps=10)(5).item()
        0.5
    """

    init_value: float
    """Value at the start."""
    end_value: float
    """Value at the end and after it."""
    transition_steps: int = field(dynamic=True)
    """Steps from one to the other; 0: the value stays at `init_value`."""
    transition_begin: int = field(dynamic=True, default=0)
    """Steps before the line starts."""

    def validate(self) -> None:
        """Refuse negative counts."""
        for name in ("transition_steps", "transition_begin"):
            count = getattr(self, name)
            _check(not _known(count) or count >= 0, f"{name} must not be negative, got {count}")

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        begin = jnp.maximum(_float(self.transition_begin), 0)
        return _weak(_line(_float(count) - begin, self.init_value, self.end_value, _float(self.transition_steps)))


@config
class Cosine(Schedule):
    """Half a cosine from the initial value down to a share of it, as `optax.cosine_decay_schedule`.

    With c = (1 + cos(pi min(count / decay_steps, 1))) / 2: init ((1 - alpha) c^exponent + alpha). Loshchilov and Hutter
    2017, SGDR, arXiv:1608.03983, without the restarts.

    Example:
        >>> Cosine(1.0, decay_steps=10)(5).round(3).item()
        0.5
    """

    init_value: float
    """Value at the start."""
    decay_steps: int = field(dynamic=True)
    """Steps until the end of the decay."""
    alpha: float = 0.0
    """Share of `init_value` that is left at the end."""
    exponent: float = 1.0
    """Power of the cosine; above 1, it falls faster at first."""

    def validate(self) -> None:
        """Refuse a decay of no steps."""
        steps = self.decay_steps
        _check(not _known(steps) or steps > 0, f"decay_steps must be positive, got {steps}")

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        return _weak(_cosine(_float(count), self.init_value, _float(self.decay_steps), self.alpha, self.exponent))


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
        warmup, decay = self.warmup_steps, self.decay_steps
        _check(not _known(warmup) or warmup >= 0, f"warmup_steps must not be negative, got {warmup}")
        text = f"decay_steps counts the warm-up too and must exceed warmup_steps={warmup}, got {decay}"
        _check(not _known(warmup, decay) or decay > warmup, text)

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        count, warmup, steps = _float(count), _float(self.warmup_steps), _float(self.decay_steps)
        no_peak = self.peak_value == 0
        alpha = jnp.where(no_peak, 0.0, self.end_value / jnp.where(no_peak, 1.0, self.peak_value))
        up = _line(count, self.init_value, self.peak_value, warmup)
        down = _cosine(count - warmup, self.peak_value, steps - warmup, alpha, self.exponent)
        return _weak(jnp.where(count < warmup, up, down))


def _line(count: Any, start: Any, end: Any, steps: Any) -> Any:
    """From start to end in this many steps; where there are none, the start."""
    left = 1 - jnp.clip(count, 0, steps) / jnp.maximum(steps, 1)
    return (start - end) * left + end


def _cosine(count: Any, start: Any, steps: Any, alpha: Any, exponent: Any) -> Any:
    """From start to alpha x start in this many steps, in optax's order of operations (1 + cos cancels at the end)."""
    steps = jnp.maximum(steps, 1)
    # Below 0 only under a `where` that does not select it; clipped, its gradient stays finite.
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(count, 0, steps) / steps))
    return start * ((1 - alpha) * cosine**exponent + alpha)
