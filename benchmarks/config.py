"""What configs cost: flattening, a jit call with one, our loop with traced floats, building, resolving, JSON.

The config of the first figures has 20 floats in 6 nodes and configs: the shape of a real experiment. The last figure is
a count: how many programs XLA compiles for 100 random edits of its floats.

    python -m benchmarks.config [--quick]
"""

import random
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import equikd as ek
from benchmarks._experiment import NODES, experiment
from benchmarks._timing import Quartiles, finish, interleave, quick, ratios, show, stopwatch, times


def floats(cfg: Any) -> dict[str, float]:
    """The float leaves of a config by path."""
    leaves = ek.tree.named_leaves(cfg)
    return {path: ek.tree.get(cfg, path) for path, leaf in leaves.items() if leaf.dtype == np.float32}


def per_call(work: Callable[[], Any], calls: int) -> Callable[[], float]:
    """A contestant that repeats a short piece of work."""

    def repeated() -> None:
        for _ in range(calls):
            work()

    return stopwatch(repeated, steps=calls)


def calls(rounds: int) -> tuple[Quartiles, Quartiles]:
    """Microseconds of a cached flatten, and a no-op jit call with the config over one without."""
    cfg = experiment()
    jax.tree.flatten(cfg)
    scalar = jax.device_put(np.float32(1))
    without = jax.jit(lambda x: x)
    with_config = jax.jit(lambda x, cfg: x)
    contestants = {
        "flatten": per_call(lambda: jax.tree.flatten(cfg), 500),
        "jit without": per_call(lambda: without(scalar), 500),
        "jit with config": per_call(lambda: with_config(scalar, cfg), 500),
    }
    measured = interleave(contestants, rounds=rounds, warmup=2)
    show(measured, "jit without")
    return times(measured, "flatten").times(1e6), ratios(measured, "jit with config", "jit without")


def loops(rounds: int) -> Quartiles:
    """Our stepper with 20 traced floats over the same with all of them pinned."""
    random_numbers = np.random.default_rng(0)
    x = random_numbers.normal(size=(1024, 64)).astype(np.float32)
    label = random_numbers.integers(0, 10, 1024).astype(np.int32)
    # Scalars that the schedule multiplies: XLA computes the same on arrays whether or not they are constants to it.
    rate = ek.optim.PiecewiseConstant(1e-3, tuple((1000 * index, 1.0) for index in range(13)))
    trainer = ek.Trainer(
        model=ek.lazy(eqx.nn.MLP)(64, 10, 128, 2),
        inputs={"x": "batch.x"},
        optimizer=ek.lazy(optax.adam)(rate, b1=0.9, b2=0.999, eps=1e-8, eps_root=1e-12),
        losses={"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label")},
        metrics={"accuracy": ek.metrics.Accuracy(preds="preds", labels="batch.label")},
        train_data=ek.data.InMemory({"x": x, "label": label}, batch_size=32),
        num_steps=1000,
    )
    print(f"{len(floats(trainer.in_step))} floats are traced in the loop", flush=True)

    def contestant(trainer: ek.Trainer, steps: int = 200) -> Callable[[], float]:
        state = trainer.init()
        stepper, batch = ek.train.Stepper(trainer, state), next(trainer.batches(state))

        def run() -> float:
            start = time.perf_counter()
            for _ in range(steps):
                stepper.step(batch)
            jax.block_until_ready(stepper.borrow()[0].step)
            return (time.perf_counter() - start) / steps

        return run

    pinned = contestant(ek.override(trainer, {"trace": ()}))
    measured = interleave({"pinned": pinned, "traced": contestant(trainer)}, rounds=rounds, warmup=2)
    show(measured, "pinned")
    return ratios(measured, "traced", "pinned")


def building(rounds: int) -> dict[str, Quartiles]:
    """Microseconds a node of building, resolving and a JSON round trip."""
    cfg = experiment()
    contestants = {
        "build": per_call(experiment, 50),
        "resolve": per_call(lambda: ek.resolve(cfg), 50),
        "json": per_call(lambda: ek.config.from_json(ek.config.to_json(cfg)), 20),
    }
    measured = interleave(contestants, rounds=rounds, warmup=2)
    show(measured, "build")
    return {name: times(measured, name).times(1e6 / NODES) for name in contestants}


def compilations() -> int:
    """How often XLA compiles a function of the config over 100 random edits of its floats."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)

    @jax.jit
    def total(cfg: Any) -> jax.Array:
        return sum((jax.numpy.asarray(leaf, float) for leaf in jax.tree.leaves(cfg)), jax.numpy.zeros(()))

    draw, cfg, seen = random.Random(0), experiment(), set()
    paths = list(floats(cfg))
    for _ in range(100):
        cfg = ek.override(cfg, {draw.choice(paths): draw.random()})
        seen.add(float(total(cfg)))
    if len(seen) < 90:
        raise RuntimeError(f"100 edits gave only {len(seen)} results: the edits did not arrive")
    return sum("total" in name for name in compiled)


def main() -> None:
    """Measure and print."""
    short = quick(__doc__ or "")
    rounds = 15 if short else 60
    print(f"{len(floats(experiment()))} floats, {NODES} nodes and configs", flush=True)
    flatten, jit_call = calls(rounds)
    loop = loops(rounds)
    built = building(rounds)
    finish(
        flatten20_us=flatten,
        jit_call_with_config_over_without=jit_call,
        loop_with_20_floats_over_none=loop,
        build_us_per_node=built["build"],
        resolve_us_per_node=built["resolve"],
        json_roundtrip_us_per_node=built["json"],
        compiles_for_100_random_float_edits=compilations(),
    )


if __name__ == "__main__":
    main()
