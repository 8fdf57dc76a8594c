"""What a schedule is, and the curves that schedules are put together from.

A curve is a pure function of a count and of the numbers of a schedule, with optax's order of operations, so that the
values are optax's to the last bits. None branches on a number: where optax has an `if`, a `where` stands here, and what
it does not select is kept finite too, as a gradient passes through both sides.
"""

import abc
from typing import Any

import jax.numpy as jnp

from equikd._compat import weaken
from equikd.typing import Array, Float, Int


class Schedule(abc.ABC):
    """Base of all schedules: a function of the step. Subclasses are config classes.

    Example:
        >>> from equikd.config import config
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


def as_float(count: Any) -> Any:
    """A step count in JAX's default float: exact up to 2^24 in float32, and divisible by traced counts."""
    return jnp.asarray(count, dtype=float)


def signed(count: Any) -> Any:
    """A step count that may be subtracted from: unsigned, 2 - 5 would be a large number."""
    unsigned = jnp.issubdtype(getattr(count, "dtype", int), jnp.unsignedinteger)
    return jnp.minimum(count, 2**31 - 1).astype(jnp.int32) if unsigned else count


def weak(value: Any) -> Any:
    """A scalar that promotes like a Python float, as all hyperparameters in the trace do: bf16 stays bf16."""
    return weaken(value) if getattr(value, "ndim", None) == 0 else value


def share(count: Any, steps: Any) -> Any:
    """How much of a phase of this many steps is over, from 0 to 1; 0 where it has none."""
    part = jnp.clip(count, 0, jnp.maximum(steps, 0)) / jnp.maximum(steps, 1)
    # Vectorised, n / n may be 1 + 1e-7, and a power of the -1e-7 that is left is nan.
    return jnp.where((count >= steps) & (steps > 0), 1.0, part)


def line(count: Any, start: Any, end: Any, steps: Any) -> Any:
    """From start to end in this many steps; where there are none, the start."""
    return (start - end) * (1 - share(count, steps)) + end


def polynomial(count: Any, start: Any, end: Any, power: Any, steps: Any) -> Any:
    """As `line`, with a power of what is left of it."""
    return (start - end) * (1 - share(count, steps)) ** power + end


def cosine(count: Any, start: Any, steps: Any, alpha: Any, exponent: Any) -> Any:
    """From start to alpha x start in this many steps (at least one), in optax's order (1 + cos cancels at the end)."""
    steps = jnp.maximum(steps, 1)
    curve = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(count, 0, steps) / steps))
    curve = jnp.maximum(curve, 0)  # a cosine that is rounded below -1 would be nan to a power
    return start * ((1 - alpha) * curve**exponent + alpha)


def exponential(count: Any, start: Any, steps: Any, rate: Any, staircase: bool, end: Any) -> Any:
    """Start x rate^(count / steps), not beyond end unless that is None; the start where steps or rate are 0."""
    # A staircase divides whole numbers: a rounded quotient could fall a step short of the stair.
    whole = jnp.maximum(count, 0) // jnp.maximum(steps, 1) if staircase else None
    power = jnp.maximum(as_float(count), 0) / jnp.maximum(as_float(steps), 1) if whole is None else as_float(whole)
    never = (jnp.asarray(steps) <= 0) | (jnp.asarray(rate) == 0)
    rate = jnp.where(never, 1.0, rate)
    value = start * rate**power
    if end is not None:
        # Not `minimum`: beyond the end the power may overflow, and 0 x inf is no gradient.
        beyond = ~never & jnp.where(rate < 1, value < end, value > end)
        value = jnp.where(beyond, end, start * rate ** jnp.where(beyond, 0.0, power))
    return value


def out_of_range(schedule: Any, *, not_negative: tuple[str, ...] = (), positive: tuple[str, ...] = ()) -> list[str]:
    """One line for each named field that is out of range; numbers that are not known on the host pass."""
    named = [(name, getattr(schedule, name)) for name in not_negative + positive]
    return [
        f"{name} must {'be positive' if name in positive else 'not be negative'}, got {value}"
        for name, value in named
        if known(value) and not (value > 0 if name in positive else value >= 0)
    ]


def known(*numbers: Any) -> bool:
    """Whether these are plain numbers: a reference or a tracer cannot be compared on the host."""
    return all(type(number) in (int, float) for number in numbers)


def refuse(problems: list[str]) -> None:
    """Raise a ValueError of all problems, if there are any."""
    if problems:
        raise ValueError("; ".join(problems))
