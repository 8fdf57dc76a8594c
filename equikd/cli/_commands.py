"""The commands: each takes the words after its name, and returns an exit code."""

import sys
from collections.abc import Callable

from equikd.cli._arguments import configured
from equikd.errors import ConfigError, message

TERMINATED = 143  # the exit code of a program that SIGTERM has ended


def _train(words: list[str]) -> int:
    trainer, name, flags = configured(words, "train", {"workdir": (str, _default_workdir)})

    from equikd.train import final_table

    try:
        result = trainer.train(flags.workdir)
        final_table(result.metrics, title=f"{name}, {int(result.state.step)} steps, in {flags.workdir}")
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; {_what_is_left(flags.workdir)}\n")
        return 130
    except SystemExit as ending:
        if ending.code == TERMINATED:
            sys.stderr.write(f"terminated; {_what_is_left(flags.workdir)}\n")
        raise
    return 0


def _default_workdir(module: str) -> str:
    return f"runs/{module.removesuffix('.py').replace('/', '.').rpartition('.')[2]}"


def _what_is_left(workdir: str) -> str:
    from equikd.train import CheckpointStore
    from equikd.train._directory import RunDirectory

    step = CheckpointStore(RunDirectory.open(workdir).checkpoints, keep=1).latest()
    return "there is no checkpoint yet" if step is None else f"the same command goes on from step {step}"


def _eval(words: list[str]) -> int:
    own = {"workdir": (str, _default_workdir), "step": (int | None, None)}
    trainer, name, flags = configured(words, "eval", own)
    if not trainer.evals:
        what, fix = f"{name} has no evals", "evals={...} of its trainer"
        raise ConfigError(message(what, expected="at least one", fix=fix))

    from equikd.train import final_table
    from equikd.train._resume import tell_changed

    state = trainer.restore(flags.workdir, flags.step)
    tell_changed(trainer, flags.workdir)
    results = trainer.evaluate(state)
    final_table(results, title=f"{name}, step {int(state.step)} of {flags.workdir}")
    return 0


def _check(words: list[str]) -> int:
    trainer, _, flags = configured(words, "check", {"memory": (bool, False)})

    from equikd.inspect import check

    sys.stdout.write(f"{check(trainer, memory=flags.memory)}\n")
    return 0


def _paths(words: list[str]) -> int:
    trainer, _, _ = configured(words, "paths")

    from equikd.inspect import check, intermediates

    context = check(trainer).context
    try:
        layers = str(intermediates(trainer))
    except Exception:  # the model itself is checked by now; but a step of one's own may call it in another way
        if trainer.step is None:
            raise
        layers = "Intermediates\n  unknown: the trainer's own step calls the model in its own way"
    sys.stdout.write(f"{context}\n\n{layers}\n")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "eval": _eval,
    "check": _check,
    "paths": _paths,
}
