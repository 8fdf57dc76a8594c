"""The trainer: a config class that is the whole description of a run, and the methods that run it.

    trainer = ek.Trainer(model=ek.lazy(eqx.nn.MLP)(64, 10, 128, 2), inputs={"x": "batch.image"}, optimizer=..., ...)
    result = trainer.train("runs/digits")

As data it is overridden, compared, written to JSON and swept like any config. `in_step` is what enters the compiled
step.
"""

import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from equikd.config import config, field, to_json
from equikd.data import Batch
from equikd.errors import ConfigError, listing, message, nearest
from equikd.evals import Eval
from equikd.intermediates import Options
from equikd.losses import Loss
from equikd.metrics import BaseMetric
from equikd.optim import Freeze, Precision
from equikd.sharding import DataParallel, Fsdp
from equikd.train._checkpoint import CheckpointStore
from equikd.train._compilation_cache import compilation_cache
from equikd.train._compilations import COMPILATION
from equikd.train._directory import RunDirectory, RunDirectoryError
from equikd.train._guard import RollBack, SkipNonFinite, StopOnNonFinite
from equikd.train._in_step import InStep, in_step
from equikd.train._init import initial_state
from equikd.train._init_from import InitFrom, weights_of
from equikd.train._loop import run_eval
from equikd.train._output import Pending, read
from equikd.train._profile import Plan, Profile
from equikd.train._progress import Console
from equikd.train._remat import check_policy
from equikd.train._result import Result
from equikd.train._resume import changes, state_at
from equikd.train._session import Session, ending_of
from equikd.train._settings import Checkpoints, EarlyStop, StopAfter
from equikd.train._setup import Setup, part, pipeline, prepare
from equikd.train._signals import Interrupted, Signals
from equikd.train._state import TrainState
from equikd.train._stepper import run_once
from equikd.train._writers import TensorBoard


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
    """A node that makes an optax optimizer; one of `ek.optim`, such as `ek.optim.Ema(...)`; or a dict of these by
    pattern, `{"encoder.**": ..., "**": ...}`."""
    trainable: tuple[Any, ...] | str | type | Freeze | Callable[[str, Any], bool] | None = None
    """What is trained, for gradients, optimizer state, counts and checkpoints alike: globs, a predicate (path, leaf),
    a class of modules, a tuple of these, or `ek.optim.freeze(...)`; None: every inexact array of the model."""
    step: Callable[..., Any] | None = None
    """A step function of one's own, (config, state, batch) -> (state, aux), or a config that is called as one; made of
    the pieces in `ek.train`, such as `loss_and_gradients`, `gradients`, `apply_updates` and `collect`."""
    init_extra: Any = None
    """`state.extra`, any pytree, for a step of one's own; or a function that makes it from the model."""
    accumulate: int = 1
    """Micro-batches that the rows of a batch are split into, one after the other, for less memory. Losses, gradients
    and metrics are those of the whole batch, and one step is one update; what couples rows is refused. BatchNorm, and
    models with per_example=False, see one micro-batch at a time. A `step` of one's own accumulates in
    `loss_and_gradients`, whose context then has no `preds`."""
    remat: str | Callable[..., Any] | None = None
    """What the backward pass takes from the forward pass, and what it computes again to save memory: the name of a
    policy in `jax.checkpoint_policies`, such as `"dots_saveable"`, or `"nothing_saveable"` for the least memory; or a
    policy itself. None: all that it needs is kept."""
    precision: Precision | None = None
    """Dtypes of the computation, such as `ek.optim.Precision()`; None: whatever parameters and data have."""
    guard: StopOnNonFinite | SkipNonFinite | RollBack | None = StopOnNonFinite()
    """What happens at a loss or gradient that is not finite: the run ends with the state before it, the step is
    skipped, or the run goes back to its last checkpoint. None: nothing, and nan spreads."""
    intermediates: Options | None = None
    """How what `interms.*` names is captured, where there is a choice: `ek.intermediates.Options(while_loops="last")`;
    None: the defaults."""
    mesh: DataParallel | Fsdp | None = None
    """Devices to train on, `ek.sharding.data_parallel()` or `ek.sharding.fsdp()`; None: one."""
    init_from: InitFrom | str | pathlib.Path | None = None
    """Weights to start from: a run, one of its checkpoints, or a saved model; `ek.train.InitFrom` takes a part of them.
    A resume goes on from its own checkpoint."""
    train_data: Any
    """A pipeline such as `ek.data.InMemory`, a function that returns an iterator, or a node that makes either."""
    num_steps: int
    """Optimizer updates to make."""
    stop_after: StopAfter | None = None
    """A limit besides `num_steps`, which schedules read, such as `ek.train.StopAfter(seconds=3600)`."""
    early_stop: EarlyStop | None = None
    """Ends the run when a result improves no more, such as `ek.train.EarlyStop("test/loss", patience=5)`."""
    evals: dict[str, Eval] = field(default_factory=dict)
    """Eval name -> eval."""
    seed: int = field(dynamic=True, unsigned=True, default=0)
    """Of the model's parameters, the data order and the PRNG keys."""
    steps_per_call: int | Literal["auto"] = 1
    """Steps of one dispatch, in which the host does nothing: small models train faster. Logging, evals and checkpoints
    come after the same steps as with 1. "auto" tries a few steps, and takes what is fastest."""
    prefetch: int = 2
    """Batches that a thread draws ahead where they come from the host; 0: none, and the data is read in the thread that
    trains. `InMemory` data that takes at most a quarter of what is free on the device lies there instead."""
    log_every: int = 100
    """Steps in a training interval; metrics are exact over each."""
    checkpoints: Checkpoints | None = Checkpoints()
    """When to save, where there is a work directory; None: never."""
    writers: tuple[Any, ...] = (Console(), TensorBoard())
    """Where results go, beside metrics.jsonl."""
    max_compilations: int | None = None
    """How often `train` may compile the step; one more raises a `CompilationError` that says why. 1: once; 0: only what
    an earlier run in this process has compiled. None: any number; each one after the first is told of."""
    compilation_cache: str | pathlib.Path | None = None
    """A directory in which compiled programs are kept, so that the next process loads what this one compiles; None:
    what the environment variable EQUIKD_COMPILATION_CACHE says."""
    trace: tuple[str, ...] | str = "all"
    """Globs of the floats that are traced at all; the others are part of the program."""
    shared: dict[str, float | Any] = field(default_factory=dict)
    """Free values that other fields refer to by `ek.ref("shared.NAME")`."""

    def validate(self) -> None:
        """Refuse counts below one and splits that are taken."""
        check_policy(self.remat)
        for name in ("num_steps", "log_every", "accumulate"):
            value = part(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        most, per_call = part(self, "max_compilations"), part(self, "steps_per_call")
        if per_call != "auto" and (type(per_call) is not int or per_call < 1):
            raise ValueError(f"steps_per_call must be an int of at least 1, or 'auto', got {per_call!r}")
        for name, value in (("prefetch", part(self, "prefetch")), ("max_compilations", 0 if most is None else most)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be an int of at least 0, got {value!r}")
        if part(self, "num_steps") >= 2**31:
            raise ValueError(f"num_steps must be below 2**31, the step being an int32, got {part(self, 'num_steps')}")
        for taken, use in (("train", "training intervals"), (COMPILATION, "rows that tell of compilations")):
            if taken in self.evals:
                raise ValueError(f"an eval cannot be named {taken!r}, which is the split of the {use}")
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
            CheckpointError: the weights of `init_from` are not there, damaged, or do not fit.
        """
        return self._fresh(prepare(self, model, model_state), model, model_state)

    def batches(self, state: TrainState) -> Iterator[Batch]:
        """The training batches from the state's step on."""
        return pipeline(self.train_data, root=self, path="train_data").batches(int(state.step), part(self, "seed"))

    def spec(self) -> Batch:
        """Shapes and dtypes of a training batch."""
        return pipeline(self.train_data, root=self, path="train_data").spec()

    def train(self, workdir: Any = None, *, model: Any = None, model_state: Any = None) -> Result:
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
            CheckpointError: the newest checkpoint is broken, or of another model or optimizer; or, on a fresh start,
                the weights of `init_from` are not there, damaged, or do not fit.
            ConfigError: it lies past `num_steps`; or the config holds other arrays than those that the run began with.
            DataError: the data ends before `num_steps`.
            NonFiniteError: losses, gradients or parameters are not finite, and the guard goes no further.
            CompilationError: the step would be compiled more often than `max_compilations` says.
            KeyboardInterrupt, SystemExit: SIGINT or SIGTERM has come (in the main thread). The step in progress is
                finished and saved, what else is in progress is broken off; the same call then goes on, to the bit. A
                second SIGINT ends at once.
        """
        directory = None if workdir is None else RunDirectory.open(workdir)
        if directory is not None:
            directory.check()
        started = time.monotonic()
        try:
            with Signals() as signals, compilation_cache(part(self, "compilation_cache")):
                with signals.interruptible:
                    setup, writers = prepare(self, model, model_state), writers_of(self)
                first = lambda: self._fresh(setup, model, model_state)
                result = Session(self, setup, writers, first, signals, ending_of(self, setup, started)).run(directory)
                signals.check()  # one that came when all was done is no less meant
                return result
        except Interrupted as interruption:
            raise interruption.ending() from None

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
        with compilation_cache(part(self, "compilation_cache")):
            chosen = [one for one in prepare(self, *live).evals if not names or one.name in names]
            found = {one.name: read(Pending(0, one.name, run_eval(one, state)))[0].scalars for one in chosen}
        return {f"{split}/{name}": value for split, results in found.items() for name, value in results.items()}

    def profile(
        self, workdir: Any, *, steps: int = 20, warmup: int = 5, model: Any = None, model_state: Any = None
    ) -> Profile:
        """Make some updates, measure them, and write a trace of JAX's profiler; nothing is trained for keeps.

        Of a fresh state, one update that compiles and `warmup` more are not counted. `steps` updates are then timed as
        they run in training, and as many again are traced, which takes time of its own. Evals and checkpoints are left
        out, and so is what is read for logs.

        Args:
            workdir: a new or empty directory, or that of a run, which is left as it is: each trace is a new directory
                in `workdir/profile`, for `tensorboard --logdir` with the plugin of XProf, and its `*.trace.json.gz`
                for https://ui.perfetto.dev.
            steps: updates to time, and to trace.
            warmup: updates before, besides the first.
            model: a live model, as in `init`.
            model_state: its `eqx.nn.State`.

        Returns:
            What was measured, printed as a table.

        Raises:
            EquikdError: whatever is wrong with the experiment, before anything is computed; or a profile is being
                taken already.
            RunDirectoryError: the directory holds something else, or nothing may be written there.
            DataError: the data ends too early; no trace is left.
        """
        plan = Plan.of(workdir, steps, warmup)
        with compilation_cache(part(self, "compilation_cache")):
            setup = prepare(self, model, model_state)
            return plan.run(setup, lambda: self._fresh(setup, model, model_state))

    def _fresh(self, setup: Setup, model: Any, model_state: Any) -> TrainState:
        """The state before the first update; tells what weights it starts from, on the standard error."""
        weights = weights_of(self, setup.state)
        values = None if weights is None else weights.read()
        if values is not None:
            sys.stderr.write(f"init_from: {values.taken}\n")
        return initial_state(setup.config, setup.seed, model, model_state, values)


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
