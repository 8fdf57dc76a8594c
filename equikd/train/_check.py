"""The check before anything is computed: all key paths and shapes of step and evals, by `eval_shape`.

Nothing is placed, compiled or written to disk before it passes. Wrong key paths of the whole experiment are one report:
each line has the config path that holds it, near matches, and what is available at that point of the step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax

from equikd.config import resolve
from equikd.data import Batch
from equikd.errors import ConfigError, WiringError, message, report
from equikd.evals import View, eval_context
from equikd.losses import Loss
from equikd.metrics import Metric
from equikd.model._call import inputs_of
from equikd.train._state import TrainState
from equikd.train._step import forward
from equikd.wiring import Context, Unwired, fill, key_paths

_RESERVED = ("loss", "losses", "weighted")


def check(config: Any, evals: Mapping[str, tuple[Any, Batch]], state: TrainState, spec: Batch) -> None:
    """Check step and evals.

    Args:
        config: `trainer.in_step`.
        evals: eval name -> (config with the eval's losses and metrics, batch shapes).
        state: the first train state, or its shapes.
        spec: shapes of a training batch.

    Raises:
        WiringError: every key path that leads nowhere, in training and evals; or a model that cannot be called.
        ConfigError: losses or metrics that are none, or reserved names.
    """
    errors: list[str] = []

    def trace(config: Any, state: TrainState, spec: Batch) -> None:
        _check_kinds(config, "")
        if config.step is None:
            context = _checked_forward(lambda: forward(config, state, spec), config, spec, state, errors, "")
            errors.extend(_errors(config, context, ""))

    eqx.filter_eval_shape(trace, config, state, spec)
    for name, (eval_config, eval_spec) in evals.items():
        _check_eval(eval_config, state, eval_spec, f"evals.{name}.", errors)
    if errors:
        unique = list(dict.fromkeys(errors))
        raise WiringError(report(f"{len(unique)} key paths lead nowhere", unique))


def _check_kinds(config: Any, where: str) -> None:
    """Losses are losses, metrics are metrics, and no metric takes a name that the losses' results have."""
    errors = []
    for part, kind in (("losses", Loss), ("metrics", Metric)):
        for name, owner in resolve(getattr(config, part), root=config, path=part).items():
            if not isinstance(owner, kind):
                got = f"{type(owner).__name__}"
                errors.append(message(f"{where}{part}.{name}: wrong kind of object", got=got, expected=kind.__name__))
    errors += [
        message(f"{where}metrics.{name}: the name is taken by the losses' results", fix="rename the metric")
        for name in config.metrics
        if name.partition("/")[0] in _RESERVED
    ]
    if errors:
        raise ConfigError(report(f"{len(errors)} losses or metrics are wrong", errors))


def _checked_forward(
    run: Callable[[], Context], config: Any, spec: Batch, state: Any, errors: list[str], where: str
) -> Context:
    """The context after the forward pass; where its inputs are wrong, without predictions."""
    context = Context(step=state.step, batch=spec.data, mask=spec.mask, model=state.model, extra=state.extra)
    try:
        inputs_of(state.model, config.inputs, context)
    except WiringError as error:
        errors.append(str(error))
        return context
    try:
        return run()
    except (TypeError, ValueError) as error:
        if isinstance(error, WiringError | ConfigError):
            raise
        raise WiringError(_call_message(error, config, context, where)) from error


def _call_message(error: Exception, config: Any, context: Context, where: str) -> str:
    values = inputs_of(context.model, config.inputs, context)
    got = "\n".join(
        f"inputs.{name} = {config.inputs.get(name, '')!r}: "
        + ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(value))
        for name, value in values.items()
    )
    kind = "one example at a time (the batch axis is mapped)" if config.per_example else "whole batches"
    return message(
        f"{where}model: {type(context.model).__name__} cannot be called on this batch",
        got=got,
        expected=f"what its call takes, {kind}",
        where=str(error).strip().splitlines()[0][:300],
        fix="compare the shapes above with the model's first layer, and `per_example` and `unmapped` of the trainer",
    )


def _errors(config: Any, context: Context, where: str, inference: bool = False) -> list[str]:
    """Messages for all key paths of losses and metrics that lead nowhere."""
    losses = resolve(config.losses, root=config, path="losses")
    metrics = resolve(config.metrics, root=config, path="metrics")
    found = [line for name, loss in losses.items() for line in unwired(loss, context, f"{where}losses.{name}")]
    context = context.replace(losses=dict.fromkeys(losses, 0))
    if not inference:
        context = context.replace(grads=context.params, updates=context.params, opt_state={})
    return found + [line for name, m in metrics.items() for line in unwired(m, context, f"{where}metrics.{name}")]


def unwired(owner: Any, context: Context, where: str) -> list[str]:
    """Messages for the key paths of a loss or metric that lead nowhere; those below missing predictions are left out."""
    method = type(owner).values if isinstance(owner, Loss) else type(owner).from_values
    try:
        fill(owner, method, context)
    except Unwired as error:
        unknown = "preds" if "preds" not in context.tree_items() else None
        kept = [(n, t) for n, t in error.errors if key_paths(owner).get(n, "").partition(".")[0] != unknown]
        return Unwired(owner, kept, error.unfilled).lines(where) if kept or error.unfilled else []
    return []


def _check_eval(config: Any, state: Any, spec: Batch, where: str, errors: list[str]) -> None:
    view = view_of(state)

    def trace(config: Any, view: View, spec: Batch) -> None:
        _check_kinds(config, where)
        context = _checked_forward(lambda: eval_context(config, view, spec), config, spec, state, errors, where)
        errors.extend(_errors(config, context, where, inference=True))

    eqx.filter_eval_shape(trace, config, view, spec)


def view_of(state: TrainState) -> View:
    """What an eval sees of a train state."""
    return View(state.step, state.model, state.model_state, state.extra, state.hyperparameter)


def inherited(config: Any, state: TrainState, spec: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the trainer's losses and metrics whose key paths exist in an eval on batches of these shapes."""
    names: dict[str, list[str]] = {"losses": [], "metrics": []}

    def trace(config: Any, view: View, spec: Batch) -> None:
        context = Context(step=view.step, batch=spec.data, mask=spec.mask, model=view.model, extra=view.extra)
        try:
            context = eval_context(config, view, spec)
        except (TypeError, ValueError):
            pass  # the check of the eval tells what is wrong with its inputs
        losses = resolve(config.losses, root=config, path="losses")
        names["losses"] += [n for n, loss in losses.items() if not unwired(loss, context, n)]
        context = context.replace(losses=dict.fromkeys(names["losses"], 0))
        metrics = resolve(config.metrics, root=config, path="metrics")
        names["metrics"] += [n for n, metric in metrics.items() if not unwired(metric, context, n)]

    eqx.filter_eval_shape(trace, config, view_of(state), spec)
    return ({n: config.losses[n] for n in names["losses"]}, {n: config.metrics[n] for n in names["metrics"]})


__all__ = ["check", "inherited", "view_of"]
