"""What intermediates cost: the deep model (a transformer of 12 blocks, about 200 parameter leaves), watched or not.

*step*: `ek.train.Stepper` on one batch, again and again, accumulators read out every 100 steps.
  `none`    the metric is the norm of the predictions
  `one`     it is the norm of `interms.blocks[5]` instead

*trace*: a whole training step with twelve metrics, traced to a jaxpr.
  `none`    norms of the predictions
  `twelve`  norms of `interms.blocks[0]` to `interms.blocks[11]`

*loss*: the value and gradient of a loss alone, traced likewise; what JAX does again after the capture weighs more here.
  `none`    the loss is the mean square of the output
  `twelve`  that of the output and of what all blocks return, by `ek.capture`
  `by hand` the same, of a model that returns what its blocks return

*program*: whether the training step that captures nothing lowers to the text of the step without the code that asks.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp

import equikd as ek
from benchmarks._deep import BATCH, BLOCKS, Transformer, load, make_trainer
from benchmarks._timing import Rounds, finish, interleave, quick, ratios, show, stopwatch, times
from benchmarks._tiny import LOG_EVERY, stepping

PATHS = [f"blocks[{at}]" for at in range(BLOCKS)]


def norms_of(paths: list[str]) -> dict[str, Any]:
    """One metric for each key path."""
    return {f"norm{at}": ek.metrics.Norm(path) for at, path in enumerate(paths)}


def race_steps(rounds: int, steps: int = LOG_EVERY) -> Rounds:
    """Steps with either metric on one batch."""
    batch = ek.data.as_batch({name: jnp.asarray(column[:BATCH]) for name, column in load().items()})
    norms = {"none": norms_of(["preds"]), "one": norms_of(["interms.blocks[5]"])}
    works = {name: stepping(make_trainer(metrics=metrics), batch, steps) for name, metrics in norms.items()}
    return interleave({name: stopwatch(work, steps=steps) for name, work in works.items()}, rounds=rounds)


def tracing_step(metrics: dict[str, Any]) -> Callable[[], Any]:
    """The trace of a training step with these metrics."""
    trainer = make_trainer(metrics=metrics)
    state = trainer.init()
    arrays, static = eqx.partition((trainer.in_step, state, next(trainer.batches(state))), eqx.is_array)

    def work() -> Any:
        def step(arrays: Any) -> Any:
            return eqx.filter(ek.train.default_step(*eqx.combine(arrays, static)), eqx.is_array)

        return jax.make_jaxpr(step)(arrays)

    return work


def race_step_traces(rounds: int) -> Rounds:
    """Traces of a step with either metrics."""
    norms = {"none": norms_of(["preds"] * BLOCKS), "twelve": norms_of([f"interms.{path}" for path in PATHS])}
    return interleave({name: stopwatch(tracing_step(one)) for name, one in norms.items()}, rounds=rounds)


def forward(model: Any, x: jax.Array) -> jax.Array:
    """The model on one example."""
    return model(x)


def by_hand(model: Transformer, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """The model as a person would write it who wants to know what the blocks return."""
    x, found = jax.vmap(model.embedding)(x), []
    for block in model.blocks:
        x = block(x)
        found.append(x)
    return model.head(x.mean(axis=0)), found


FORWARDS: dict[str, Callable[..., Any]] = {
    "none": lambda model, x: (forward(model, x), []),
    "twelve": ek.capture(forward, PATHS),
    "by hand": by_hand,
}


def race_loss_traces(rounds: int) -> Rounds:
    """Traces of value and gradient, each of a function that JAX has not seen."""
    model = Transformer(key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    x = load()["image"][:BATCH]

    def tracing(of_one: Callable[..., Any]) -> Callable[[], Any]:
        def loss(arrays: Any) -> jax.Array:
            found = jax.vmap(lambda x: of_one(eqx.combine(arrays, static), x))(x)
            return sum((jnp.mean(leaf**2) for leaf in jax.tree.leaves(found)), jnp.zeros(()))

        return lambda: jax.make_jaxpr(jax.value_and_grad(loss))(arrays)

    works = {name: tracing(of_one) for name, of_one in FORWARDS.items()}
    return interleave({name: stopwatch(work) for name, work in works.items()}, rounds=rounds)


def programs_are_equal() -> bool:
    """Whether the training step that captures nothing is the one of a trainer that cannot capture at all."""

    def text() -> str:
        trainer = make_trainer(metrics=norms_of(["preds"]))
        state = trainer.init()
        arrays, static = eqx.partition((trainer.in_step, state, next(trainer.batches(state))), eqx.is_array)

        def step(arrays: Any) -> Any:
            return eqx.filter(ek.train.default_step(*eqx.combine(arrays, static)), eqx.is_array)

        return jax.jit(step).lower(arrays).as_text()

    with mock.patch("equikd.model._call.asked_for", return_value=()):
        without = text()
    with mock.patch("equikd.model._interms.run_tapped", side_effect=AssertionError("captured")):
        return text() == without


def main() -> None:
    """Run the races, compare the programs and print the figures."""
    short = quick(__doc__ or "")
    print("step: time of a step, and ratio to the one that captures nothing (quartiles)", flush=True)
    steps = race_steps(15 if short else 60)
    show(steps, "none")
    print("trace: time of a trace of a step, and ratio to the one that captures nothing (quartiles)", flush=True)
    traces = race_step_traces(8 if short else 30)
    show(traces, "none", unit="ms", per_second=1e3)
    print("loss: the same of a loss and its gradient", flush=True)
    losses = race_loss_traces(8 if short else 30)
    show(losses, "none", unit="ms", per_second=1e3)
    finish(
        step_with_one_capture_over_none=ratios(steps, "one", "none"),
        trace_with_12_over_none=ratios(traces, "twelve", "none"),
        hlo_equal_without_request=programs_are_equal(),
        loss_trace_with_12_over_none=ratios(losses, "twelve", "none"),
        loss_trace_by_hand_over_none=ratios(losses, "by hand", "none"),
        step_us=times(steps, "none").times(1e6),
        trace_ms=times(traces, "none").times(1e3),
    )


if __name__ == "__main__":
    main()
