"""What checks cost: eager calls against jaxtyping and beartype as they come, a training step, a property test.

Under `jit` the checks run once, while the function is traced; the figures of calls are for eager ones, which pay each
time.

`checked_call`    three flat arrays and a result with shared axes, through `ek.typechecked`
`stock`           the same function through `jaxtyped(typechecker=beartype)`
`plain`           the same function, unchecked
`nested20`        one list of 20 arrays, each of which is checked (stock looks at one of them)
`property`        an example of `ek.testing.arguments(attend)` with its `eval_shape` by `ek.typechecked`: a test of 100
`step`            the tiny model, its loss and metric checked, in a step of `ek.train.Stepper`; and the same
                  with EQUIKD_TYPECHECK=0
"""

import os
import time
from collections.abc import Callable
from unittest import mock

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import jaxtyped

import equikd as ek
from benchmarks._timing import finish, interleave, quick, ratios, show, stopwatch, times
from benchmarks._tiny import CLASSES, FEATURES, WIDTH, load, make_trainer
from equikd.typing import Array, Bool, Float


def attend(
    x: Float[Array, "*b t d"], mask: Bool[Array, "*b t"], w: Float[Array, "d h"], rate: float = 0.0
) -> Float[Array, "*b t d"]:
    """The body is nothing, so that the figure is about its annotations."""
    return x


def listed(xs: list[Float[Array, "a b"]]) -> None:
    """As `attend`, of a container."""


def calls(function: Callable[[], object], repeat: int) -> Callable[[], float]:
    """A contestant: seconds of one call, as the mean of a burst."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        return (time.perf_counter() - start) / repeat

    return run


class Checked(eqx.Module):
    """The tiny model, with annotations that are checked."""

    layers: eqx.nn.MLP

    def __init__(self, *, key: jax.Array) -> None:
        self.layers = eqx.nn.MLP(FEATURES, CLASSES, WIDTH, 2, key=key)

    @ek.typechecked
    def __call__(self, x: Float[Array, " features"]) -> Float[Array, " classes"]:
        """Scores of one image."""
        return self.layers(x)


class Unchecked(eqx.Module):
    """The same without: another class, so that the two do not share a compiled program."""

    layers: eqx.nn.MLP

    def __init__(self, *, key: jax.Array) -> None:
        self.layers = eqx.nn.MLP(FEATURES, CLASSES, WIDTH, 2, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores of one image."""
        return self.layers(x)


def steps(count: int, *, checks: bool) -> Callable[[], None]:
    """`count` steps of the stepper, traced with or without checks."""
    trainer = ek.override(make_trainer(1), {"model": ek.lazy(Checked if checks else Unchecked)()})
    with mock.patch.dict(os.environ, {} if checks else {"EQUIKD_TYPECHECK": "0"}):
        stepper = ek.train.Stepper(trainer, trainer.init())
        batch = ek.data.as_batch(jax.device_put({name: array[:32] for name, array in load().items()}))
        stepper.step(batch)

    def work() -> None:
        for _ in range(count):
            stepper.step(batch)
        jax.block_until_ready(stepper.borrow())

    return work


def property_test(examples: int) -> Callable[[], float]:
    """A contestant: seconds of one example of a property test."""

    @hypothesis.settings(max_examples=examples, database=None, deadline=None)
    @hypothesis.given(ek.testing.arguments(attend))
    def test(call: ek.testing.Arguments) -> None:
        call.eval_shape(ek.typechecked(attend))

    def run() -> float:
        start = time.perf_counter()
        test()
        return (time.perf_counter() - start) / examples

    return run


def main() -> None:
    """Take all figures and print them."""
    short = quick(__doc__ or "")
    x, mask, w = jnp.ones((2, 3, 4)), jnp.ones((2, 3), bool), jnp.ones((4, 10))
    xs = [jnp.ones((2, 3))] * 20
    stock, stock_listed = jaxtyped(typechecker=beartype)(attend), jaxtyped(typechecker=beartype)(listed)
    ours, ours_listed = ek.typechecked(attend), ek.typechecked(listed)
    contestants = {
        "plain": lambda: attend(x, mask, w),
        "stock": lambda: stock(x, mask, w),
        "checked_call": lambda: ours(x, mask, w),
        "stock_nested20": lambda: stock_listed(xs),
        "nested20": lambda: ours_listed(xs),
    }
    rounds = interleave({name: calls(call, 500) for name, call in contestants.items()}, rounds=20 if short else 100)
    print("one eager call: microseconds, and ratio to stock in the same round (quartiles)")
    show(rounds, "stock")
    few = 5 if short else 20
    examples = interleave({"property": property_test(100)}, rounds=few)
    count = 200 if short else 1000
    race = {name: stopwatch(steps(count, checks=on), steps=count) for name, on in (("without", False), ("step", True))}
    stepped = interleave(race, rounds=few)
    print("one step: microseconds, and ratio to the step without checks")
    show(stepped, "without")
    finish(
        checked_call_us_over_stock=ratios(rounds, "checked_call", "stock"),
        checked_call_us=times(rounds, "checked_call").times(1e6),
        nested20_us=times(rounds, "nested20").times(1e6),
        property_example_ms=times(examples, "property").times(1e3),
        step_with_checks_over_without=ratios(stepped, "step", "without"),
    )


if __name__ == "__main__":
    main()
