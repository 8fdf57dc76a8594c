"""How long a person waits for the first step, and how much of that is equikd.

Every figure is of a fresh process, with the bytecode cached, and JAX's compilation cache off unless the figure is about
it.

*First step*, of the tiny model: by the clock on the wall from the start of the process (of the interpreter itself, too)
to the moment when the first update has been computed.
  `bare`   a script that imports JAX, Equinox and optax, initialises, and makes one bare step (`peers/bare.py`)
  `ours`   `trainer.train(workdir)`, with the console and TensorBoard, loss and accuracy

*Second process*, of the deep model (a transformer of 12 blocks): the same with `Trainer(compilation_cache=DIR)`. The
first process finds the directory empty, the second finds what the first one has left.

*Compile*, of the deep model: from a state that is there to the end of the first step, which is the time of a trace and
a compilation, and of one run.
  `bare`   of the bare step, which returns the loss
  `ours`   of the stepper, with loss and accuracy
"""

import tempfile

import numpy as np

from benchmarks._processes import python, seconds_to_first_step
from benchmarks._timing import Rounds, finish, interleave, quick, ratios, show, times

FIRST_STEP = {
    "bare": "from benchmarks._first_step_by_hand import main; main('tiny')",
    "ours": "from benchmarks._first_step import main; main('tiny')",
}
WITH_CACHE = "from benchmarks._first_step import main; main('deep', compilation_cache={!r})"
COMPILE = {
    "bare": "from benchmarks._first_step_by_hand import main; main('deep', compile_only=True)",
    "ours": "from benchmarks._first_step import compile_step; compile_step('deep')",
}


def race_first_steps(rounds: int) -> Rounds:
    """Seconds from the start of a process to the end of its first step."""
    contestants = {name: lambda code=code: seconds_to_first_step(code) for name, code in FIRST_STEP.items()}
    return interleave(contestants, rounds=rounds)


def race_processes(rounds: int) -> Rounds:
    """The same of two processes, one after the other, that share a directory of compiled programs."""
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            seconds.append([seconds_to_first_step(WITH_CACHE.format(folder)) for _ in range(2)])
    first, second = np.array(seconds).T
    return {"first": first, "second": second}


def race_compiles(rounds: int) -> Rounds:
    """Seconds that a process says it took."""
    contestants = {name: lambda code=code: float(python(code)) for name, code in COMPILE.items()}
    return interleave(contestants, rounds=rounds, warmup=0)


def main() -> None:
    """Take all figures and print them."""
    short = quick(__doc__ or "")
    print("first step: seconds from the start of the process, and ratio to the script by hand (quartiles)", flush=True)
    firsts = race_first_steps(3 if short else 15)
    show(firsts, "bare", unit="s", per_second=1.0)
    print("second process: the same of the deep model, and ratio to the first process", flush=True)
    processes = race_processes(1 if short else 7)
    show(processes, "first", unit="s", per_second=1.0)
    print("compile: seconds, and ratio to the bare step", flush=True)
    compiles = race_compiles(2 if short else 7)
    show(compiles, "bare", unit="s", per_second=1.0)
    finish(
        first_step_s=times(firsts, "ours"),
        first_step_bare_s=times(firsts, "bare"),
        first_step_over_bare=ratios(firsts, "ours", "bare"),
        deep_first_step_s=times(processes, "first"),
        second_process_first_step_over_first=ratios(processes, "second", "first"),
        compile_s=times(compiles, "ours"),
        compile_over_bare=ratios(compiles, "ours", "bare"),
    )


if __name__ == "__main__":
    main()
