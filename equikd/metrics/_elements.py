"""Single elements under a mask: what most of the library's metrics need besides a mean.

A mask has the first axes of the values, so a mask of rows speaks for all elements of its rows. `each` spells it out,
`kept` puts a harmless number where it is False (`where`, never `x * mask`: nan * 0 is nan), `counted` makes a histogram
of indices whose memory does not grow with the classes times the rows.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equikd.metrics._sums import TwoFloat, count_dtype, exact_sum, fitting_mask, sum_dtype
from equikd.typing import Array, Bool, Inexact, Int, Integer, Shaped


def each(values: Shaped[Array, "..."], mask: Bool[Array, "..."]) -> Bool[Array, "..."]:
    """The mask with all axes of the values.

    Args:
        values: any dtype, `*m *n`.
        mask: bool, `*m`.

    Raises:
        WiringError: `mask` is not bool, or its axes are not the first axes of `values`.

    Example:
        >>> each(jnp.zeros((2, 2)), jnp.array([True, False])).tolist()
        [[True, True], [False, False]]
    """
    return jnp.broadcast_to(fitting_mask(mask, values), values.shape)


def wide(values: Shaped[Array, "..."]) -> Inexact[Array, "..."]:
    """The values in float32 at least, as sums and differences need: bf16 has three digits, and ints divide badly."""
    return values.astype(sum_dtype(values.dtype))


def together(one: Shaped[Array, "..."], other: Shaped[Array, "..."]) -> tuple[Any, Any]:
    """Both in their common dtype, float32 at least.

    Example:
        >>> [array.dtype.name for array in together(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int8))]
        ['float32', 'float32']
    """
    with jax.numpy_dtype_promotion("standard"):  # the caller may have made mixing an error
        dtype = sum_dtype(jnp.result_type(one, other))
    return one.astype(dtype), other.astype(dtype)


def kept(values: Shaped[Array, "..."], mask: Bool[Array, "..."]) -> Inexact[Array, "..."]:
    """The values, `wide`, with 0 where the mask is False.

    Example:
        >>> kept(jnp.array([1, 2]), jnp.array([True, False])).tolist()
        [1.0, 0.0]
    """
    values = wide(values)
    return jnp.where(each(values, mask), values, jnp.zeros_like(values))


def counted(index: Integer[Array, "..."], mask: Bool[Array, "..."], size: int) -> Int[Array, " size"]:
    """How often each index from 0 to size - 1 stands where the mask is True; other indices count nowhere.

    Args:
        index: any integer dtype.
        mask: bool, of the same shape.
        size: number of counts.

    Returns:
        The counts, int32 (int64 under x64).

    Example:
        >>> counted(jnp.array([0, 2, 2, -1, 7]), jnp.ones(5, bool), 3).tolist()
        [1, 0, 2]
    """
    index = class_index(index, size)
    index = jnp.where(mask & (index >= 0), index, jnp.full_like(index, size))  # -1 would count from the end
    return jnp.zeros(size, count_dtype()).at[index.ravel()].add(jnp.ones((), count_dtype()), mode="drop")


_BLOCK = 256


def summed(index: Integer[Array, "..."], values: Inexact[Array, "..."], size: int) -> TwoFloat:
    """The sum of the values at each index from 0 to size - 1, to the last digit however many there are.

    Added one after the other, a million floats lose two digits; so blocks of rows are added, and then the blocks.

    Args:
        index: int32, each of them from 0 to size - 1.
        values: float32 or float64, of the same shape.
        size: number of sums.

    Example:
        >>> summed(jnp.array([0, 2, 2]), jnp.array([1.0, 2.0, 3.0]), 3).value.tolist()
        [1.0, 0.0, 5.0]
    """
    blocks = max(1, -(-index.size // _BLOCK))
    place = (jnp.arange(index.size, dtype=jnp.int32) // _BLOCK) * size + index.ravel()
    sums = jnp.zeros(blocks * size, values.dtype).at[place].add(values.ravel(), mode="drop")
    return exact_sum(sums.reshape(blocks, size))


def class_index(labels: Integer[Array, "*n"], classes: int) -> Int[Array, "*n"]:
    """Labels as int32, -1 where a label is no class; looked at in their own dtype, so that a large one does not wrap.

    Example:
        >>> class_index(jnp.array([0, 255, 1], jnp.uint8), 2).tolist()
        [0, -1, 1]
    """
    labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels  # a limit of 300 does not fit uint8
    inside = (labels >= 0) & (labels < classes)
    return jnp.where(inside, labels.astype(jnp.int32), jnp.full(labels.shape, -1, jnp.int32))


def floats(counts: Int[Array, "*n"]) -> Inexact[Array, "*n"]:
    """Counts as floats to compute with: float64 on the host, which holds each of them, else JAX's default."""
    return counts.astype(np.float64 if arrays_of(counts) is np else jnp.result_type(float))


def arrays_of(*values: Any) -> ModuleType:
    """The module that computes with these arrays: numpy on the host, so that a result compiles nothing, else JAX."""
    return np if all(isinstance(value, np.ndarray | np.generic) for value in values) else jnp
