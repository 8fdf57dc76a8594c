"""Schedules of one piece: constant, linear, polynomial, cosine, exponential."""

from typing import Any

import jax.numpy as jnp

from equikd.config import config, field
from equikd.optim._base import (
    Schedule,
    as_float,
    cosine,
    exponential,
    line,
    out_of_range,
    polynomial,
    refuse,
    signed,
    weak,
)


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
        return weak(self.value)


@config
class Linear(Schedule):
    """A line from one value to another, constant before and after, as `optax.linear_schedule`.

    With p = clip((count - transition_begin) / transition_steps, 0, 1): init + p (end - init).

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
        refuse(out_of_range(self, not_negative=("transition_steps", "transition_begin")))

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        count = as_float(count) - jnp.maximum(as_float(self.transition_begin), 0)
        return weak(line(count, self.init_value, self.end_value, as_float(self.transition_steps)))


@config
class Polynomial(Schedule):
    """From one value to another along a power, constant before and after, as `optax.polynomial_schedule`.

    With p = clip((count - transition_begin) / transition_steps, 0, 1): end + (init - end) (1 - p)^power.

    Example:
        >>> Polynomial(1.0, 0.0, power=2.0, transition_steps=10)(5).item()
        0.25
    """

    init_value: float
    """Value at the start."""
    end_value: float
    """Value at the end and after it."""
    power: float
    """Power of the share that is left; 1 is a line, above 1 it falls faster at first."""
    transition_steps: int = field(dynamic=True)
    """Steps from one to the other; 0: the value stays at `init_value`."""
    transition_begin: int = field(dynamic=True, default=0)
    """Steps before it starts."""

    def validate(self) -> None:
        """Refuse negative counts and a negative power, which has no value at the end."""
        refuse(out_of_range(self, not_negative=("power", "transition_steps", "transition_begin")))

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        count = as_float(count) - jnp.maximum(as_float(self.transition_begin), 0)
        return weak(polynomial(count, self.init_value, self.end_value, self.power, as_float(self.transition_steps)))


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
        """Refuse a decay of no steps, and a negative exponent, which has no value at the end."""
        refuse(out_of_range(self, positive=("decay_steps",), not_negative=("exponent",)))

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        return weak(cosine(as_float(count), self.init_value, as_float(self.decay_steps), self.alpha, self.exponent))


@config
class Exponential(Schedule):
    """The initial value times a rate to the power of the steps, as `optax.exponential_decay`.

    With p = max(count - transition_begin, 0) / transition_steps: init x decay_rate^p.

    Example:
        >>> Exponential(1.0, transition_steps=10, decay_rate=0.25)(5).item()
        0.5
    """

    init_value: float
    """Value at the start."""
    transition_steps: int = field(dynamic=True)
    """Steps in which the value is multiplied by `decay_rate` once; 0: the value stays at `init_value`."""
    decay_rate: float
    """Factor; below 1 the value falls, above 1 it grows; 0: the value stays at `init_value`."""
    transition_begin: int = field(dynamic=True, default=0)
    """Steps before it starts."""
    staircase: bool = False
    """Whether p is rounded down, so that the value changes once in `transition_steps` steps."""
    end_value: float | None = field(dynamic=True, default=None)
    """Where it stops: a lower bound if `decay_rate` is below 1, else an upper one. None: nowhere."""

    def validate(self) -> None:
        """Refuse negative counts, and a negative factor."""
        refuse(out_of_range(self, not_negative=("transition_steps", "decay_rate", "transition_begin")))

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        count = signed(count) - jnp.maximum(self.transition_begin, 0)
        numbers = (self.transition_steps, self.decay_rate, self.staircase, self.end_value)
        return weak(exponential(count, self.init_value, *numbers))
