"""The factor of the updates: averages see the parameters that are there, wherever they stand in an optimizer."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import ConfigError
from equikd.optim import Ema, Lookahead, ScaleRates, Swa, as_optimizer
from equikd.tree import named_leaves
from tests.train._small import assert_same, leaves, quick

L = ek.lazy
SGD, ADAM = L(optax.sgd)(0.1, momentum=0.5), L(optax.adam)(0.1)
CLIP = L(optax.clip)(0.5)
START = {"a": np.array([1.0, -2.0], np.float32), "b": np.array([3.0], np.float32)}


def by_letter(**optimizers: Any) -> Any:
    """A partition that is written by hand: nothing of this package."""
    return optax.partition(optimizers, {"a": "a", "b": "b"})


@ek.config.config
class OfOnesOwn(ek.optim.Optimizer):
    """A wrapper that knows of no factor."""

    def gradient_transformation(self) -> Any:
        return optax.chain(optax.clip(0.5), as_optimizer(SGD))


def run(optimizer: Any, scale: float | None, steps: int = 5, outside: float = 1.0) -> list[tuple[Any, Any]]:
    """Parameters and state after each step; the gradient of a^2 / 2 is a."""
    optimizer, params, found = as_optimizer(optimizer), jax.tree.map(jnp.asarray, START), []
    state = optimizer.init(params)
    extra = {} if scale is None else {"update_scale": jnp.float32(scale)}

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(params, state, params, **extra)
        return optax.apply_updates(params, jax.tree.map(lambda one: outside * one, updates)), state

    for _ in range(steps):
        params, state = step(params, state)
        found.append((params, state))
    return found


def average(points: list[Any], start: Any, decay: float = 0.5) -> Any:
    mean = start
    for point in points:
        mean = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, mean, point)
    return mean


def close(one: Any, other: Any) -> None:
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6), one, other)


ema = lambda optimizer: Ema(optimizer, decay=0.5)
twice = lambda optimizer: L(optax.MultiSteps)(optimizer, every_k_schedule=2)
chain = L(optax.chain)

# An optimizer with averages in it; the same without; the parameters that are averaged; steps for one update of those.
CASES: dict[str, tuple[Any, Any, str, int]] = {
    "plain": (ema(SGD), SGD, "ab", 1),
    "around a dict": (ema({"a": ADAM, "**": SGD}), {"a": ADAM, "**": SGD}, "ab", 1),
    "in a dict": ({"a": ema(ADAM), "**": SGD}, {"a": ADAM, "**": SGD}, "a", 1),
    "around a chain": (ema(chain(CLIP, SGD)), chain(CLIP, SGD), "ab", 1),
    "last in a chain": (chain(CLIP, ema(SGD)), chain(CLIP, SGD), "ab", 1),
    "known to a chain": (chain(CLIP, L(as_optimizer)(ema(SGD))), chain(CLIP, SGD), "ab", 1),
    "in a dict in a chain": (
        chain(CLIP, ScaleRates(ek.optim.Groups((("a", ema(SGD)), ("**", ADAM))), {"b": 0.5})),
        chain(CLIP, ScaleRates(ek.optim.Groups((("a", SGD), ("**", ADAM))), {"b": 0.5})),
        "a",
        1,
    ),
    "rates within": (ema(ScaleRates(SGD, {"a": 0.5})), ScaleRates(SGD, {"a": 0.5}), "ab", 1),
    "in a partition by hand": (L(by_letter)(a=ema(SGD), b=ADAM), L(by_letter)(a=SGD, b=ADAM), "a", 1),
    "around steps": (ema(twice(SGD)), twice(SGD), "ab", 1),
    "inside of steps": (twice(ema(SGD)), twice(SGD), "ab", 2),
    "around one's own": (ema(OfOnesOwn()), OfOnesOwn(), "ab", 1),
    "around lookahead": (ema(Lookahead(SGD, every=2)), Lookahead(SGD, every=2), "ab", 1),
    "around lookahead in a chain": (
        ema(chain(CLIP, Lookahead(SGD, every=2))),
        chain(CLIP, Lookahead(SGD, every=2)),
        "ab",
        1,
    ),
    "if finite": (L(optax.apply_if_finite)(ema(SGD), 3), SGD, "ab", 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [0.25, pytest.param(None, marks=pytest.mark.slow)])
def test_an_average_is_that_of_the_points_that_are_visited(name: str, scale: float | None) -> None:
    optimizer, without, averaged, every = CASES[name]
    found = run(optimizer, scale)
    for (params, _), (expected, _) in zip(found, run(without, scale), strict=True):
        close(params, expected)
    for number in range(every, len(found) + 1, every):
        params, state = found[number - 1]
        own = {path: params[path] for path in averaged}
        points = [{path: point[path] for path in averaged} for point, _ in found[every - 1 : number : every]]
        means = ek.optim.averaged(params, state)
        close({path: means[path] for path in averaged}, average(points, {path: START[path] for path in own}))
        assert all((means[path] == params[path]).all() for path in START if path not in averaged)


@pytest.mark.parametrize(
    "optimizer", [SGD, {"a": ADAM, "**": SGD}, ScaleRates(SGD, {"a": 0.5}), twice(SGD), OfOnesOwn()]
)
def test_what_looks_at_no_points_is_scaled_as_from_outside(optimizer: Any) -> None:
    for (ours, _), (theirs, _) in zip(run(optimizer, 0.25), run(optimizer, None, outside=0.25), strict=True):
        close(ours, theirs)


def test_the_plain_mean_is_that_of_the_points_that_are_visited() -> None:
    found = run(Swa(SGD, start=2, every=2), 0.25)
    params, state = found[-1]
    close(
        ek.optim.averaged(params, state), jax.tree.map(lambda one, other: (one + other) / 2, found[1][0], found[3][0])
    )


@pytest.mark.parametrize("place", ["alone", "in a chain", "in a dict", "in steps"])
def test_lookahead_goes_back_to_points_that_were_visited(place: str) -> None:
    """Algorithm 1 by hand, with fast steps of 0.25 x 0.1 x gradient."""
    lookahead, every = Lookahead(L(optax.sgd)(0.1), slow_rate=0.5, every=2), 2 if place == "in steps" else 1
    around = {"in a chain": chain(L(optax.identity)(), lookahead), "in a dict": {"*": lookahead}}
    found = run((around | {"in steps": twice(lookahead)}).get(place, lookahead), 0.25, steps=6)
    fast, slow, gradients = dict(START), dict(START), []
    for number, (params, _) in enumerate(found, 1):
        gradients.append(fast)
        if number % every == 0:
            mean = jax.tree.map(lambda *all_of_them: np.mean(all_of_them, 0), *gradients[-every:])
            fast = jax.tree.map(lambda at, grad: at - 0.025 * grad, fast, mean)
            if number // every % 2 == 0:
                fast = slow = jax.tree.map(lambda old, new: old + 0.5 * (new - old), slow, fast)
        close(params, fast)


def test_two_side_by_side_are_refused(snapshot: Any) -> None:
    beside = chain(Lookahead(SGD), ema(L(optax.identity)()))
    run(beside, None, steps=1)
    with pytest.raises(ConfigError) as error:
        run(beside, 0.5, steps=1)
    snapshot("side_by_side", str(error.value))
    with pytest.raises(ConfigError, match="side by side"):  # before anything is computed
        quick(optimizer=beside, guard=ek.train.RollBack()).init()
    run(ema(Lookahead(SGD)), 0.5, steps=1)
    run({"a": Lookahead(SGD), "**": ema(SGD)}, 0.5, steps=1)
    run(L(by_letter)(a=Lookahead(SGD), b=ema(SGD)), 0.5, steps=1)


def test_without_a_factor_nothing_is_there() -> None:
    def text(update: Any, state: Any) -> str:
        return jax.jit(update).lower(START, state, START).as_text().partition("{")[2]  # after its name

    plain = optax.chain(optax.clip(0.5), optax.adam(0.1))
    optimizer = as_optimizer(plain)
    assert text(optimizer.update, plain.init(START)) == text(plain.update, plain.init(START))
    nested = as_optimizer(ema({"a": ADAM, "**": Lookahead(SGD)}))
    state = nested.init(START)
    unscaled = text(lambda *args: nested.update(*args, update_scale=None), state)
    assert unscaled == text(nested.update, state)
    assert unscaled != text(lambda *args: nested.update(*args, update_scale=jnp.float32(1)), state)


def test_the_factor_keeps_dtypes_and_the_state_keeps_its_structure() -> None:
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.complex64)}
    optimizer = as_optimizer(ema(SGD))
    state = optimizer.init(params)
    updates, new = optimizer.update(params, state, params, update_scale=jnp.float32(0.5))
    assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, params)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, new)
    assert named_leaves(state).keys() == named_leaves(new).keys()


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(ema(ADAM), id="alone"),
        pytest.param(chain(CLIP, ema(ADAM)), id="in a chain", marks=pytest.mark.slow),
    ],
)
def test_the_trainer_hands_the_factor_of_its_guard_inward(optimizer: Any) -> None:
    trainer = quick(optimizer=optimizer, guard=ek.train.RollBack())
    state = trainer.init()
    whole, state = (eqx.tree_at(lambda one: one.guard.scale, state, jnp.float32(scale)) for scale in (1.0, 0.25))
    mean = leaves(state.params())
    for number, batch in zip(range(4), trainer.batches(state), strict=False):
        before, (state, _) = state, ek.train.step(trainer, state, batch)
        mean = [0.5 * old + 0.5 * new for old, new in zip(mean, leaves(state.params()), strict=True)]
        if number == 0:  # a step of a quarter of the length
            whole, _ = ek.train.step(trainer, whole, batch)
            for at, new, full in zip(*map(leaves, (before.params(), state.params(), whole.params())), strict=True):
                np.testing.assert_allclose(new - at, 0.25 * (full - at), rtol=1e-3, atol=1e-6)
    model = ek.optim.averaged(state.model, state.opt_state)
    for ours, theirs in zip(leaves(model), mean, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_same(model, ek.optim.averaged(model, state.opt_state, cast=False))
