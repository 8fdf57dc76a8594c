"""What a model has to offer: every submodule that is called, with the shapes of what it returns."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx

from equikd.intermediates._mark import Name
from equikd.intermediates._options import Options
from equikd.intermediates._paths import is_callable
from equikd.intermediates._run import run_tapped
from equikd.intermediates._tap import nodes
from equikd.tree import join


def available(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> dict[str, list[Any]]:
    """The submodules that a function calls, with the shapes of what they return; nothing is computed.

    Args:
        function: takes a model first, as in `capture`.
        model: any pytree of modules, of arrays or of shapes.
        args: further arguments of `function`, or their shapes.
        kwargs: likewise.

    Returns:
        `{path: [value of each call]}` with `jax.ShapeDtypeStruct`s in place of arrays, in the order of the model;
        without those that are not called, or have no value that can be had. One call is captured by `path`, one of
        several by `path[0]`.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(3, 2, width_size=8, depth=1, key=jax.random.key(0))
        >>> found = available(lambda model, x: model(x), model, jnp.ones(3))
        >>> {path: [value.shape for value in calls] for path, calls in found.items() if "layers" in path}
        {'layers[0]': [(8,)], 'layers[1]': [(2,)]}
    """
    names = {join(at): Name(at) for at, node in nodes(model) if at and is_callable(node)}
    options = Options(while_loops="last", absent="zeros")

    def values(model: Any, args: Any, kwargs: Any) -> dict[str, list[Any]]:
        got = run_tapped(function, model, args, kwargs, names=names.values(), options=options)
        calls = {path: got.calls[name] for path, name in names.items() if name in got.calls}
        with_values = {path: of for path, of in calls.items() if all(call.refused is None for call in of)}
        return {path: [call.value for call in of] for path, of in with_values.items()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the model says, it says when it is called in earnest
        found = eqx.filter_eval_shape(values, model, args, kwargs)
    return {path: found[path] for path in names if path in found}  # JAX sorts the keys of dicts
