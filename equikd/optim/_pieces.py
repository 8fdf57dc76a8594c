"""Schedules of several pieces: constants between boundaries, and other schedules one after the other."""

import itertools
from typing import Any

import jax.numpy as jnp

from equikd.config import config, field, resolve
from equikd.config._values import is_node, is_part
from equikd.optim._base import Schedule, known, refuse, signed, weak


@config
class PiecewiseConstant(Schedule):
    """Constant between boundaries, at each of which it is multiplied, as `optax.piecewise_constant_schedule`.

    Optax takes a dict of steps and scales; here its items stand, as keys of a dict could not be traced.

    Example:
        >>> schedule = PiecewiseConstant(1.0, ((100, 0.5), (200, 0.25)))
        >>> [schedule(step).item() for step in (99, 100, 200)]
        [1.0, 0.5, 0.125]
    """

    init_value: float
    """Value before the first boundary."""
    boundaries_and_scales: tuple[tuple[int, float], ...] = field(dynamic=True, default=())
    """Pairs of a step and the factor that is multiplied in from that step on, in any order."""

    def validate(self) -> None:
        """Refuse negative steps and scales."""
        refuse(
            [
                f"boundaries_and_scales[{index}]: {name} must not be negative, got {number}"
                for index, pair in enumerate(_written(self.boundaries_and_scales))
                for name, number in zip(("step", "scale"), _written(pair), strict=False)
                if known(number) and not number >= 0
            ]
        )

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        value, count = self.init_value, signed(count)
        for boundary, scale in self.boundaries_and_scales:
            value = value * jnp.where(jnp.less(count, boundary), 1.0, scale)
        return weak(value)


@config
class Join(Schedule):
    """Schedules one after the other, as `optax.join_schedules`.

    Each counts its steps from its own start. A member is any schedule of this package, a node that makes a function of
    the step, or a reference to one.

    Example:
        >>> from equikd.optim import Constant, Linear
        >>> schedule = Join((Linear(0.0, 1.0, 10), Constant(1.0), Linear(1.0, 0.0, 20)), boundaries=(10, 80))
        >>> [schedule(step).item() for step in (0, 5, 10, 80, 90, 100)]
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """

    schedules: tuple[Schedule, ...]
    """The members, in order."""
    boundaries: tuple[int, ...] = field(dynamic=True)
    """The steps at which the second and all further members start."""

    def validate(self) -> None:
        """Refuse members that are no schedules, too many or few boundaries, and boundaries that fall."""
        members, boundaries = _written(self.schedules), _written(self.boundaries)
        problems = [
            f"schedules[{index}] must be a function of the step, got {member!r}"
            for index, member in enumerate(members)
            if not callable(member) and not is_part(member)
        ]
        if self.schedules == ():
            problems.append("schedules must not be empty")
        elif type(self.schedules) is type(self.boundaries) is tuple and len(boundaries) != len(members) - 1:
            problems.append(f"boundaries must be one less than the {len(members)} schedules, got {boundaries}")
        refuse(problems + _falling(boundaries))

    def __call__(self, count: Any) -> Any:
        """The value at a step, weakly typed."""
        first, *others = (resolve(member) if is_node(member) else member for member in self.schedules)
        count = signed(count)
        value = first(count)
        for boundary, schedule in zip(self.boundaries, others, strict=True):
            since = count - boundary
            # A member is not asked for steps before its start: it need not be finite there, in its gradient either.
            value = jnp.where(since < 0, value, schedule(jnp.maximum(since, 0)))
        return weak(value)


def _falling(boundaries: tuple[Any, ...]) -> list[str]:
    """One line for each boundary that is less than the one before it, or than 0."""
    names = ["0", *(f"boundaries[{index}]={boundary}" for index, boundary in enumerate(boundaries))]
    return [
        f"boundaries[{index}] must not be less than {names[index]}, got {after}"
        for index, (before, after) in enumerate(itertools.pairwise((0, *boundaries)))
        if known(before, after) and after < before
    ]


def _written(value: Any) -> tuple[Any, ...]:
    """The members of a tuple; none of a reference, which `validate` cannot always follow."""
    return value if type(value) is tuple else ()
