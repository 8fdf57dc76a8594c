"""Calling a model on a batch: inputs by key path, one PRNG key an example, state threaded, non-arrays passed through.

A per-example model is mapped over the batch with `axis_name="batch"`: inputs whose key path starts at `batch` (or is
`mask`) are mapped along their first axis, others are the same for each example; `unmapped` names exceptions. Three
arguments are the trainer's unless `inputs` fills them: `key` gets `jax.random.split(key, b)` in training, `state` the
model's `eqx.nn.State`, and `inference` is True in inference mode.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax

from equikd.config import resolve
from equikd.errors import WiringError, listing, message, nearest, report
from equikd.model._interms import Asked, Intermediates, asked_for
from equikd.tree import join, parse
from equikd.typing import provenance
from equikd.wiring import UNSET, Context, key_paths, lookup, shared_axes

_Parameter = inspect.Parameter
_STARRED = (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD)


class InputsError(WiringError):
    """Inputs of the model that are connected wrongly; `messages` has a text for each."""

    def __init__(self, messages: list[str]) -> None:
        self.messages = messages
        super().__init__(report(f"{len(messages)} inputs of the model are connected wrongly", messages))


def name_of(model: Any) -> str:
    """What to call a model in a message: its class, or the name of a function."""
    return (getattr(model, "__qualname__", None) or type(model).__qualname__).rpartition("<locals>.")[2]


def parameters_of(model: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a model's call.

    Raises:
        WiringError: the model cannot be called, or has no signature.
    """
    try:
        return dict(inspect.signature(model).parameters)
    except (TypeError, ValueError):
        what = "it has no signature" if callable(model) else "it cannot be called"
        fix = "wrap it in a function with named arguments" if callable(model) else None
        expected = "an eqx.Module with __call__, or a function"
        raise WiringError(message(f"model: {what}", got=name_of(model), expected=expected, fix=fix)) from None


def input_paths(
    model: Any,
    inputs: Mapping[str, str],
    *,
    unmapped: tuple[str, ...] = (),
    stateful: bool = False,
    batch: Any = None,
) -> dict[str, tuple[str, str]]:
    """Argument -> (key path, config path that holds it), from the trainer's `inputs` and the model's own fields.

    Args:
        model: what is called.
        inputs: argument -> key path.
        unmapped: arguments that are the same for each example.
        stateful: the model has an `eqx.nn.State`, which fills the argument `state`.
        batch: what messages say that an argument could be filled by; None: they do not say.

    Raises:
        InputsError: an argument that the call does not have, is filled twice, or is filled by nothing; all at once.
    """
    parameters = parameters_of(model)
    own = key_paths(model) if isinstance(model, eqx.Module) else {}
    own = {name: path for name, path in own.items() if name in parameters}
    given = ("key", "inference", *(("state",) if stateful else ()), *own, *inputs)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [name for name, parameter in parameters.items() if parameter.kind not in _STARRED]

    misspelt = [name for name in inputs if name not in named and not takes_any]
    meant = [near for name in misspelt for near in nearest(name, named, 1)]  # said once is enough
    errors = [
        message(
            f"inputs.{name} = {inputs[name]!r}: {name_of(model)} has no argument {name!r}",
            near=nearest(name, named),
            expected=f"arguments of its call: {listing(named) or 'none'}",
        )
        for name in misspelt
    ]
    filled = dict.fromkeys([*own, *inputs])
    errors += [
        message(f"unmapped: {name!r} is no input of the model", near=nearest(name, filled), expected=listing(filled))
        for name in unmapped
        if name not in filled
    ]
    errors += [
        message(
            f"inputs.{name} = {inputs[name]!r}: filled twice",
            got=f"the model's own field {name} = {path!r}",
            fix="keep one of the two",
        )
        for name, path in own.items()
        if name in inputs
    ]
    errors += [
        _unfilled(model, name, batch)
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in _STARRED and name not in (*given, *meant)
    ]
    if errors:
        raise InputsError(errors)
    return {n: (p, f"model.{n}") for n, p in own.items()} | {n: (p, f"inputs.{n}") for n, p in inputs.items()}


def _unfilled(model: Any, name: str, batch: Any) -> str:
    if name == "state":
        got = "the model holds no eqx.nn.StateIndex, so it has no eqx.nn.State"
        return message(f"model: nothing fills the argument 'state' of {name_of(model)}", got=got)
    keys = [join(("batch", key)) for key in batch] if isinstance(batch, dict) else []
    expected = f"a key path, such as one of {listing(keys)}" if keys else None
    fix = f'connect it: inputs={{"{name}": "{keys[0] if len(keys) == 1 else "batch...."}"}}'
    return message(f"model: nothing fills the argument {name!r} of {name_of(model)}", expected=expected, fix=fix)


def inputs_of(
    model: Any,
    inputs: Mapping[str, str],
    context: Context,
    *,
    unmapped: tuple[str, ...] = (),
    stateful: bool = False,
) -> dict[str, Any]:
    """Argument -> value, looked up in the context.

    Raises:
        InputsError: all key paths that lead nowhere, with the config paths that hold them.
    """
    values, errors = {}, []
    paths = input_paths(model, inputs, unmapped=unmapped, stateful=stateful, batch=getattr(context, "batch", None))
    for name, (path, where) in paths.items():
        try:
            values[name] = lookup(context, path)
        except WiringError as error:
            errors.append(f"{where} = {path!r}{str(error).removeprefix(repr(path))}")
    if errors:
        raise InputsError(errors)
    return values


def call(
    model: Any,
    context: Context,
    *,
    inputs: Mapping[str, str],
    per_example: bool = True,
    unmapped: tuple[str, ...] = (),
    key: jax.Array | None = None,
    model_state: Any = None,
    inference: bool = False,
    whole: Context | None = None,
) -> tuple[Any, Any]:
    """The model's output on the batch of a context.

    Args:
        model: an `eqx.Module`, or any callable pytree.
        context: holds `batch`, `mask` (bool `b`) and what else the key paths name.
        inputs: argument -> key path.
        per_example: map over the batch axis; False for a model that takes whole batches.
        unmapped: arguments that are the same for each example although they come from the batch.
        key: a PRNG key, split into one for each example, or `b` keys, one for each; None in inference, where an
            argument `key` gets None.
        model_state: the model's `eqx.nn.State`, or None; stays valid.
        inference: switch dropout, normalisation and the like to inference mode.
        whole: where `context` holds some rows of a batch, that of the whole batch: what is `unmapped` comes from there.

    Returns:
        `(preds, model_state)`: preds with the batch axis first; non-array outputs as the model gave them.

    Raises:
        WiringError: inputs are connected wrongly, or a model with a state does not return it.

    Example:
        >>> import equinox as eqx, jax.numpy as jnp
        >>> model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        >>> batch = {"x": jnp.ones((5, 3))}
        >>> preds, _ = call(model, Context(batch=batch, mask=jnp.ones(5, bool)), inputs={"x": "batch.x"})
        >>> preds.shape
        (5, 2)
    """
    arguments = {"inputs": inputs, "per_example": per_example, "unmapped": unmapped, "key": key}
    arguments |= {"model_state": model_state, "inference": inference, "whole": whole}
    return _called(model, context, asked=None, **arguments)[:2]


class Predictions(NamedTuple):
    """What a model has computed on a batch.

    Attributes:
        preds: what it returned, batch axis first.
        model_state: its `eqx.nn.State`, or None.
        interms: the intermediates that losses and metrics read; `UNSET` where they read none.
    """

    preds: Any
    model_state: Any
    interms: Any = UNSET


def _called(
    model: Any,
    context: Context,
    *,
    inputs: Mapping[str, str],
    per_example: bool,
    unmapped: tuple[str, ...],
    key: jax.Array | None,
    model_state: Any,
    inference: bool,
    whole: Context | None,
    asked: Any,
) -> Predictions:
    """As `call`, with what else is asked for."""
    if inference:
        model = eqx.nn.inference_mode(model)
    parameters, stateful = parameters_of(model), model_state is not None
    arguments = inputs_of(model, inputs, context, unmapped=unmapped, stateful=stateful)
    if whole is not None and unmapped:
        of_all = inputs_of(model, inputs, whole, unmapped=unmapped, stateful=stateful)
        arguments |= {name: of_all[name] for name in unmapped}
    filled = input_paths(model, inputs, stateful=stateful)
    paths = {name: path for name, (path, _) in filled.items()}
    sources = {name: f"{where} = {path!r}" for name, (path, where) in filled.items()}
    threads = stateful and "state" in parameters and "state" not in arguments
    same: dict[str, Any] = {}
    if threads:  # a copy, since `State.set` makes the one that it is called on unusable
        same["state"] = jax.tree.map(lambda leaf: leaf, model_state)
    if _wants(parameters, "inference", arguments, inference):
        same["inference"] = inference
    keys = {}
    if _wants(parameters, "key", arguments, key is not None):
        (same if key is None or not per_example else keys)["key"] = key

    def invoked(arguments: dict[str, Any], added: Any) -> tuple[Any, Any]:
        if asked is None:
            return _invoke(model, parameters, arguments), {}
        return asked.run(lambda model, given: _invoke(model, parameters, given), model, arguments, added)

    added = {} if asked is None else asked.added
    if not per_example:
        with shared_axes(context, model), provenance(sources, model):
            out, found = invoked({**arguments, **same}, added)
        interms = UNSET if asked is None else asked.made(found)
        return Predictions(*(_output_and_state(model, out) if threads else (out, model_state)), interms)

    size = context.mask.shape[0]
    keys = {name: value if _has_rows(value) else jax.random.split(value, size) for name, value in keys.items()}
    axes = {name: eqx.if_array(0) if _is_mapped(paths[name]) and name not in unmapped else None for name in arguments}

    def one(arguments: dict[str, Any], keys: dict[str, Any], added: Any) -> Any:
        out, found = invoked({**arguments, **keys, **same}, added)
        return *(_output_and_state(model, out) if threads else (out, None)), found

    mapped: Callable[..., Any] = eqx.filter_vmap(
        one,
        in_axes=(axes, 0 if keys else None, eqx.if_array(0)),
        out_axes=(eqx.if_array(0), None, eqx.if_array(0)),
        axis_name="batch",
        axis_size=size,
    )
    with shared_axes(context, model, rows=False), provenance(sources, model):
        preds, new_state, found = mapped(arguments, keys, added)
    return Predictions(preds, new_state if threads else model_state, UNSET if asked is None else asked.made(found))


def predictions(
    config: Any,
    model: Any,
    context: Context,
    *,
    key: jax.Array | None = None,
    model_state: Any = None,
    inference: bool = False,
    whole: Context | None = None,
    asked: Any = None,
) -> Predictions:
    """`call` as a trainer's config says: the one way in which training and evals call the model.

    Args:
        config: `trainer.in_step`, whose inputs, per_example, unmapped and precision are used.
        model: as in `call`.
        context: as in `call`.
        key: as in `call`.
        model_state: as in `call`.
        inference: as in `call`.
        whole: as in `call`.
        asked: what is captured; None: the intermediates that losses and metrics of the config read.

    Returns:
        Predictions, the model's state, and what was captured.

    Raises:
        WiringError: inputs are connected wrongly.
    """
    precision = resolve(config.precision, root=config, path="precision")
    if precision is not None:
        model = precision.model(model)
        context = context.replace(batch=precision.inputs(context.batch), extra=precision.inputs(context.extra))
        whole = whole and whole.replace(batch=precision.inputs(whole.batch), extra=precision.inputs(whole.extra))
    if asked is None and asked_for(config):
        asked = Asked(config, model)
    with contextlib.nullcontext() if precision is None else precision.products():
        preds, model_state, interms = _called(
            model,
            context,
            asked=asked,
            inputs=config.inputs,
            per_example=config.per_example,
            unmapped=config.unmapped,
            key=key,
            model_state=model_state,
            inference=inference,
            whole=whole,
        )
    if precision is not None:
        preds = precision.outputs(preds)
        interms = precision.outputs(interms) if isinstance(interms, Intermediates) else interms  # no statistics of them
    return Predictions(preds, model_state, interms)


def _wants(parameters: Mapping[str, inspect.Parameter], name: str, arguments: dict[str, Any], has_value: bool) -> bool:
    """Whether the trainer fills an argument: where there is a value for it, or the call cannot do without."""
    if name not in parameters or name in arguments or parameters[name].kind in _STARRED:
        return False
    return has_value or parameters[name].default is _Parameter.empty


def _invoke(model: Any, parameters: Mapping[str, inspect.Parameter], arguments: dict[str, Any]) -> Any:
    """The call, its positional-only arguments given by position."""
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and n in arguments]
    return model(*(arguments[n] for n in positional), **{n: v for n, v in arguments.items() if n not in positional})


def _output_and_state(model: Any, out: Any) -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], eqx.nn.State):
        return out
    raise WiringError(
        message(
            f"model: {name_of(model)} takes a state, and does not return it",
            got="an array" if isinstance(out, jax.Array) else f"a {type(out).__name__}",
            expected="(output, state)",
            fix="return the output and the new eqx.nn.State",
        )
    )


def _has_rows(key: jax.Array) -> bool:
    """Whether it is many keys; an old-style one is an array of two numbers itself."""
    return key.ndim > (0 if jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key) else 1)


def _is_mapped(path: str) -> bool:
    return parse(path)[0] in ("batch", "mask")
