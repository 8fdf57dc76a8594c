"""The work of a model: the floating-point operations of its matrix products and convolutions, read off the trace.

XLA's own account (`_costs.py`) counts the body of a loop once, however often it runs: of a step with four
micro-batches it sees a quarter, of a model that scans over twelve layers a twelfth. Here each round of a scan counts.
Only products do, as is the custom where the utilisation of an accelerator is told (Chowdhery et al. 2022, PaLM,
arXiv:2204.02311, appendix B); they are by far the most of it, and what the peak rates of vendors are about.

A product of `[m, k]` and `[k, n]` is `2 m k n` operations. They are counted apart by the format that is multiplied in,
for hardware has a peak rate for each: `"bfloat16"`, `"float32"`, or `"float32 highest"` where the precision of a
product was raised.
"""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equikd.intermediates._jaxpr import held, kind

_CUSTOM = ("pallas_call",)  # its jaxpr is that of one cell of a grid, which alone says nothing


def products_in(jaxpr: Any) -> dict[str, float]:
    """Floating-point operations of all products in a jaxpr, by format.

    Args:
        jaxpr: open or closed. Each round of a scan counts; of a loop whose number of rounds is not known when it is
            traced, one round; of a branch, the one with the most work; of kernels of one's own, nothing.

    Example:
        >>> import jax
        >>> loop = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=3)[0]
        >>> products_in(jax.make_jaxpr(loop)(jnp.ones((4, 4))))
        {'float32': 384.0}
    """
    found: Counter[str] = Counter()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.update(_products(eqn))
    return dict(found)


def _products(eqn: Any) -> dict[str, float]:
    name = kind(eqn)
    if name in _RULES:
        form = _format(eqn)
        return {} if form is None else {form: 2.0 * _RULES[name](eqn)}
    if name in _CUSTOM:
        return {}
    inner = [products_in(one) for one in held(eqn)]
    if name == "cond":
        return max(inner, key=lambda one: sum(one.values()), default={})
    rounds = eqn.params["length"] if name == "scan" else _devices(eqn) if name == "shard_map" else 1
    total: Counter[str] = Counter()
    for one in inner:
        total.update({form: rounds * flops for form, flops in one.items()})
    return dict(total)


def _devices(eqn: Any) -> int:
    """How many devices each compute what a `shard_map` holds."""
    mesh = eqn.params["mesh"]
    axes = eqn.params.get("manual_axes", mesh.axis_names)
    return math.prod(size for axis, size in mesh.shape.items() if axis in axes)


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return _size(eqn.outvars[0]) * math.prod(left[axis] for axis in contracted)


def _convolution(eqn: Any) -> int:
    """Multiplications of a convolution, those with padding included.

    A transposed one, as in the backward pass of strides, has zeros between the elements of its input, which XLA leaves
    out, and so does this.
    """
    kernel = eqn.invars[1].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return _size(eqn.outvars[0]) * (math.prod(kernel) // max(features, 1)) // math.prod(eqn.params["lhs_dilation"])


def _ragged(eqn: Any) -> int:
    """Each row of the left side meets one group of the right side alone, and each element of it the free axes there."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batched) = numbers.dot_dimension_numbers
    taken = (*contracted, *batched, *numbers.rhs_group_dimensions)
    free = (size for axis, size in enumerate(eqn.invars[1].aval.shape) if axis not in taken)
    return _size(eqn.invars[0]) * math.prod(free)


_RULES = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged,
}


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def _format(eqn: Any) -> str | None:
    """In which format a product multiplies; None: not in floating point."""
    dtype = max((variable.aval.dtype for variable in eqn.invars[:2]), key=lambda one: np.dtype(one).itemsize)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return None
    asked = eqn.params.get("precision")
    asked = [one for one in (asked if isinstance(asked, tuple) else (asked,)) if one is not None]
    raised = [one for one in asked if one != jax.lax.Precision.DEFAULT]
    if not raised or (dtype != jnp.float32 and all(isinstance(one, jax.lax.Precision) for one in raised)):
        return np.dtype(dtype).name  # of narrower formats every precision is exact
    names = [one.name.lower() if isinstance(one, jax.lax.Precision) else str(one) for one in raised]
    return f"{np.dtype(dtype).name} {max(names, key=len)}"  # "highest" is longer than "high"
