"""The step and the loop of equikd against what one would write by hand, and against other libraries.

The tasks are those of `_task.py`, the peers those of `peers/`. The baseline of every race is `bare`: a donated
`jax.jit` on flat leaves, written for this one model.

*step*: one batch that lies on the device, again and again; of the tiny and the deep model.
  `bare`        without loss and metrics: the least that a step can cost
  `ours`        `ek.train.Stepper` with loss and accuracy accumulating, read out (`swap`) every 100 steps
  peers         a step that gives the loss, which nobody reads

*scan*: many steps in one dispatch, over the bare step dispatched each time, on one batch that lies on the device.
  `ours`        `steps_per_call=10` and `100`
  `by_hand`     `jax.lax.scan` around the bare step: what there is to gain

*loop*: shuffled batches from numpy arrays, results logged to JSON lines and TensorBoard every interval; of the tiny
(100 steps) and the wide model (10 steps).
  `bare`        a permutation and two `take`s a batch, the bare step, `float(loss)` every interval
  `ours`        the whole of `trainer.train(workdir)`, with its checks, writers, loss and accuracy; no checkpoints
  peers         the same loop by hand around their step, with PyTorch's `DataLoader`; or their own loop

Of a loop only the steady state counts: all sides call the same clock after each step, which notes the time in the
middle of each logging interval; a run's figure is its median interval. So each interval holds its steps and one line of
log, and neither start-up nor compilation, which `benchmarks.startup` measures.

Each figure is also taken in seconds of the CPU, over all threads (`cpu`). On a quiet machine with a core to spare,
Python dispatches the next step while the last one is computed, and the time on the wall hides much of what Python
costs; on a busy one the two add up. The CPU figure is the steadier one, and the larger one on a quiet machine. The CPU
seconds of the wide model and of PyTorch are those of all cores.
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import equikd as ek
from benchmarks._task import DEEP, TINY, WIDE, Task
from benchmarks._timing import Rounds, finish, interleave, quick, ratios, show, times
from benchmarks._tiny import OPENED, ClockWriter, make_trainer, stepping
from benchmarks.peers import Peer, available, versions
from benchmarks.peers._peer import loop_of, one_batch, steps_of
from benchmarks.peers.bare import PEER as BARE
from benchmarks.peers.bare import WITHOUT_LOSS, start_scanned
from equikd.train._program import Kind
from equikd.train._stepper import Fed

Work = Callable[[], tuple[float, float]]
"""Gives the seconds of a step, wall and CPU."""


def timed(work: Callable[[], Any], steps: int) -> Work:
    """Work that makes so many steps and waits for them."""

    def run() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps

    return run


def race(works: dict[str, Work], rounds: int) -> Rounds:
    """All of them in turns; `NAME cpu` stands beside `NAME`."""
    cpu: dict[str, list[float]] = {f"{name} cpu": [] for name in works}

    def contestant(name: str, work: Work) -> Callable[[], float]:
        def run() -> float:
            wall, of_cpu = work()
            cpu[f"{name} cpu"].append(of_cpu)
            return wall

        return run

    wall = interleave({name: contestant(name, work) for name, work in works.items()}, rounds=rounds)
    return wall | {name: np.array(values[-rounds:]) for name, values in cpu.items()}


# --- the step ---


def our_steps(task: Task, steps: int) -> Callable[[], None]:
    """`steps` steps of the stepper."""
    images, labels = one_batch(BARE, task)
    return stepping(make_trainer(1, task), ek.data.as_batch({"image": images, "label": labels}), steps)


def our_scanned_steps(length: int) -> Callable[[int], Callable[[], None]]:
    """Steps of the tiny model with `steps_per_call=length`, its data on the device; `steps` -> work that makes them."""
    trainer = make_trainer(1)
    stepper, kind = ek.train.Stepper(trainer, trainer.init()), Kind(length, gathered=True)
    data = ek.data.pipeline(trainer.train_data)
    table, order = data.table.on_device(stepper.device), data.order(0)  # pyright: ignore[reportAttributeAccessIssue]
    mask = jax.device_put(np.ones((length, order.size), bool), stepper.device)

    def works(steps: int) -> Callable[[], None]:
        def work() -> None:
            aux = None
            for start in range(0, steps, length):
                picks, _ = order.batches(start, length, length)
                stepper.run(Fed(kind, length, picks, mask, table))
                if (start + length) % TINY.log_every == 0:
                    aux = stepper.swap()
            jax.block_until_ready((aux, stepper.borrow()))

        return work

    return works


def scanned_by_hand(length: int, steps: int) -> Callable[[], None]:
    """The same as one would write it for this one model."""
    batches = itertools.repeat(one_batch(BARE, TINY))
    results = start_scanned(TINY, length)(batches)

    def work() -> None:
        result = None
        for result in itertools.islice(results, steps // length):  # noqa: B007  the last one counts
            pass
        jax.block_until_ready(result)

    return work


def race_steps(task: Task, peers: dict[str, Peer], rounds: int, steps: int) -> Rounds:
    """All steps of a task; those of the tiny one in many steps a dispatch as well."""
    works: dict[str, Callable[[], None] | None] = {"bare": steps_of(WITHOUT_LOSS, task, steps)}
    works["ours"] = our_steps(task, steps)
    works |= {name: steps_of(peer, task, steps) for name, peer in peers.items()}
    for length in (10, 100) if task is TINY else ():
        works[f"scan{length} by_hand"] = scanned_by_hand(length, steps)
        works[f"scan{length} ours"] = our_scanned_steps(length)(steps)
    return race({name: timed(work, steps) for name, work in works.items() if work is not None}, rounds)


# --- the loop ---


def our_loop(task: Task, num_steps: int) -> Work:
    """The whole of `trainer.train`."""
    writers = (ek.train.TensorBoard(), ClockWriter(task.log_every))
    trainer = ek.override(make_trainer(num_steps, task), {"writers": writers})

    def work() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            trainer.train(Path(folder) / "run")
        return OPENED.pop().seconds_per_step()

    return work


def race_loops(task: Task, peers: dict[str, Peer], rounds: int, num_steps: int) -> Rounds:
    """All loops of a task."""
    works = {"bare": loop_of(BARE, task, num_steps), "ours": our_loop(task, num_steps)}
    works |= {name: loop_of(peer, task, num_steps) for name, peer in peers.items()}
    return race(works, rounds)


# --- the figures ---


def figures(task: Task, kind: str, rounds: Rounds) -> dict[str, Any]:
    """Print one race, wall and CPU; give its ratios, and the microseconds of a step."""
    print(f"{task.name} {kind}: time of a step, and ratio to the bare {kind} of the same round (quartiles)")
    cpu = {name: seconds for name, seconds in rounds.items() if name.endswith(" cpu")}
    wall = {name: seconds for name, seconds in rounds.items() if name not in cpu}
    show(wall, "bare")
    show(cpu, "bare cpu")
    found: dict[str, Any] = {}
    for name in wall:
        of_kind, _, who = name.rpartition(" ")
        key = "_".join([task.name, of_kind or kind, *([] if who == "ours" else [who])])
        found[f"{key}_us"] = times(wall, name).times(1e6)
        if who != "bare":
            found[f"{key}_over_bare"] = ratios(wall, name, "bare")
            found[f"{key}_over_bare_cpu"] = ratios(cpu, f"{name} cpu", "bare cpu")
    return found


def main() -> None:
    """Run all races and print the figures."""
    short = quick(__doc__ or "")
    peers = available()
    races = [
        (TINY, "step", partial(race_steps, rounds=30 if short else 200, steps=200)),
        (DEEP, "step", partial(race_steps, rounds=15 if short else 60, steps=20)),
        (TINY, "loop", partial(race_loops, rounds=15 if short else 80, num_steps=1000)),
        (WIDE, "loop", partial(race_loops, rounds=4 if short else 15, num_steps=45)),
    ]
    found: dict[str, Any] = {}
    for task, kind, run in races:
        found |= figures(task, kind, run(task, peers))
    finish(**found, peers=versions(peers))


if __name__ == "__main__":
    main()
