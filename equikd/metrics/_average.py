"""Averages: sum and count of values under a mask, whatever stands where the mask is False.

`Average.of(values, mask)` is the state behind most metrics, and `masked_sum` what it is made of. Masked values are
replaced by 0 before the sum (`where`, never `x * mask`: nan * 0 is nan), so padding changes neither value nor gradient.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from equikd.errors import WiringError, message
from equikd.metrics._state import State, sum_field
from equikd.typing import Array, Bool, Inexact, Int, Shaped


def masked_sum(values: Shaped[Array, "..."], mask: Bool[Array, "..."]) -> tuple[Inexact[Array, ""], Int[Array, ""]]:
    """Sum and count of what a mask keeps; what it leaves out may hold nan or inf.

    Values with more axes than the mask are averaged over those first: the count is then that of the mask alone, and
    does not run out of int32 after a few hundred batches of images.

    Args:
        values: any numeric or bool dtype, `*m *n`.
        mask: bool, `*m`.

    Returns:
        The sum in float32 (float64 for 64-bit values), and the int32 count of true elements of `mask`.

    Raises:
        WiringError: `mask` is not bool, or its axes are not the first axes of `values`; names both shapes.

    Example:
        >>> total, count = masked_sum(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True]))
        >>> total.item(), count.item()
        (4.0, 2)
    """
    values, mask = jnp.asarray(values), jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise WiringError(message("a mask is bool", got=str(mask.dtype), fix="compare: x > 0"))
    if values.shape[: mask.ndim] != mask.shape:
        options = [str(list(values.shape[:n])) for n in range(1, values.ndim + 1)]
        raise WiringError(
            message(
                "the mask does not fit the values",
                got=f"mask {list(mask.shape)}, values {list(values.shape)}",
                expected=f"a mask of shape {' or '.join(options)}, the first axes of the values"
                if options
                else "values with the axes of the mask first; what has no batch axis sets mask=None",
            )
        )
    keep = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    total = jnp.where(keep, values, jnp.zeros_like(values)).sum(dtype=_sum_dtype(values.dtype))
    each = math.prod(values.shape[mask.ndim :])
    if each > 1:
        total = total / each
    return total, mask.sum(dtype=jnp.int32) if each else jnp.zeros((), jnp.int32)


def _sum_dtype(dtype: Any) -> Any:
    """At least float32: a bf16 sum sticks at 256, and a mean over ints is no int."""
    wide = jnp.issubdtype(dtype, jnp.inexact) and np.dtype(dtype).itemsize >= 4
    return dtype if wide else jnp.float32


class Average(State):
    """The mean of values under a mask, as their sum and count.

    Attributes:
        total: sum over the rows that the mask keeps, float32 (float64 for 64-bit values).
        count: how many those are, int32.

    Example:
        >>> first, second = Average.of(jnp.array([1.0, 2.0])), Average.of(jnp.array([6.0]))
        >>> (first | second).compute().item()
        3.0
    """

    total: Inexact[Array, ""] = sum_field()
    count: Int[Array, ""] = sum_field()

    @classmethod
    def of(cls, values: Shaped[Array, "..."], mask: Bool[Array, "..."] | None = None) -> "Average":
        """The state of these values; see `masked_sum`.

        Args:
            values: any numeric or bool dtype, `*m *n`; the axes `*n` are averaged over.
            mask: which values are present, bool `*m`; all by default.

        Raises:
            WiringError: the axes of `mask` are not the first axes of `values`.
        """
        return cls(*masked_sum(values, jnp.ones(jnp.shape(values)[:1], bool) if mask is None else mask))

    def compute(self) -> Inexact[Array, ""]:
        """The mean, total / count; nan of nothing."""
        return self.total / self.count.astype(self.total.dtype)
