"""Schedules for tests, and what each of them is elsewhere: in optax or in a paper."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

from equikd.config import resolve, roles
from equikd.optim import (
    Constant,
    Cosine,
    CosineOneCycle,
    Exponential,
    InverseSquareRoot,
    Join,
    Linear,
    LinearOneCycle,
    PiecewiseConstant,
    Polynomial,
    Schedule,
    WarmupCosine,
    WarmupExponential,
    WarmupStableDecay,
)

COUNTS = [*range(48), 1000, 2**30]  # 50 points: both ends and beyond


def inverse_square_root(init, peak, warmup):
    """Vaswani et al. 2017, section 5.3, with a peak of its own."""
    scale = max(warmup, 1)
    line = optax.linear_schedule(init, peak, warmup)
    return lambda count: line(count) if count < warmup else peak * math.sqrt(scale / max(count, scale))


def warmup_stable_decay(init, peak, warmup, cooldown, total, end=0.0, power=1.0):
    """Hu et al. 2024, section 4, with the cooldowns of Haegele et al. 2024."""
    line = optax.linear_schedule(init, peak, warmup)

    def value(count):
        if count < warmup:
            return line(count)
        over = min(max(count - (total - cooldown), 0) / max(cooldown, 1), 1.0) if cooldown else 0.0
        return end + (peak - end) * (1 - over**power)

    return value


# One that has all of its arguments, for each class; further cases below.
ARGUMENTS = {
    Constant: (0.3,),
    Linear: (2.0, 0.1, 30, 7),
    Polynomial: (2.0, 0.1, 1.7, 30, 7),
    Cosine: (0.5, 33, 0.1, 2.0),
    Exponential: (0.5, 9, 0.7, 4, False, 0.1),
    WarmupCosine: (1e-2, 0.7, 5, 37, 1e-3, 1.5),
    WarmupExponential: (1e-2, 0.7, 5, 9, 0.5, 4, False, 0.1),
    InverseSquareRoot: (1e-2, 0.7, 9),
    WarmupStableDecay: (1e-2, 0.7, 9, 12, 40, 1e-3, 0.5),
    CosineOneCycle: (40, 0.7, 0.25, 20.0, 1e3),
    LinearOneCycle: (40, 0.7, 0.25, 0.8, 20.0, 1e3),
    PiecewiseConstant: (0.7, ((9, 0.5), (30, 0.1))),
    Join: ((Linear(0.1, 0.7, 9), Exponential(0.7, 5, 0.5), Constant(0.1)), (9, 30)),
}
OPTAX = {
    Constant: optax.constant_schedule,
    Linear: optax.linear_schedule,
    Polynomial: optax.polynomial_schedule,
    Cosine: optax.cosine_decay_schedule,
    Exponential: optax.exponential_decay,
    WarmupCosine: optax.warmup_cosine_decay_schedule,
    WarmupExponential: optax.warmup_exponential_decay_schedule,
    InverseSquareRoot: inverse_square_root,
    WarmupStableDecay: warmup_stable_decay,
    CosineOneCycle: optax.cosine_onecycle_schedule,
    LinearOneCycle: optax.linear_onecycle_schedule,
    PiecewiseConstant: lambda init, pairs=(): optax.piecewise_constant_schedule(init, dict(pairs)),
    Join: lambda members, boundaries: optax.join_schedules([theirs(member) for member in members], boundaries),
}
CLASSES = pytest.mark.parametrize("cls", ARGUMENTS, ids=lambda cls: cls.__name__)
FURTHER = {
    "linear": Linear(0.1, 2.0, 40),
    "linear_never": Linear(2.0, 0.1, 0),
    "polynomial_line": Polynomial(0.1, 2.0, 1.0, 40),
    "polynomial_never": Polynomial(2.0, 0.1, 2.0, 0),
    "polynomial_root": Polynomial(1.0, 0.0, 0.5, 40),
    "polynomial_power_0": Polynomial(1.0, 0.5, 0.0, 40),
    "cosine": Cosine(3e-4, 40),
    "exponential": Exponential(0.5, 10, 0.5),
    "exponential_stairs": Exponential(0.5, 7, 0.5, staircase=True),
    "exponential_grows": Exponential(1e-3, 10, 1.5, end_value=1e-2),
    "exponential_ends_in_0": Exponential(0.5, 10, 0.5, end_value=0.0),
    "exponential_no_steps": Exponential(0.5, 0, 0.5, end_value=0.1),
    "exponential_rate_0": Exponential(0.5, 10, 0.0, end_value=0.1),
    "exponential_rate_1": Exponential(0.5, 10, 1.0, end_value=0.4),
    "warmup_cosine": WarmupCosine(0.0, 3e-4, 10, 40),
    "warmup_none": WarmupCosine(1e-5, 0.7, 0, 40, 0.1),
    "peak_of_0": WarmupCosine(0.1, 0.0, 5, 40, 0.1),
    "warmup_exponential": WarmupExponential(0.0, 0.5, 10, 10, 0.5),
    "warmup_exponential_stairs": WarmupExponential(0.0, 0.5, 10, 7, 0.5, 2, True),
    "warmup_exponential_none": WarmupExponential(0.0, 0.5, 0, 7, 0.5),
    "transformer": InverseSquareRoot(0.0, 0.5, 16),
    "t5": InverseSquareRoot(0.25, 0.25, 16),
    "square_root_at_once": InverseSquareRoot(0.0, 0.5, 0),
    "stable": WarmupStableDecay(0.0, 1.0, 10, 10, 40),
    "stable_no_warmup": WarmupStableDecay(0.0, 1.0, 0, 10, 40),
    "stable_no_cooldown": WarmupStableDecay(0.0, 1.0, 10, 0, 40),
    "triangle": WarmupStableDecay(0.0, 1.0, 10, 30, 40),
    "cosine_cycle": CosineOneCycle(40, 1e-3),
    "cosine_cycle_falls": CosineOneCycle(40, 1e-3, pct_start=0.0),
    "cosine_cycle_short": CosineOneCycle(2, 1e-3),
    "linear_cycle": LinearOneCycle(40, 1e-3),
    "linear_cycle_falls": LinearOneCycle(40, 1e-3, pct_start=0.01),
    "linear_cycle_short": LinearOneCycle(2, 1e-3),
    "linear_cycle_90": LinearOneCycle(10, 1.0, 0.7, 0.9),  # float32 has less than 0.7 and 0.9
    "no_boundaries": PiecewiseConstant(0.5),
    "boundary_0": PiecewiseConstant(0.5, ((0, 0.5),)),
    "any_order": PiecewiseConstant(0.5, ((20, 0.5), (10, 0.0), (30, 2.0))),
    "join_one": Join((Linear(1.0, 0.0, 10),), ()),
    "join_empty_member": Join((Constant(1.0), Constant(2.0), Linear(3.0, 0.0, 30)), (10, 10)),
}


def theirs(schedule):
    """The same from optax, or from the paper."""
    return OPTAX[type(schedule)](*(getattr(schedule, name) for name in roles(type(schedule))))


CASES = {cls.__name__: cls(*arguments) for cls, arguments in ARGUMENTS.items()} | FURTHER
EACH = pytest.mark.parametrize("name", CASES)


def value_of(schedule, count):
    return resolve(schedule)(count) + jnp.zeros(())


curve = jax.jit(jax.vmap(value_of, in_axes=(None, 0)))  # another program than for one count, which rounds otherwise


def numbers(value, path=""):
    """Path and value of each int and float that can be traced."""
    if type(value) in (int, float):
        return [(path, value)]
    if type(value) is tuple:
        return [found for index, part in enumerate(value) for found in numbers(part, f"{path}[{index}]")]
    if isinstance(value, Schedule):
        fields = {name: getattr(value, name) for name in roles(type(value))}
        return [found for name, part in fields.items() for found in numbers(part, f"{path}.{name}".lstrip("."))]
    return []
