"""The trainer: a config class that is the whole description of a run, and the methods that run it.

    trainer = ek.Trainer(model=ek.lazy(eqx.nn.MLP)(64, 10, 128, 2), inputs={"x": "batch.image"}, optimizer=..., ...)
    result = trainer.train("runs/digits")

As data it is overridden, compared, written to JSON and swept like any config. `in_step` is what enters the compiled
step.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx

from equikd.config import config, field, to_json
from equikd.data import Batch, as_batch
from equikd.errors import ConfigError, DataError, listing, message, nearest
from equikd.evals import Eval, eval_context
from equikd.losses import Loss
from equikd.metrics import BaseMetric, Summary
from equikd.train._check import view_of
from equikd.train._checkpoint import CheckpointStore
from equikd.train._directory import RunDirectory, RunDirectoryError, environment_facts
from equikd.train._exhausted import memory_explained
from equikd.train._in_step import InStep, in_step
from equikd.train._init import initial_state
from equikd.train._lock import locked
from equikd.train._loop import Output, Saving, loop, read, run_eval
from equikd.train._progress import Console
from equikd.train._resume import (
    begin,
    changes,
    refuse_other_arrays,
    restored,
    results_again,
    state_at,
    tell,
    tell_unloadable,
)
from equikd.train._setup import Setup, part, pipeline, prepare
from equikd.train._state import TrainState
from equikd.train._stepper import Stepper, run_once
from equikd.train._writers import Record, Run, TensorBoard, Writers


@config
class Checkpoints:
    """When checkpoints are saved, and how many are kept. The end of training is always saved."""

    every: int | None = 1000
    """Steps between two checkpoints; None: only at the end."""
    keep: int = 3
    """How many of the newest are kept."""

    def validate(self) -> None:
        """Refuse intervals and counts below one."""
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")


@config(kw_only=True)
class Trainer:
    """The whole description of a run: model, data, losses, metrics, optimizer, evals, checkpoints and writers.

    Example:
        >>> import equinox as eqx, numpy as np, optax, equikd as ek
        >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
        >>> trainer = ek.Trainer(
        ...     model=ek.lazy(eqx.nn.MLP)(1, 1, 8, 1),
        ...     inputs={"x": "batch.x"},
        ...     losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.y")},
        ...     optimizer=ek.lazy(optax.adam)(1e-2),
        ...     train_data=ek.data.InMemory({"x": x, "y": x**2}, batch_size=16),
        ...     num_steps=20,
        ...     writers=(),
        ... )
        >>> result = trainer.train()
        >>> int(result.state.step), result.predict({"x": x, "y": x}).shape
        (20, (64, 1))
    """

    model: Any = None
    """A node that makes the model, or None where a live one is given to `init` or `train`."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Argument of the model -> key path, such as `{"x": "batch.image"}`."""
    per_example: bool = True
    """The model takes one example, and is mapped over the batch axis; False: it takes whole batches."""
    unmapped: tuple[str, ...] = ()
    """Arguments from the batch that are the same for each example."""
    losses: dict[str, Loss] = field(default_factory=dict)
    """Loss name -> loss; the total is the sum of weight x mean."""
    metrics: dict[str, BaseMetric] = field(default_factory=dict)
    """Metric name -> metric, exact over each logging interval."""
    optimizer: Any
    """A node that makes an optax optimizer."""
    trainable: tuple[str, ...] | str | Callable[[str, Any], bool] | None = None
    """Globs or a predicate (path, leaf) of what is trained; None: every inexact array of the model."""
    step: Callable[..., Any] | None = None
    """A step function of one's own, (config, state, batch) -> (state, aux)."""
    init_extra: Any = None
    """Makes `state.extra` from the model, for a step of one's own."""
    accumulate: int = 1
    """Micro-batches that the rows of a batch are split into, one after the other, for less memory. Losses, gradients
    and metrics are those of the whole batch, and one step is one update; what couples rows is refused. BatchNorm, and
    models with per_example=False, see one micro-batch at a time. A `step` of one's own accumulates in
    `loss_and_gradients`, whose context then has no `preds`."""
    train_data: Any
    """A pipeline such as `ek.data.InMemory`, a function that returns an iterator, or a node that makes either."""
    num_steps: int
    """Optimizer updates to make."""
    evals: dict[str, Eval] = field(default_factory=dict)
    """Eval name -> eval."""
    seed: int = field(dynamic=True, unsigned=True, default=0)
    """Of the model's parameters, the data order and the PRNG keys."""
    log_every: int = 100
    """Steps in a training interval; metrics are exact over each."""
    checkpoints: Checkpoints | None = Checkpoints()
    """When to save, where there is a work directory; None: never."""
    writers: tuple[Any, ...] = (Console(), TensorBoard())
    """Where results go, beside metrics.jsonl."""
    trace: tuple[str, ...] | str = "all"
    """Globs of the floats that are traced at all; the others are part of the program."""
    shared: dict[str, float | Any] = field(default_factory=dict)
    """Free values that other fields refer to by `ek.ref("shared.NAME")`."""

    def validate(self) -> None:
        """Refuse counts below one and splits that are taken."""
        for name in ("num_steps", "log_every", "accumulate"):
            value = part(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if part(self, "num_steps") >= 2**31:
            raise ValueError(f"num_steps must be below 2**31, the step being an int32, got {part(self, 'num_steps')}")
        if "train" in self.evals:
            raise ValueError("an eval cannot be named 'train', which is the split of the training intervals")
        inside = [(one, other) for one in self.evals for other in (*self.evals, "train") if one.startswith(f"{other}/")]
        if inside:
            one, other = inside[0]
            raise ValueError(f"results of the evals {one!r} and {other!r} could have one name; rename one of them")

    @property
    def in_step(self) -> InStep:
        """What enters the step: changing anything else never retraces."""
        if "_in_step" not in self.__dict__:
            self.__dict__["_in_step"] = in_step(self)  # frozen, so once is enough
        return self.__dict__["_in_step"]

    def init(self, *, model: Any = None, model_state: Any = None) -> TrainState:
        """The train state before the first update.

        Args:
            model: a live model to start from, which stays the caller's; of the structure of `self.model` where that is
                given.
            model_state: its `eqx.nn.State`, where the model no longer holds the initial one.

        Raises:
            EquikdError: whatever is wrong with the experiment; all wrong key paths at once.
        """
        prepare(self, model, model_state)
        return initial_state(self.in_step, part(self, "seed"), model, model_state)

    def batches(self, state: TrainState) -> Iterator[Batch]:
        """The training batches from the state's step on."""
        return pipeline(self.train_data, root=self, path="train_data").batches(int(state.step), part(self, "seed"))

    def spec(self) -> Batch:
        """Shapes and dtypes of a training batch."""
        return pipeline(self.train_data, root=self, path="train_data").spec()

    def train(self, workdir: Any = None, *, model: Any = None, model_state: Any = None) -> "Result":
        """Train, from the newest checkpoint of the work directory where it has one.

        On a resume this config wins for what it says, the checkpoint for parameters, optimizer state and step; what has
        changed is printed. A run that is at `num_steps` already is only evaluated again.

        Args:
            workdir: receives config.json, environment.json, metrics.jsonl, TensorBoard events and checkpoints; None:
                nothing is written.
            model: a live model to start from, as in `init`.
            model_state: its `eqx.nn.State`.

        Returns:
            Final state, model and results.

        Raises:
            EquikdError: whatever is wrong with the experiment, before anything is computed or written.
            RunDirectoryError: the work directory holds something else, is broken, or another run is at work there.
            CheckpointError: the newest checkpoint is broken, or of another model or optimizer.
            ConfigError: it lies past `num_steps`; or the config holds other arrays than those that the run began with.
            DataError: the data ends before `num_steps`.
        """
        directory = None if workdir is None else RunDirectory.open(workdir)
        if directory is not None:
            directory.check()
        setup, writers, text = prepare(self, model, model_state), writers_of(self), to_json(self, unloadable=True)
        if directory is None:
            stepper, batches = self._first(setup, model, model_state), first_batches(setup, 0)
            run = Run(None, text, setup.num_steps, start_step=0)
            return self._run(setup, stepper, batches, Writers.open(writers, run), run)
        keep = self.checkpoints.keep if self.checkpoints else 1
        with locked(directory), CheckpointStore(directory.checkpoints, keep) as store:
            directory.check()  # again, now that nobody else writes there
            changed = ""
            if directory.exists:
                refuse_other_arrays(directory.config_text(), text)
                changed = changes(directory.config_text(), self, text)
            found = restored(directory, store, setup, changed)
            stepper = self._first(setup, model, model_state) if found is None else found.stepper
            start, seconds = (0, 0.0) if found is None else (found.step, found.seconds)
            batches = first_batches(setup, start)  # what can fail comes before anything is written
            if directory.exists:
                tell(directory, setup, start, changed)
            else:
                tell_unloadable(directory, self)
            run = Run(directory.path, text, setup.num_steps, start)
            opened = begin(directory, writers, run, environment_facts(setup.seed))
            return self._run(setup, stepper, batches, opened, run, store, seconds)

    def restore(
        self, workdir: Any, step: int | None = None, *, model: Any = None, model_state: Any = None
    ) -> TrainState:
        """The train state of a checkpoint, to evaluate or to look into; the run directory is only read.

        Args:
            workdir: the directory of a run of this trainer; it may be at work.
            step: of which checkpoint; None: the newest.
            model: where `self.model` is None, a live model of the structure of the saved one.
            model_state: its `eqx.nn.State`.

        Raises:
            EquikdError: something is wrong with the experiment.
            RunDirectoryError: there is no run, or it is broken.
            CheckpointError: there is no checkpoint of that step; or it is broken, or of another model or optimizer.
        """
        directory = RunDirectory.open(workdir)
        directory.check()
        if not directory.exists:
            raise RunDirectoryError(message(f"{directory.path} holds no run", fix="train one there first"))
        setup = prepare(self, model, model_state)
        changed = changes(directory.config_text(), self, to_json(self, unloadable=True))
        with CheckpointStore(directory.checkpoints, keep=1) as store:
            return state_at(directory, store, setup, changed, step)

    def evaluate(self, state: TrainState, *names: str) -> dict[str, float]:
        """Results of the evals for a state, such as one of a loop of one's own.

        Args:
            state: a train state of this trainer.
            *names: which evals; all by default.

        Returns:
            `split/name` -> scalar, as in `Result.metrics`.

        Raises:
            EquikdError: there is no eval of that name, or something else is wrong with the experiment.
        """
        unknown = [name for name in names if name not in self.evals]
        if unknown:
            near = [other for name in unknown for other in nearest(name, self.evals, 1)]
            what = f"evaluate: there is no eval {', '.join(map(repr, unknown))}"
            raise ConfigError(message(what, near=near, expected=listing(self.evals) or "none is configured"))
        live = (state.model, state.model_state) if self.model is None else ()
        chosen = [one for one in prepare(self, *live).evals if not names or one.name in names]
        found = {one.name: read(run_eval(one, state)).scalars for one in chosen}
        return {f"{split}/{name}": value for split, results in found.items() for name, value in results.items()}

    def _first(self, setup: Setup, model: Any, model_state: Any) -> Stepper:
        state = initial_state(setup.config, setup.seed, model, model_state)
        return Stepper(setup.config, state, spec=setup.spec)

    def _run(
        self,
        setup: Setup,
        stepper: Stepper,
        batches: Iterator[Batch],
        writers: Writers,
        run: Run,
        store: CheckpointStore | None = None,
        seconds: float = 0.0,
    ) -> "Result":
        with writers as opened:
            output, saving = Output(opened, seconds), None
            if store is not None and self.checkpoints is not None:
                saving = Saving(store, self.checkpoints.every, setup.seed)
            with memory_explained(setup):
                loop(setup, stepper, batches, output, saving, run.start_step)
                if run.start_step == setup.num_steps and run.workdir is not None:
                    results_again(setup, stepper, output, run.workdir)
        return Result(self, stepper.state, output.latest, output.summaries, tuple(output.history))


def writers_of(trainer: Trainer) -> tuple[Any, ...]:
    """The writers that the trainer names.

    Raises:
        ConfigError: something among them is no writer.
    """
    writers = part(trainer, "writers")
    wrong = [f"writers[{i}]: {one!r}"[:100] for i, one in enumerate(writers) if not hasattr(type(one), "open")]
    if wrong:
        what = "a writer is a config with the method open(run), such as ek.train.TensorBoard()"
        raise ConfigError(message(what, got="\n".join(wrong)))
    return writers


def first_batches(setup: Setup, start: int) -> Iterator[Batch]:
    """The training batches from number `start` on.

    Raises:
        DataError: there are none.
    """
    try:
        return setup.data.batches(start, setup.seed)
    except DataError as error:
        raise DataError(f"train_data: {error}") from error


class Result:
    """What training gives.

    Attributes:
        trainer: what was trained, whose hyperparameters `predict` uses.
        state: the final train state.
        metrics: newest value of each result, by `split/name`.
        summaries: newest image, text or histogram of each metric that computes one, by `split/name`.
        history: all rows of this session, in order: step, split, metrics and seconds of each; without summaries, which
            writers alone get at every step.
    """

    def __init__(
        self,
        trainer: Trainer,
        state: TrainState,
        metrics: dict[str, float],
        summaries: dict[str, Summary],
        history: tuple[Record, ...],
    ) -> None:
        self.trainer, self.state, self.metrics, self.history = trainer, state, metrics, history
        self.summaries = summaries

    @property
    def model(self) -> Any:
        """The trained model."""
        return self.state.model

    def predict(self, batch: Any) -> Any:
        """Predictions on a batch, in inference mode.

        Args:
            batch: a `Batch` or a bare pytree, with what the model's inputs need.

        Returns:
            What the model gives, batch axis first.
        """
        return predict(self.trainer, self.state, batch)


@eqx.filter_jit
def _predict(config: InStep, view: Any, batch: Batch) -> Any:
    return eval_context(config, view, batch).preds


def predict(trainer: Trainer, state: TrainState, batch: Any) -> Any:
    """Predictions of a state's model on a batch, in inference mode.

    Args:
        trainer: the trainer, whose hyperparameters are used.
        state: a train state.
        batch: a `Batch` or a bare pytree, with what the model's inputs need.

    Returns:
        What the model gives, batch axis first.
    """
    return _predict(trainer.in_step, view_of(state), as_batch(batch))


def step(trainer: Any, state: TrainState, batch: Any) -> Any:
    """One update, for notebooks and loops of one's own; the state given stays valid.

    Args:
        trainer: a `Trainer`, or its `in_step` (which may hold tracers: under `grad` or `vmap` this is the pure step).
        state: a train state.
        batch: from `trainer.batches(state)`, or any batch of that structure.

    Returns:
        `(state, aux)`: the new state, and the losses and metric states of this batch.
    """
    return run_once(trainer.in_step if isinstance(trainer, Trainer) else trainer, state, batch)


__all__ = ["Checkpoints", "Result", "Trainer", "predict", "step"]
