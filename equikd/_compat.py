"""Every use of API that JAX, Equinox or jaxtyping do not promise, each with a tested public fallback.

A function here tries the private way, and falls back to the public one when an import or a call shape has changed. The
tests run both and compare, so that a new JAX release is met by one failing test with a name, not by a wrong number.
"""

from typing import Any

import jax
from jax import lax
from jax.core import Tracer as Tracer

CONFIG: Any = jax.config
"""JAX's configuration, whose attributes are made at run time, where no checker sees them."""


def weaken(x: jax.Array) -> jax.Array:
    """`x` as a weakly typed array of the same dtype, which promotes like a Python scalar.

    Args:
        x: a 0-d array or tracer of JAX's default float dtype.

    Returns:
        The same values with `weak_type=True`; differentiable, works under vmap.

    Example:
        >>> import jax.numpy as jnp
        >>> weak = weaken(jnp.float32(0.5))
        >>> (weak * jnp.ones((), jnp.bfloat16)).dtype.name
        'bfloat16'
    """
    try:
        return _weaken_private(x)
    except (ImportError, AttributeError, TypeError):
        return weaken_public(x)


def _weaken_private(x: jax.Array) -> jax.Array:
    from jax._src.lax.lax import _convert_element_type

    return _convert_element_type(x, x.dtype, weak_type=True)  # pyright: ignore  # private, hence untyped


def weaken_public(x: jax.Array) -> jax.Array:
    """`weaken` by public API alone: the transpose of a cast from a Python float is a cast to its weak type."""
    return jax.linear_transpose(lambda weak: lax.convert_element_type(weak, x.dtype), 0.0)(x)[0]


def is_weak(x: object) -> bool:
    """Whether `x` is an array whose dtype gives way in promotion, as a Python scalar's does."""
    return bool(getattr(x, "weak_type", False))


def is_ready(x: Any) -> bool:
    """Whether an array has been computed. Nothing public tells without waiting: where JAX no longer does, False."""
    try:
        return x.is_ready()
    except AttributeError:
        return False
