"""Evals: the model, its losses and its metrics over a whole dataset, exact over all rows whatever the batch size.

    evals={"test": ek.evals.Eval(data=ek.data.InMemory(test, batch_size=256), every=200)}

An eval runs every `every` steps, at the steps `at` (0 is before the first update) and at the end. The data comes in
order, its last batch padded and masked, so that one compiled program serves all batches; states are merged on the
device and read once, but for those that keep all rows (`concat_field`), which are gathered on the host.

An eval inherits the trainer's losses and metrics, without those that read what only a training step computes
(gradients, updates, ...). One that reads data which the eval lacks is an error, unless it is a `SkipIfMissing`.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd.config import config, resolve
from equikd.data import Batch, batch_size, pad
from equikd.errors import ConfigError, EquikdError, listing, message
from equikd.losses import Loss
from equikd.metrics import Aux, BaseMetric, EvalWeights
from equikd.model import predictions, with_hyperparameters
from equikd.model._call import name_of
from equikd.sharding import Home, everywhere, filled_rows, home, settle, spread_of
from equikd.wiring import Context, reads_rows


@config
class Eval:
    """One evaluation of the model while it trains; its name is the key under `Trainer.evals`."""

    data: Any
    """A pipeline such as `ek.data.InMemory`, or a node that makes one; read in order, each row once."""
    every: int | None = None
    """Steps between two evaluations; None: no interval."""
    at: tuple[int, ...] = ()
    """Further steps at which it runs; 0 is before the first update."""
    final: bool = True
    """Whether it runs at the end of training; False, with neither `every` nor `at`: only when it is asked for."""
    num_batches: int | None = None
    """How many batches are read, the first ones; None: all."""
    transform: Any = None
    """Makes the model that is evaluated: a function of the model, or a node that makes one; the names `step`, `extra`,
    `model_state` and `opt_state` among its further arguments are filled from the train state, so
    `ek.optim.averaged` evaluates the average of the parameters. None: the model as it is."""
    metrics: dict[str, BaseMetric] | None = None
    """Metric name -> metric; None: those of the trainer, without those of gradients, updates and the like."""
    losses: dict[str, Loss] | None = None
    """Loss name -> loss; None: those of the trainer, likewise."""

    def validate(self) -> None:
        """Refuse intervals and numbers of batches below one, and steps below zero."""
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if self.num_batches is not None and self.num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, got {self.num_batches}")
        if any(step < 0 for step in self.at):
            raise ValueError(f"at must hold steps of at least 0, got {self.at}")

    def due(self, step: int, last: bool) -> bool:
        """Whether to run after `step` updates, `last` being the end of training."""
        interval = self.every is not None and step > 0 and step % self.every == 0
        return interval or step in self.at or (last and self.final)


def eval_context(config: Any, view: "View", batch: Batch) -> Context:
    """The context of an eval: everything but what only a training step computes."""
    model = with_hyperparameters(config, view.model, view.hyperparameter)
    context = Context(step=view.step, batch=batch.data, mask=batch.mask, model=model, extra=view.extra, config=config)
    found = predictions(config, model, context, model_state=view.model_state, inference=True)
    return context.replace(preds=found.preds, interms=found.interms)


class View(eqx.Module):
    """What an eval sees of a train state.

    Attributes:
        step: int32 scalar, updates made.
        model: the model.
        model_state: its `eqx.nn.State`, or None.
        extra: the state's `extra`.
        hyperparameter: per leaf of the model, whether it comes from the config.
        opt_state: the optimizer's state, where the eval's transform asks for it.
    """

    step: Any
    model: Any
    model_state: Any
    extra: Any
    hyperparameter: tuple[bool, ...] = eqx.field(static=True)
    opt_state: Any = None


_FILLED = ("step", "extra", "model_state", "opt_state")


def view_of(state: Any, config: Any = None) -> View:
    """What an eval sees of a train state.

    Args:
        state: the train state.
        config: of the eval; None: its transform is not used.

    Raises:
        ConfigError: the transform takes arguments that nothing fills.
    """
    opt_state = None
    if config is not None and config.transform is not None:
        function = resolve(config.transform, root=config, path="transform")
        opt_state = state.opt_state if "opt_state" in _further_arguments(function) else None
    return View(state.step, state.model, state.model_state, state.extra, state.hyperparameter, opt_state)


def transformed(config: Any, view: View) -> View:
    """The view whose model is what the eval's `transform` makes of it.

    Args:
        config: as in `eval_batch`.
        view: what the eval sees of the train state.

    Raises:
        ConfigError: the transform takes arguments that nothing fills.
    """
    function = resolve(config.transform, root=config, path="transform")
    further = _further_arguments(function)
    model = with_hyperparameters(config, view.model, view.hyperparameter)
    try:
        made = function(model, **{name: getattr(view, name) for name in further})
    except EquikdError as error:
        raise type(error)(f"transform: {error}") from error
    if not callable(made):
        got = f"{made.dtype}{list(made.shape)}" if eqx.is_array(made) else f"a {type(made).__qualname__}"
        what = f"transform: what {name_of(function)} returns is no model"
        raise ConfigError(message(what, got=got, expected="what can be called as the model"))
    return View(view.step, made, view.model_state, view.extra, (False,) * len(jax.tree.leaves(made)))


def eval_batch(config: Any, view: View, batch: Batch) -> Aux:
    """Losses and metrics of one batch in inference mode.

    Args:
        config: the part of the trainer that its step uses, with the eval's losses and metrics.
        view: what the eval sees of the train state.
        batch: a batch; masked rows count nowhere.
    """
    context = eval_context(config, view, batch)
    losses = resolve(config.losses, root=config, path="losses")
    states = {name: loss.from_context(context) for name, loss in losses.items()}
    weights = {name: jnp.asarray(loss.weight_at(view.step), jnp.float32) for name, loss in losses.items()}
    metrics = resolve(config.metrics, root=config, path="metrics")
    return Aux(
        losses=states,
        total=EvalWeights(weights) if weights else None,
        metrics={name: metric.from_context(context.replace(losses=states)) for name, metric in metrics.items()},
    )


def _further_arguments(function: Any) -> list[str]:
    """Which arguments of a transform, after the model, are filled from the train state."""
    expected = f"a function of the model, and by name of {listing(_FILLED)}"
    try:
        # Not `arguments_of`, whose cache would keep the tracers that a node's function may hold.
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        got = name_of(function) if callable(function) else f"a {type(function).__qualname__}"
        raise ConfigError(message("transform: its arguments are unknown", got=got, expected=expected)) from None
    further = [p for p in parameters[1:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [p.name for p in further if p.default is p.empty and p.name not in _FILLED]
    if unknown or not parameters:
        what = f"transform: nothing fills the arguments of {name_of(function)}"
        got = listing(p.name for p in parameters) or "no argument"
        raise ConfigError(message(what, got=got, expected=expected))
    return [p.name for p in further if p.name in _FILLED]


def filled(batches: Iterable[Batch], config: Any) -> Iterator[Batch]:
    """The batches, with rows of padding where several devices do not divide them."""
    if config.mesh is None:
        return iter(batches)
    return (pad(batch, filled_rows(config, batch_size(batch))) for batch in batches)


@eqx.filter_jit
def _transform(config: Any, view: View) -> View:
    return transformed(config, view)


@eqx.filter_jit
def _eval_and_merge(config: Any, view: View, so_far: Aux, batch: Batch) -> tuple[Aux, Aux]:
    fixed, growing = eval_batch(config, view, batch).parted()
    merged = so_far.merge(fixed)
    # What reads no rows, such as a sum of weights, is the same for each batch: one of them speaks for all.
    metrics = resolve(config.metrics, root=config, path="metrics")
    same = {name: state for name, state in fixed.metrics.items() if not reads_rows(metrics[name].reads().values())}
    merged = dataclasses.replace(merged, metrics={**merged.metrics, **same})
    return everywhere(merged, spread_of(config)), growing


def evaluate(config: Any, view: View, batches: Iterable[Batch], empty: Aux) -> Aux:
    """Losses and metrics over all rows of some batches of one shape.

    Args:
        config: as in `eval_batch`.
        view: what the eval sees of the train state.
        batches: of equal shapes, the ragged end padded and masked.
        empty: empty accumulators; `empty_state` of the shapes of `eval_batch`.

    Returns:
        The merged states; `results()` gives the values. They are on the device, but for those that keep all rows.
    """
    spread = spread_of(config)
    if spread is not None:
        view = settle(view, spread)
        batches = (spread.batch(batch, batch_size(batch)) for batch in filled(batches, config))
    if config.transform is not None:
        view = _transform(config, view)
    fixed, growing = empty.parted()
    arrays, static = eqx.partition(fixed, eqx.is_array_like)
    aux = eqx.combine(jax.device_put(arrays, (spread or Home(home(view))).whole), static)
    gathered = [growing]
    for batch in batches:
        aux, rows = _eval_and_merge(config, view, aux, batch)
        if spread is not None:
            spread.wait(aux, rows)
        if growing.metrics:  # those of the batch before: this one is still being computed
            gathered[-1] = jax.device_get(gathered[-1])
            gathered.append(rows)
    return aux.joined(jax.device_get(gathered)) if growing.metrics else aux
