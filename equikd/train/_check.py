"""The check before anything is computed: all key paths and shapes of step and evals, by `eval_shape`.

Nothing is placed, compiled or written to disk before it passes. What is connected wrongly anywhere in the experiment is
one report: each line has the config path that holds it, near matches, and what is available at that point of the step.
What cannot be known yet because of an earlier error (the shapes below `preds` where the model cannot be called) is left
out. When all is well the traces of the step itself have seen it, and `check` is not needed.
"""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import TypeCheckError

from equikd.config import resolve
from equikd.config._dataclass import fields_of, raw
from equikd.data import Batch
from equikd.errors import ConfigError, EquikdError, WiringError, message, report
from equikd.evals import Eval, View, eval_context, transformed, view_of
from equikd.losses import Loss, LossState
from equikd.metrics import BaseMetric, TwoFloat
from equikd.model._call import InputsError, inputs_of, name_of, parameters_of
from equikd.model._floats import NEEDS_VALUE, line_of
from equikd.model._interms import (
    Intermediates,
    gradients_asked_for,
    has_field_interms,
)
from equikd.train._cache import Cache, structure_key
from equikd.train._state import TrainState, split
from equikd.train._step import forward
from equikd.train._uncoupled import refusals
from equikd.tree import join, parse
from equikd.typing import ShapeError
from equikd.wiring import UNSET, Context, Unwired, key_paths, root_of, standing_at

_RESERVED = ("loss", "losses", "weighted", "skipped_steps")
_SHAPE_ERRORS = (TypeError, ValueError, NameError)  # what JAX, Equinox and jaxtyping raise for what does not fit


def abstract(function: Callable[..., Any], *args: Any) -> Any:
    """`eqx.filter_eval_shape`, whose errors of ours come out without JAX's remark on tracebacks."""
    try:
        return eqx.filter_eval_shape(function, *args)
    except EquikdError as error:
        error.__notes__ = [note for note in getattr(error, "__notes__", ()) if "JAX has removed" not in note]
        raise


def check_kinds(trainer: Any) -> None:
    """Losses are losses, metrics are metrics, and no metric takes a name that the losses' results have.

    Raises:
        ConfigError: some are not, in the trainer or its evals; all at once.
    """
    errors = []
    if not trainer.losses and trainer.step is None:
        what, fix = "losses: there is none, so nothing would be trained", 'losses={"mse": ek.losses.SquaredError(...)}'
        errors.append(message(what, expected="at least one loss, or a `step` of your own", fix=fix))
    parts: dict[tuple[str, ...], Any] = {(): (trainer.losses, trainer.metrics)}
    parts |= {("evals", name): (one.losses or {}, one.metrics or {}) for name, one in trainer.evals.items()}
    for where, (losses, metrics) in parts.items():
        for part, owners, kind, word, example in (
            ("losses", losses, Loss, "loss", "ek.losses.SquaredError(preds=..., targets=...)"),
            ("metrics", metrics, BaseMetric, "metric", "ek.metrics.Accuracy(preds=..., labels=...)"),
        ):
            made = resolve(owners, root=trainer, path=join((*where, part)))
            errors += [
                message(
                    f"{join((*where, part, name))}: what it resolves to is no {word}",
                    got=name_of(owner) if callable(owner) else f"a {type(owner).__name__}",
                    expected=f"a config whose class derives from ek.{part}.{word.capitalize()}, such as {example}",
                )
                for name, owner in made.items()
                if not isinstance(owner, kind)
            ]
        errors += [
            message(
                f"{join((*where, 'metrics', name))}: the name is taken by what the trainer itself reports",
                expected=f"a name that does not begin with one of {', '.join(_RESERVED)}",
                fix="rename the metric",
            )
            for name in metrics
            if name.partition("/")[0] in _RESERVED
        ]
    if errors:
        raise ConfigError(report(f"{len(errors)} losses or metrics are wrong", errors))


def check(config: Any, evals: Mapping[str, tuple[Eval, Any, Batch]], state: TrainState, spec: Batch) -> None:
    """Check step and evals.

    Args:
        config: `trainer.in_step`.
        evals: eval name -> (the eval, config with its losses and metrics, batch shapes).
        state: the shapes of the first train state.
        spec: shapes of a training batch.

    Raises:
        WiringError: every key path that leads nowhere and every shape that does not fit, in training and evals.
        Exception: the model raises something else; with a note of what it was called on.
    """
    errors: list[str] = []

    def train(config: Any, state: TrainState, spec: Batch) -> None:
        if config.step is not None:
            return  # a step of one's own may use what it likes
        context = _predicted(lambda config: forward(config, state, spec), config, spec, state, errors)
        errors.extend(refusals(config, context, rows=spec.mask.shape[0]))
        params, _ = split(state.model, state.trainable)
        late = {"params": params, "grads": params, "updates": params, "opt_state": state.opt_state}
        if isinstance(context.interms, Intermediates) and not has_field_interms(state.model):
            late["grads_of_interms"] = context.interms.gradients(context.interms.zeros(gradients_asked_for(config)))
        _check_owners(config, context.replace(params=params), late, errors)

    abstract(train, config, state, spec)
    for name, (one, eval_config, eval_spec) in evals.items():
        try:
            view = eval_view(eval_config, state)
        except EquikdError as error:
            errors.append(f"{join(('evals', name))}.{error}")
        except Exception as error:
            error.add_note(join(("evals", name, "transform")))
            raise
        else:
            errors += _eval_errors(name, one, eval_config, view, eval_spec, errors)
    if errors:
        unique = list(dict.fromkeys(errors))
        raise WiringError(report(f"{len(unique)} things are connected wrongly", unique))


_INHERITED_FIX = {
    "losses": "losses={...} of the eval itself; {} for none",
    "metrics": "ek.metrics.SkipIfMissing(..., missing=...) if it may be absent, or metrics={...} of the eval itself",
}


def _eval_errors(name: str, one: Eval, config: Any, view: View, spec: Batch, known: list[str]) -> list[str]:
    """Messages of an eval: of its own losses and metrics under their paths; of others unless training has them too."""
    shared: list[str] = []
    own: list[str] = []

    def trace(config: Any, view: View, spec: Batch) -> None:
        context = _predicted(lambda config: eval_context(config, view, spec), config, spec, view, shared)
        for part, fix in _INHERITED_FIX.items():
            errors: list[str] = []
            _check_owners(config, context, {}, errors, only=part)
            if getattr(one, part) is None:
                shared.extend(text if "\n  fix:" in text else text + message("", fix=fix) for text in errors)
            else:
                own.extend(errors)

    abstract(trace, config, view, spec)
    where, headlines = join(("evals", name)), [text.partition("\n")[0] for text in known]
    shared = [text for text in shared if text.partition("\n")[0] not in headlines]
    return [f"{where}: {text}" for text in shared] + [f"{where}.{text}" for text in own]


def _predicted(run: Callable[[Any], Context], config: Any, spec: Batch, state: Any, errors: list[str]) -> Context:
    """The context after the forward pass; where that fails, without predictions."""
    context = Context(
        step=state.step, batch=spec.data, mask=spec.mask, model=state.model, extra=state.extra, config=config
    )
    try:
        return run(config)
    except InputsError as error:
        errors.extend(error.messages)
    except EquikdError as error:
        errors.append(str(error))
    except NEEDS_VALUE:
        pass  # which float is to blame is found out later
    except _SHAPE_ERRORS as error:
        errors.append(_call_message(error, config, context, state, _fits_the_other_way(run, config)))
    except Exception as error:
        error.add_note(_call_message(error, config, context, state, False))
        raise
    return context


def _fits_the_other_way(run: Callable[[Any], Context], config: Any) -> bool:
    """Whether a model that fails on single examples takes whole batches."""
    if not config.per_example:
        return False
    try:
        run(raw(type(config), {**fields_of(config), "per_example": False}))
    except Exception:  # so it does not
        return False
    return True


def _call_message(error: Exception, config: Any, context: Context, state: Any, takes_batches: bool) -> str:
    model = context.model
    paths = (key_paths(model) if isinstance(model, eqx.Module) else {}) | config.inputs
    try:
        values = inputs_of(model, config.inputs, context, stateful=state.model_state is not None)
    except WiringError:  # it failed even before it was called
        values = {}
    one = "one example at a time, so without the first axis of what comes from the batch"
    fix = "on whole batches it works: per_example=False, if that is what it takes" if takes_batches else None
    if "key" in str(error) and "key" not in parameters_of(model):
        fix = "give its call an argument `key`, which is filled with a PRNG key"
    return message(
        f"model: {name_of(model)} fails on this batch",
        where=_told(error),
        got="\n".join(f"{name} = {paths[name]!r}: {_shapes(value)}" for name, value in values.items()) or None,
        expected=f"what its call takes, {one if config.per_example else 'whole batches'}",
        fix=fix,
    )


def _told(error: Exception) -> str:
    """The line that an error comes from, and what it says."""
    if isinstance(error, ShapeError):  # it has a table, and the line of the function
        return f"ShapeError: {error}"
    line, lines = line_of(error), str(error).strip().splitlines()
    # What jaxtyping says above its ruler names argument and annotation; the first line of others says it.
    count = next((i for i, text in enumerate(lines) if text.startswith("---")), 1) if _is_type_check(error) else 1
    says = f"{type(error).__name__}: " + "\n".join(_spelled(text)[:300] for text in lines[:count])
    return says if line is None else f"{line}\n{says}"


def _is_type_check(error: Exception) -> bool:
    return isinstance(error, TypeCheckError)


def _shapes(value: Any) -> str:
    leaves = jax.tree.leaves(value)
    shapes = [f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf) for leaf in leaves[:4]]
    return ", ".join(shapes) + (", ..." if len(leaves) > 4 else "")


def _check_owners(config: Any, context: Context, late: dict[str, Any], errors: list[str], only: str = "") -> None:
    """All losses and metrics, or messages of one kind only; `late` is what a training step has for its metrics."""
    texts: dict[str, list[str]] = {"losses": [], "metrics": []}
    losses = resolve(config.losses, root=config, path="losses")
    states = {name: _state(loss, context, join(("losses", name)), texts["losses"]) for name, loss in losses.items()}
    context = context.replace(losses={name: state or _no_state() for name, state in states.items()}, **late)
    for name, metric in resolve(config.metrics, root=config, path="metrics").items():
        _state(metric, context, join(("metrics", name)), texts["metrics"])
    for part, found in texts.items():
        errors.extend(found if only in ("", part) else ())


def _no_state() -> LossState:
    """In place of a loss that failed, so that metrics of it are not reported too."""
    return LossState(TwoFloat.of(0.0), jnp.zeros((), jnp.int32))


def _state(owner: Any, context: Context, where: str, errors: list[str]) -> Any:
    """The state of a loss or metric, or None and messages."""
    lines = unwired(owner, context, where)
    errors.extend(lines)
    if lines or _waits_for_predictions(owner, context):
        return None
    try:
        with standing_at(where):
            return owner.from_context(context)
    except (ShapeError, WiringError) as error:
        errors.append(f"{where}: {error}")
    except NEEDS_VALUE:
        pass  # which float is to blame is found out later
    except _SHAPE_ERRORS as error:
        errors.append(_owner_message(error, owner, context, where))
    return None


def _owner_message(error: Exception, owner: Any, context: Context, where: str) -> str:
    values, owner = owner.connect(context), owner if isinstance(owner, Loss) else owner.inner
    method, paths = type(owner).values if isinstance(owner, Loss) else type(owner).from_values, key_paths(owner)
    annotations = {name: p.annotation for name, p in inspect.signature(method).parameters.items()}
    wanted = [f"{name}: {_spelled(a)}" for name, a in annotations.items() if a not in (inspect.Parameter.empty, Any)]
    return message(
        f"{where}: {type(owner).__name__} does not fit the shapes that it gets",
        where=None if _is_type_check(error) else _told(error),
        got="\n".join(f"{name} = {paths[name]!r}: {_shapes(value)}" for name, value in values.items()),
        expected="\n".join(wanted) or None,
    )


def _spelled(annotation: Any) -> str:
    """An annotation as it was written, nearly."""
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    name = re.sub(r"<class '(.*)'>", r"\1", name.replace("jaxlib._jax.Array", "Array"))
    return re.sub(r"\b(jaxtyping|typing)\.", "", name)


def unwired(owner: Any, context: Context, where: str) -> list[str]:
    """Messages for the key paths of a loss or metric that lead nowhere; not for those below missing predictions."""
    try:
        owner.connect(context)
    except Unwired as error:
        missing = context.preds is UNSET
        kept = [
            (name, text)
            for name, text in error.errors
            if not (missing and root_of(key_paths(error.owner).get(name, "")) in ("preds", "interms"))
        ]
        return Unwired(error.owner, kept, error.unfilled, error.below).lines(where)
    return []


def _waits_for_predictions(owner: Any, context: Context) -> bool:
    return context.preds is UNSET and not {"preds", "interms"}.isdisjoint(map(root_of, owner.reads().values()))


def eval_view(config: Any, state: TrainState) -> View:
    """Shapes of what an eval sees of a train state, its model transformed if the eval says so."""
    view = view_of(state, config)
    return view if config.transform is None else abstract(transformed, config, view)


_INHERITED: "Cache[dict[str, list[str]]]" = Cache(most=128)
_TRAINING = ("key", "params", "grads", "updates", "opt_state")


def inherited(config: Any, state: TrainState, spec: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the trainer's losses and metrics that an eval on batches of these shapes should have.

    Left out are those that read what only a training step computes. What else leads nowhere, such as labels that the
    eval lacks, is for the check to refuse.
    """
    view = view_of(state)
    names = _INHERITED.get(structure_key(config, view, spec), lambda: _inherited_names(config, view, spec))
    return ({n: config.losses[n] for n in names["losses"]}, {n: config.metrics[n] for n in names["metrics"]})


def _inherited_names(config: Any, view: View, spec: Batch) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {"losses": [], "metrics": []}

    def trace(config: Any, view: View, spec: Batch) -> None:
        context = Context(
            step=view.step, batch=spec.data, mask=spec.mask, model=view.model, extra=view.extra, config=config
        )
        try:
            context = eval_context(config, view, spec)
        except Exception:  # whatever it is, the check of the eval says so
            pass
        losses = resolve(config.losses, root=config, path="losses")
        names["losses"] += [name for name, loss in losses.items() if not _of_training(loss, context, ())]
        left_out = [("losses", name) for name in losses if name not in names["losses"]]
        context = context.replace(losses={name: _no_state() for name in names["losses"]})
        metrics = resolve(config.metrics, root=config, path="metrics")
        names["metrics"] += [name for name, metric in metrics.items() if not _of_training(metric, context, left_out)]

    abstract(trace, config, view, spec)
    return names


def _of_training(owner: Any, context: Context, left_out: Collection[tuple[str, ...]]) -> bool:
    """Whether a loss or metric reads what only a training step has; or the loss states that an eval leaves out."""
    try:
        owner.connect(context)
    except Unwired as error:
        paths = key_paths(error.owner)
        missing = [paths[name] for name, _ in error.errors if name in paths]
        return any(root_of(path) in _TRAINING or _begins_with(path, left_out) for path in missing)
    return False


def _begins_with(path: str, beginnings: Collection[tuple[str, ...]]) -> bool:
    return root_of(path) != "" and parse(path)[:2] in beginnings


__all__ = ["abstract", "check", "check_kinds", "eval_view", "inherited", "view_of"]
