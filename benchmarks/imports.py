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
moment when the first update has been computed: for `get_config().train(workdir)` as it stands, writers included, and
for the same example written by hand (`_digits_by_hand.py`).
"""

import equikd as ek
from benchmarks._first_step import FirstStep
from benchmarks._processes import python, seconds_to_first_step
from benchmarks._timing import finish, interleave, quick, ratios, show, times

IMPORTS = {
    "stack": "import jax, equinox, optax",
    "import": "import equikd",
    "import_all": "import jax, equinox, optax, equikd",
    "import_trainer": "import equikd; equikd.Trainer",
    "import_example": "import equikd.examples.digits",
}
FIRST_STEP = {
    "by_hand": "from benchmarks._digits_by_hand import main; main()",
    "first_step": "from benchmarks.imports import first_step; first_step()",
}


def first_step() -> None:
    """Train the digits example up to its first step, in a process and a working directory of its own."""
    from equikd.examples.digits import get_config

    trainer = get_config()
    ek.override(trainer, {"writers": (*trainer.writers, FirstStep())}).train("run")


def seconds_of_import(code: str) -> float:
    """Seconds that an import takes in a fresh interpreter, without the start of the interpreter."""
    return float(python(f"import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"))


def main() -> None:
    """Take all figures and print them."""
    short = quick(__doc__ or "")
    imports = {name: lambda code=code: seconds_of_import(code) for name, code in IMPORTS.items()}
    firsts = {name: lambda code=code: seconds_to_first_step(code) for name, code in FIRST_STEP.items()}
    print("imports: seconds, and ratio to the stack in the same round (quartiles)")
    rounds = interleave(imports, rounds=5 if short else 15)
    show(rounds, "stack", unit="s", per_second=1.0)
    print("first step: seconds, and ratio to the script by hand in the same round (quartiles)")
    steps = interleave(firsts, rounds=3 if short else 9)
    show(steps, "by_hand", unit="s", per_second=1.0)
    finish(
        import_over_stack=ratios(rounds, "import", "stack"),
        import_all_over_stack=ratios(rounds, "import_all", "stack"),
        import_trainer_over_stack=ratios(rounds, "import_trainer", "stack"),
        import_example_over_stack=ratios(rounds, "import_example", "stack"),
        stack_s=times(rounds, "stack"),
        first_step_s=times(steps, "first_step"),
        first_step_by_hand_s=times(steps, "by_hand"),
        first_step_over_hand=ratios(steps, "first_step", "by_hand"),
    )


if __name__ == "__main__":
    main()
