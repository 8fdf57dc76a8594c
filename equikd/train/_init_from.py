"""Starting from weights: arrays of another run, one of its checkpoints, or a saved model, into a new model.

    init_from="runs/a"                                                    # the newest checkpoint, all of it
    init_from=InitFrom("runs/a", exclude="head.**")                       # the head is new
    init_from=InitFrom("runs/a", rename={"**": "base.**"}, partial=True)  # below a wrapper

The model's arrays are taken (also those that are not trained, and PRNG keys), and the values of its `eqx.nn.State`.
Hyperparameters, such as dropout rates, come from the config; optimizer, step and the run's key begin anew. What fits is
known from the documents of the source alone, so all that is wrong is told before anything is computed.
"""

import functools
import pathlib
from typing import Any

from equikd.config import config, field, validate
from equikd.errors import CheckpointError, ConfigError, message, report
from equikd.train._rename import rename_problems
from equikd.train._setup import part
from equikd.train._source import open_source
from equikd.train._state import TrainState
from equikd.train._weights import Places, Weights, match
from equikd.tree import PathError, matches, parse


@config
class InitFrom:
    """Weights to start from.

    Applied by `Trainer.init` and by a fresh start of `Trainer.train`; a resume goes on from its own checkpoint. The
    source is only read, and may be a run at work. No code in it is run: arrays are read by path.

    Paths are those of the model, `layers[0].weight`; a value of its `eqx.nn.State` has the path of its
    `eqx.nn.StateIndex`, `norm.batch_state_index[0]`. Each path must be on both sides, with the same shape and dtype;
    `partial` and `cast` relax that, a shape never changes. A source that holds no state at all leaves the model's own.

    Example:
        >>> InitFrom("runs/a", rename={"old.**": "new.**"}, exclude="head.**").takes("head.weight")
        False
    """

    path: str | pathlib.Path
    """A run directory, one checkpoint of it (`runs/a/checkpoints/200`), or what `ek.save_model` wrote."""
    step: int | None = None
    """Which checkpoint of a run; None: the newest."""
    rename: dict[str, str] = field(default_factory=dict)
    """Paths in the source -> paths of this model, with `*` and `**`: {"old.**": "new.**"}. Others keep theirs."""
    include: tuple[str, ...] | str | None = None
    """Globs of all that is to be taken, in paths of this model; None: everything."""
    exclude: tuple[str, ...] | str = ()
    """Globs of what is not taken, in paths of this model (after `rename`): a head that is new, say."""
    partial: bool = False
    """Paths may be missing, in the source or in this model; what was not taken is told."""
    cast: bool = False
    """Other dtypes are converted: floats to floats, ints to ints, complex to complex, where the values fit."""

    def validate(self) -> None:
        """Refuse an empty path, a negative step, and patterns that are none."""
        problems = [] if str(self.path) else ["path is empty"]
        if self.step is not None and self.step < 0:
            problems.append(f"step must not be negative, got {self.step}")
        for name, globs in self.globs().items():
            for glob in globs:
                try:
                    parse(glob)
                except PathError as error:
                    problems.append(f"{name}: {error}")
        problems += rename_problems(self.rename)
        if problems:
            raise ValueError(report(f"{len(problems)} settings are wrong", problems))

    def globs(self) -> dict[str, tuple[str, ...]]:
        """The patterns of `include` and `exclude`, by name."""
        both = {"include": self.include or (), "exclude": self.exclude}
        return {name: (globs,) if isinstance(globs, str) else globs for name, globs in both.items()}

    def takes(self, path: str) -> bool:
        """Whether a path of this model is one to take."""
        globs = self.globs()
        among = self.include is None or any(matches(glob, path) for glob in globs["include"])
        return among and not any(matches(glob, path) for glob in globs["exclude"])


def weights_of(trainer: Any, state: TrainState) -> Weights | None:
    """The weights that a trainer starts from, matched with its model; None where it names none.

    Args:
        trainer: the trainer.
        state: the shapes of its first train state.

    Raises:
        ConfigError: `init_from` is something else.
        CheckpointError: there are no weights, they are damaged, or do not fit; no array is read.
    """
    wanted = part(trainer, "init_from")
    if wanted is None:
        return None
    settings = InitFrom(wanted) if isinstance(wanted, str | pathlib.Path) else wanted
    if not isinstance(settings, InitFrom):
        what, expected = "init_from: resolves to no weights", "a path, or ek.train.InitFrom(path, ...)"
        raise ConfigError(message(what, got=repr(wanted)[:200], expected=expected))
    validate(settings, "init_from")
    return _weights(settings, Places.of(state))


def _weights(settings: InitFrom, places: Places) -> Weights:
    try:
        source = open_source(settings.path, settings.step)
        taken = match(source, places, settings)
    except CheckpointError as error:
        raise CheckpointError(f"init_from: {error}") from error.__cause__
    return Weights(taken, source, places, functools.partial(_weights, settings, places))
