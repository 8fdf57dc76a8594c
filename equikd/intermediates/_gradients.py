"""Gradients with respect to intermediates: those with respect to zeros that are added to them."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd.intermediates._capture import capture
from equikd.intermediates._mark import is_jax_array
from equikd.intermediates._rules import NoGradientWarning


def gradients(
    function: Callable[..., Any], paths: str | Iterable[str], **options: Any
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A scalar function that also gives its gradients with respect to what submodules return.

    Args:
        function: takes a model first, then anything, and returns a real scalar.
        paths: as in `capture`, without patterns.
        options: `while_loops` and `absent`, as in `capture`.

    Returns:
        `(model, *args, **kwargs) -> (scalar, {path: gradient})`; integers in a value have None there.

    Raises:
        IntermediateError: as `capture`; or no gradient flows back from a value.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(3, "scalar", width_size=8, depth=2, key=jax.random.key(0))
        >>> value, found = gradients(lambda model, x: model(x) ** 2, ["layers[1]"])(model, jnp.ones(3))
        >>> found["layers[1]"].shape
        (8,)
    """
    paths = [paths] if isinstance(paths, str) else list(paths)

    def with_gradients(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        def values(model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoGradientWarning)
                return eqx.filter(capture(function, paths, **options)(model, *args, **kwargs)[1], is_jax_array)

        shapes = eqx.filter_eval_shape(values, model, args, kwargs)
        zeros = jax.tree.map(_zeros, shapes)

        def scalar(zeros: Any) -> Any:
            return capture(function, paths, perturb=zeros, **options)(model, *args, **kwargs)[0]

        return jax.value_and_grad(scalar)(zeros)

    return with_gradients


def _zeros(shape: Any) -> Any:
    """Zeros to be added to a value; None where it has no gradient."""
    is_real = hasattr(shape, "dtype") and jnp.issubdtype(shape.dtype, jnp.inexact)
    return jnp.zeros(shape.shape, shape.dtype) if is_real else None
