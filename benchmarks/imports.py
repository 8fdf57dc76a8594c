"""How long a person waits: for `import equikd`, and for the first training step of the digits example.

Each figure is taken in a fresh process, with the bytecode cached and JAX's compilation cache off. `import equikd` is
lazy: on its own it loads next to nothing, not even JAX. So that nothing hides behind this, the import is also timed
together with what it is used with, and with its heaviest everyday name:

`stack`           `import jax, equinox, optax`, the baseline: what an Equinox script imports anyway
`import`          `import equikd` alone
`import_all`      the stack and `import equikd`: what equikd adds at the top of a script
`import_trainer`  `import equikd` and `equikd.Trainer`, which loads the stack and all of training
`import_example`  the digits example, which adds nothing but its config and model

The first step is timed by the clock on the wall from the start of the process (of the interpreter itself, too) to the
moment when the first update has been computed, for `get_config().train(workdir)` as it stands, writers included.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

import equikd as ek
from benchmarks._timing import Quartiles, finish, interleave, quick, ratios, show, times

IMPORTS = {
    "stack": "import jax, equinox, optax",
    "import": "import equikd",
    "import_all": "import jax, equinox, optax, equikd",
    "import_trainer": "import equikd; equikd.Trainer",
    "import_example": "import equikd.examples.digits",
}
FIRST_STEP = "from benchmarks.imports import first_step; first_step()"


@ek.config.config
class FirstStep:
    """A writer that ends the process when the first update has been computed, and prints when that was."""

    def open(self, run: object) -> "FirstStep":
        """Needs nothing."""
        return self

    def tick(self, step: int) -> None:
        """The first step has been dispatched; wait for it."""
        jax.block_until_ready(jax.live_arrays())
        sys.stdout.write(f"{time.time()}\n")
        sys.stdout.flush()
        os._exit(0)  # the rest of the run is of no interest

    def write(self, record: object) -> None:
        """Never called."""

    def flush(self) -> None:
        """Never called."""

    def close(self) -> None:
        """Called where `train` fails before the first step."""


def first_step() -> None:
    """Train the digits example up to its first step; runs in a process of its own."""
    from equikd.examples.digits import get_config

    trainer = get_config()
    trainer = ek.override(trainer, {"writers": (*trainer.writers, FirstStep())})
    with tempfile.TemporaryDirectory() as folder:
        trainer.train(Path(folder) / "run")


def python(code: str) -> str:
    """What a fresh interpreter prints on the standard output.

    Raises:
        subprocess.CalledProcessError: it fails; its standard error has been shown.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def seconds_of_import(code: str) -> float:
    """Seconds that an import takes in a fresh interpreter, without the start of the interpreter."""
    return float(python(f"import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"))


def seconds_to_first_step() -> float:
    """Seconds from the start of a process to the end of its first training step."""
    start = time.time()
    return float(python(FIRST_STEP).splitlines()[-1]) - start


def main() -> None:
    """Take all figures and print them."""
    short = quick(__doc__ or "")
    contestants = {name: lambda code=code: seconds_of_import(code) for name, code in IMPORTS.items()}
    print("imports: seconds, and ratio to the stack in the same round (quartiles)")
    rounds = interleave(contestants, rounds=5 if short else 15)
    show(rounds, "stack", unit="s", per_second=1.0)
    first = Quartiles.of([seconds_to_first_step() for _ in range(3 if short else 9)])
    print(f"first step {first} s")
    finish(
        import_over_stack=ratios(rounds, "import", "stack"),
        import_all_over_stack=ratios(rounds, "import_all", "stack"),
        import_trainer_over_stack=ratios(rounds, "import_trainer", "stack"),
        import_example_over_stack=ratios(rounds, "import_example", "stack"),
        stack_s=times(rounds, "stack"),
        first_step_s=first,
    )


if __name__ == "__main__":
    main()
