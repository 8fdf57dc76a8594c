"""The step and the loop of equikd against what one would write by hand for this one model.

The model is tiny (64-128-128-10, batch 32, adam: about 0.1 ms a step), so that what is measured is everything but the
arithmetic: Python, dispatch, feeding, metrics, logging. Two races, each against its own hand-written baseline:

*step*: one batch that lies on the device, again and again.
  `bare`        a donated `jax.jit` on flat leaves, without metrics: the least that a step can cost
  `ours`        `ek.train.Stepper` with loss and accuracy accumulating, read out (`swap`) every 100 steps
  `filter_jit`  the loop of equinox's documentation

*loop*: shuffled batches from numpy arrays, the loss logged as a JSON line every 100 steps.
  `bare`        a permutation and two `take`s a batch, the bare step, `float(loss)` every 100
  `ours`        the whole of `trainer.train(workdir)`, with its checks, writers, loss and accuracy; no checkpoints

Of a loop only the steady state counts: both sides call the same clock after each step, which notes the time in the
middle of each logging interval; a run's figure is its median interval. So each interval holds 100 steps and one line of
log, and neither start-up nor compilation.

Each figure is also taken in seconds of the CPU, over all threads (`cpu`). On a quiet machine with a core to spare,
Python dispatches the next step while the last one is computed, and the time on the wall hides much of what Python
costs; on a busy one the two add up. The CPU figure is the steadier one, and the larger one on a quiet machine.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import equikd as ek
from benchmarks._timing import Quartiles, Rounds, finish, interleave, quick, ratios, show, stopwatch, times
from benchmarks._tiny import (
    BATCH,
    CLASSES,
    FEATURES,
    LOG_EVERY,
    OPENED,
    RATE,
    ROWS,
    WIDTH,
    Clock,
    load,
    make_trainer,
    stepping,
)

DATA = load()


def make_model() -> eqx.nn.MLP:
    """The tiny model."""
    return eqx.nn.MLP(FEATURES, CLASSES, WIDTH, 2, key=jax.random.key(0))


def loss_of(model: Any, images: Any, labels: Any) -> jax.Array:
    """The mean cross entropy."""
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def bare(*, with_loss: bool) -> tuple[list[jax.Array], Callable[..., Any]]:
    """Flat leaves of parameters and optimizer, and the donated step on them, which may return the loss as well."""
    params, static = eqx.partition(make_model(), eqx.is_array)
    optimizer = optax.adam(RATE)
    leaves, structure = jax.tree.flatten((params, optimizer.init(params)))

    def step(leaves: Any, images: Any, labels: Any) -> Any:
        params, opt_state = jax.tree.unflatten(structure, leaves)
        loss, grads = jax.value_and_grad(lambda p: loss_of(eqx.combine(p, static), images, labels))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        leaves = jax.tree.leaves((optax.apply_updates(params, updates), opt_state))
        return (leaves, loss) if with_loss else leaves  # a loss that is not returned is not computed

    return leaves, jax.jit(step, donate_argnums=0)


# --- the step ---


def bare_steps(images: Any, labels: Any, steps: int) -> Callable[[], None]:
    """`steps` steps of the bare jit."""
    leaves, step = bare(with_loss=False)

    def work() -> None:
        nonlocal leaves
        for _ in range(steps):
            leaves = step(leaves, images, labels)
        jax.block_until_ready(leaves)

    return work


def our_steps(images: Any, labels: Any, steps: int) -> Callable[[], None]:
    """`steps` steps of the stepper, its accumulators swapped every `LOG_EVERY`."""
    trainer = make_trainer(1)
    batch = ek.data.as_batch({"image": images, "label": labels})
    return stepping(trainer, batch, steps)


def documented_steps(images: Any, labels: Any, steps: int) -> Callable[[], None]:
    """`steps` steps of the loop in equinox's documentation."""
    model, optimizer = make_model(), optax.adam(RATE)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def make_step(model: Any, opt_state: Any, images: Any, labels: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    def work() -> None:
        nonlocal model, opt_state
        loss = None
        for _ in range(steps):
            model, opt_state, loss = make_step(model, opt_state, images, labels)
        jax.block_until_ready((eqx.filter(model, eqx.is_array), loss))

    return work


def race_steps(rounds: int, steps: int = 2 * LOG_EVERY) -> Rounds:
    """All steps on one batch."""
    images, labels = jnp.asarray(DATA["image"][:BATCH]), jnp.asarray(DATA["label"][:BATCH])
    contestants = {"bare": bare_steps, "ours": our_steps, "filter_jit": documented_steps}
    works = {name: make(images, labels, steps) for name, make in contestants.items()}
    wall = {name: stopwatch(work, steps=steps) for name, work in works.items()}
    cpu = {f"{name} cpu": stopwatch(work, steps=steps, clock=time.process_time) for name, work in works.items()}
    return interleave(wall | cpu, rounds=rounds)


# --- the loop ---


def shuffled() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Training batches without end, as one would write them."""
    images, labels = DATA["image"], DATA["label"]
    for epoch in itertools.count():
        order = np.random.default_rng((0, epoch)).permutation(ROWS)
        for start in range(0, ROWS - BATCH + 1, BATCH):
            picks = order[start : start + BATCH]
            yield images.take(picks, 0), labels.take(picks, 0)


def bare_loop(num_steps: int) -> Callable[[], tuple[float, float]]:
    """A loop by hand around the bare step; gives the seconds of a step, wall and CPU."""
    initial, step = bare(with_loss=True)

    def work() -> tuple[float, float]:
        clock, leaves, batches = Clock(), jax.tree.map(jnp.copy, initial), shuffled()
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "metrics.jsonl").open("a") as log:
            for number in range(1, num_steps + 1):
                leaves, loss = step(leaves, *next(batches))
                clock.tick(number)
                if number % LOG_EVERY == 0:
                    row = {"step": number, "loss": float(loss), "seconds": time.monotonic() - started}
                    log.write(json.dumps(row) + "\n")
                    log.flush()
        return clock.seconds_per_step()

    return work


def our_loop(num_steps: int) -> Callable[[], tuple[float, float]]:
    """The whole of `trainer.train`; gives the seconds of a step, wall and CPU."""
    trainer = make_trainer(num_steps)

    def work() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            trainer.train(Path(folder) / "run")
        return OPENED.pop().seconds_per_step()

    return work


def race_loops(rounds: int, num_steps: int = 10 * LOG_EVERY) -> Rounds:
    """Both loops."""
    cpu: dict[str, list[float]] = {"bare cpu": [], "ours cpu": []}

    def contestant(name: str, work: Callable[[], tuple[float, float]]) -> Callable[[], float]:
        def run() -> float:
            wall, of_cpu = work()
            cpu[f"{name} cpu"].append(of_cpu)
            return wall

        return run

    loops = {"bare": bare_loop(num_steps), "ours": our_loop(num_steps)}
    wall = interleave({name: contestant(name, work) for name, work in loops.items()}, rounds=rounds)
    return wall | {name: np.array(values[-rounds:]) for name, values in cpu.items()}


def tell(kind: str, rounds: Rounds) -> dict[str, Quartiles]:
    """Print one race, wall and CPU, and give the microseconds of a step."""
    print(f"{kind}: time of a step, and ratio to the bare {kind} of the same round (quartiles)")
    cpu = {name: seconds for name, seconds in rounds.items() if name.endswith(" cpu")}
    wall = {name: seconds for name, seconds in rounds.items() if name not in cpu}
    show(wall, "bare")
    show(cpu, "bare cpu")
    return {f"tiny_{kind}_{name}_us": times(wall, name).times(1e6) for name in wall}


def main() -> None:
    """Run both races and print the figures."""
    short = quick(__doc__ or "")
    steps = race_steps(30 if short else 200)
    microseconds = tell("step", steps)
    loops = race_loops(15 if short else 80)
    microseconds |= tell("loop", loops)
    finish(
        tiny_step_over_bare=ratios(steps, "ours", "bare"),
        tiny_filter_jit_over_bare=ratios(steps, "filter_jit", "bare"),
        tiny_loop_over_bare=ratios(loops, "ours", "bare"),
        tiny_step_over_bare_cpu=ratios(steps, "ours cpu", "bare cpu"),
        tiny_filter_jit_over_bare_cpu=ratios(steps, "filter_jit cpu", "bare cpu"),
        tiny_loop_over_bare_cpu=ratios(loops, "ours cpu", "bare cpu"),
        **microseconds,
    )


if __name__ == "__main__":
    main()
