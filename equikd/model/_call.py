"""Calling a model on a batch: inputs by key path, one PRNG key an example, state threaded, non-arrays passed through.

A per-example model is mapped over the batch with `axis_name="batch"`: inputs whose key path starts at `batch` (or is
`mask`) are mapped along their first axis, others are the same for each example; `unmapped` names exceptions. An argument
named `key` gets `jax.random.split(key, b)`, an argument named `state` the model's `eqx.nn.State`.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax

from equikd.errors import WiringError, listing, message, nearest, report
from equikd.tree import parse
from equikd.wiring import Context, key_paths, lookup

_OURS = ("key", "state", "inference")


def parameters_of(model: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a model's call."""
    try:
        return dict(inspect.signature(model).parameters)
    except (TypeError, ValueError):
        raise WiringError(message("the model cannot be called", got=repr(type(model)), expected="a __call__")) from None


def input_paths(model: Any, inputs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Argument -> (key path, config path that holds it), from the trainer's `inputs` and the model's own fields.

    Raises:
        WiringError: an argument that the call does not have, is filled twice, or is filled by nothing; all at once.
    """
    parameters = parameters_of(model)
    own = key_paths(model) if isinstance(model, eqx.Module) else {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    errors = [
        message(
            f"inputs.{name} = {path!r}: {type(model).__name__} has no argument {name!r}",
            near=nearest(name, parameters),
            expected=f"arguments of its call: {listing(parameters)}",
        )
        for name, path in inputs.items()
        if name not in parameters and not takes_any
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
        message(
            f"model: nothing fills the argument {name!r} of {type(model).__name__}",
            expected="a key path such as 'batch.image'",
            fix=f'connect it: inputs={{"{name}": "batch...."}}',
        )
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in (*inputs, *own, *_OURS)
    ]
    if errors:
        raise WiringError(report(f"{len(errors)} inputs of the model are connected wrongly", errors))
    used = {name: (path, f"model.{name}") for name, path in own.items() if name in parameters}
    return used | {name: (path, f"inputs.{name}") for name, path in inputs.items()}


def inputs_of(model: Any, inputs: Mapping[str, str], context: Context) -> dict[str, Any]:
    """Argument -> value, looked up in the context.

    Raises:
        WiringError: all key paths that lead nowhere, with the config paths that hold them.
    """
    values, errors = {}, []
    for name, (path, where) in input_paths(model, inputs).items():
        try:
            values[name] = lookup(context, path)
        except WiringError as error:
            errors.append(f"{where} = {path!r}{str(error).removeprefix(repr(path))}")
    if errors:
        raise WiringError(report(f"{len(errors)} key paths lead nowhere", errors))
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
) -> tuple[Any, Any]:
    """The model's output on the batch of a context.

    Args:
        model: an `eqx.Module`, or any callable pytree.
        context: holds `batch`, `mask` (bool `b`) and what else the key paths name.
        inputs: argument -> key path.
        per_example: map over the batch axis; False for a model that takes whole batches.
        unmapped: arguments that are the same for each example although they come from the batch.
        key: a PRNG key, split into one for each example.
        model_state: the model's `eqx.nn.State`, or None.
        inference: switch dropout, normalisation and the like to inference mode.

    Returns:
        `(preds, model_state)`: preds with the batch axis first; non-array outputs as the model gave them.

    Raises:
        WiringError: inputs are connected wrongly.

    Example:
        >>> import equinox as eqx, jax.numpy as jnp
        >>> model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        >>> batch = {"x": jnp.ones((5, 3))}
        >>> preds, _ = call(model, Context(batch=batch, mask=jnp.ones(5, bool)), inputs={"x": "batch.x"})
        >>> preds.shape
        (5, 2)
    """
    if inference:
        model = eqx.nn.inference_mode(model)
    arguments = inputs_of(model, inputs, context)
    paths = {name: path for name, (path, _) in input_paths(model, inputs).items()}
    parameters = parameters_of(model)
    threaded = {"state": model_state} if "state" in parameters and model_state is not None else {}
    wants_key = "key" in parameters and "key" not in arguments and key is not None
    if not per_example:
        out = model(**arguments, **threaded, **({"key": key} if wants_key else {}))
        return out if threaded else (out, model_state)

    size = context.mask.shape[0]
    keys = {"key": jax.random.split(key, size)} if wants_key and key is not None else {}
    axes = {name: eqx.if_array(0) if _is_mapped(paths[name]) and name not in unmapped else None for name in arguments}

    def one(arguments: dict[str, Any], keys: dict[str, Any]) -> Any:
        return model(**arguments, **keys, **threaded)

    mapped = eqx.filter_vmap(
        one,
        in_axes=(axes, 0 if keys else None),
        out_axes=(eqx.if_array(0), None) if threaded else eqx.if_array(0),
        axis_name="batch",
        axis_size=size,
    )
    out = mapped(arguments, keys)
    return out if threaded else (out, model_state)


def _is_mapped(path: str) -> bool:
    return parse(path)[0] in ("batch", "mask")
