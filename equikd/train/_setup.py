"""From a trainer to all that its loop needs: data opened, the step checked and its program prepared, evals lined up.

Nothing here computes on the device or writes to disk. A wrong experiment ends here, with one report.
"""

import dataclasses
import warnings
from functools import partial
from typing import Any

import optax

from equikd.config import resolve, validate
from equikd.config._resolve import check_references
from equikd.data import Batch, Pipeline, batch_size, pipeline
from equikd.errors import ConfigError, message
from equikd.evals import Eval, eval_batch
from equikd.metrics import Aux
from equikd.metrics._aux import check_results
from equikd.model._floats import NEEDS_VALUE, explain
from equikd.sharding import check_processes, spread_of, uneven
from equikd.train._cache import Cache, structure_key
from equikd.train._check import abstract, check, check_kinds, eval_view, inherited, view_of
from equikd.train._ending import check_result
from equikd.train._guard import RollBack
from equikd.train._in_step import InStep, in_step
from equikd.train._init import initial_state
from equikd.train._padding import refuse_padding
from equikd.train._program import program_for, step_of
from equikd.train._skipped import refuse_skipped
from equikd.train._state import TrainState
from equikd.tree import join, named_leaves


@dataclasses.dataclass(frozen=True)
class PreparedEval:
    """An eval with its data opened.

    Attributes:
        name: its name, the split of its results.
        config: the part of the trainer that its step uses, with the eval's losses, metrics and transform.
        settings: the eval, its plain fields resolved: when it runs, and on how many batches.
        data: its pipeline.
        empty: empty accumulators, on the host.
    """

    name: str
    config: InStep
    settings: Eval
    data: Pipeline
    empty: Aux


@dataclasses.dataclass(frozen=True)
class Setup:
    """A checked experiment.

    Attributes:
        config: `trainer.in_step`.
        seed: of model, data order and PRNG keys.
        num_steps: updates to make.
        log_every: steps in a training interval.
        steps_per_call: steps of a dispatch; "auto": whatever is fastest.
        prefetch: batches from the host that are drawn ahead.
        max_compilations: of the step; None: any number.
        data: the training pipeline.
        spec: shapes of a training batch.
        state: shapes of the train state.
        evals: in the order of their names.
    """

    config: InStep
    seed: int
    num_steps: int
    log_every: int
    steps_per_call: int | str
    prefetch: int
    max_compilations: int | None
    data: Pipeline
    spec: Batch
    state: TrainState
    evals: tuple[PreparedEval, ...]


def part(trainer: Any, name: str) -> Any:
    """A field of the trainer on the host, its nodes and references resolved."""
    return resolve(getattr(trainer, name), root=trainer, path=name)


def abstract_state(config: InStep, seed: int, model: Any, model_state: Any) -> TrainState:
    """Shapes of the first train state; nothing is computed."""
    return abstract(lambda: initial_state(config, seed, model, model_state))


def prepare(trainer: Any, model: Any = None, model_state: Any = None) -> Setup:
    """Open the data, check step and evals, and prepare the program; compiles nothing.

    Args:
        trainer: the experiment.
        model: a live model, as in `Trainer.init`.
        model_state: its `eqx.nn.State`.

    Raises:
        EquikdError: whatever is wrong with the experiment.
    """
    check_processes()
    validate(trainer)
    check_references(trainer)
    check_kinds(trainer)
    config, seed = trainer.in_step, part(trainer, "seed")
    data = pipeline(trainer.train_data, root=trainer, path="train_data")
    spec = data.spec()
    spread = spread_of(config)
    if spread is not None and batch_size(spec) % spread.devices:
        raise uneven(batch_size(spec), spread.devices, "train_data: ")
    state = abstract_state(config, seed, model, model_state)
    _warn_of_injected(state)
    evals = trainer.evals
    opened = {name: pipeline(e.data, root=trainer, path=join(("evals", name, "data"))) for name, e in evals.items()}
    specs = {name: p.spec() for name, p in opened.items()}
    try:
        program = program_for(config, state, spec)
        made = [_eval(trainer, config, name, evals[name], opened[name], specs[name], state) for name in sorted(evals)]
    except Exception as error:
        # Something is wrong; look at all of it, so that one report names every wrong key path.
        configs = {name: _eval_config(trainer, config, name, state, specs[name]) for name in evals}
        check(config, {name: (evals[name], configs[name], specs[name]) for name in evals}, state, spec)
        if isinstance(error, NEEDS_VALUE):
            explain(error, config, lambda c: abstract(partial(step_of(c), c), state, spec), everywhere=True)
        raise
    refuse_padding(config, "", data, training=True)
    for one in made:
        where, most = join(("evals", one.name)) + ".", one.settings.num_batches
        refuse_padding(one.config, where, one.data, training=False, num_batches=most)
    empties = {one.name: (one.empty, specs[one.name]) for one in made}
    refuse_skipped(trainer, program.empty, spec, empties)
    results = {"train": program.empty} | {one.name: one.empty for one in made}
    check_result(part(trainer, "early_stop"), results, {one.name: one.settings for one in made})
    refuse_rolling_back(trainer)
    names = ("num_steps", "log_every", "steps_per_call", "prefetch", "max_compilations")
    settings = {name: part(trainer, name) for name in names}
    return Setup(config=config, seed=seed, **settings, data=data, spec=spec, state=state, evals=tuple(made))


def refuse_rolling_back(trainer: Any) -> None:
    """Refuse a guard that goes back to checkpoints which there will not be.

    Raises:
        ConfigError: it is a `RollBack`, and there are none.
    """
    if isinstance(part(trainer, "guard"), RollBack) and trainer.checkpoints is None:
        what = "guard: RollBack has nothing to go back to, since checkpoints is None"
        raise ConfigError(message(what, fix="checkpoints=ek.train.Checkpoints(every=1000), or another guard"))


_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def _warn_of_injected(state: TrainState) -> None:
    """Warn of hyperparameters that optax keeps in the optimizer's state, where later edits do not reach them."""
    parts = named_leaves(state, is_leaf=lambda value: isinstance(value, _INJECTED))
    for at in [at for at, value in parts.items() if isinstance(value, _INJECTED)]:
        warnings.warn(
            message(
                f"optimizer: inject_hyperparams keeps values in the optimizer's state ({at}), where edits are ignored",
                fix="leave it out: every float of the config is traced, and may change without a recompile",
            ),
            stacklevel=4,
        )


def _eval_config(trainer: Any, config: InStep, name: str, state: TrainState, spec: Batch) -> InStep:
    """The config of an eval: its own losses and metrics, or those of the trainer that can run in it."""
    one = trainer.evals[name]
    losses, metrics = one.losses, one.metrics
    if losses is None or metrics is None:
        own_losses, own_metrics = inherited(config, state, spec)
        losses = own_losses if losses is None else losses
        metrics = own_metrics if metrics is None else metrics
    return in_step(trainer, losses=losses, metrics=metrics, transform=one.transform, accumulate=1)


_EMPTY: "Cache[Aux]" = Cache(most=128)
_RESOLVED = ("every", "at", "final", "num_batches")  # fields of an eval that are needed as plain values


def _eval(
    trainer: Any, config: InStep, name: str, one: Eval, data: Pipeline, spec: Batch, state: TrainState
) -> PreparedEval:
    own = _eval_config(trainer, config, name, state, spec)

    def checked_empty() -> Aux:
        view = eval_view(own, state)
        empty = abstract(eval_batch, own, view, spec).empty()
        try:
            check_results(empty)
        except Exception as error:
            error.add_note(f"in {join(('evals', name))}")
            raise
        return empty

    empty = _EMPTY.get(structure_key(own, view_of(state, own), spec), checked_empty)
    fields = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name in _RESOLVED}
    settings = dataclasses.replace(one, **resolve(fields, root=trainer, path=join(("evals", name))))
    return PreparedEval(name, own, validate(settings), data, empty)
