"""Averages: sum and count of values under a mask, whatever stands where the mask is False.

`Average.of(values, mask)` is the state behind most metrics, and `masked_sum` what it is made of. Masked values are
replaced by 0 before the sum (`where`, never `x * mask`: nan * 0 is nan), so padding changes neither value nor gradient.
"""

import math

import jax.numpy as jnp

from equikd.metrics._state import State, sum_field
from equikd.metrics._sums import TwoFloat, count_dtype, fitting_mask, sum_dtype
from equikd.typing import Array, Bool, Inexact, Int, Shaped


def masked_sum(values: Shaped[Array, "..."], mask: Bool[Array, "..."]) -> tuple[Inexact[Array, ""], Int[Array, ""]]:
    """Sum and count of what a mask keeps; what it leaves out may hold nan or inf.

    Values with more axes than the mask are averaged over those first: the count is then that of the mask alone, and
    does not run out of int32 after a few hundred batches of images.

    Args:
        values: any numeric or bool dtype, `*m *n`.
        mask: bool, `*m`.

    Returns:
        The sum in float32 (float64 for 64-bit values), and the count of true elements of `mask`, int32 (int64
        under x64).

    Raises:
        WiringError: `mask` is not bool, or its axes are not the first axes of `values`; names both shapes.

    Example:
        >>> total, count = masked_sum(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True]))
        >>> total.item(), count.item()
        (4.0, 2)
    """
    values, mask = jnp.asarray(values), jnp.asarray(mask)
    keep = fitting_mask(mask, values)
    total = jnp.where(keep, values, jnp.zeros_like(values)).sum(dtype=sum_dtype(values.dtype))
    each = math.prod(values.shape[mask.ndim :])
    if each > 1:
        total = total / each
    return total, mask.sum(dtype=count_dtype()) if each else jnp.zeros((), count_dtype())


class Average(State):
    """The mean of values under a mask, as their sum and count.

    The sums of batches are added with their rounding errors, so a mean over a long run does not drift.

    Attributes:
        exact: sum over the rows that the mask keeps, float32 (float64 for 64-bit values) and its error.
        count: how many those are, int32 (int64 under x64).

    Example:
        >>> first, second = Average.of(jnp.array([1.0, 2.0])), Average.of(jnp.array([6.0]))
        >>> (first | second).compute().item()
        3.0
    """

    exact: TwoFloat = sum_field(exact=True)
    count: Int[Array, ""] = sum_field()

    @property
    def total(self) -> Inexact[Array, ""]:
        """The sum as a plain number."""
        return self.exact.value

    @classmethod
    def of(cls, values: Shaped[Array, "..."], mask: Bool[Array, "..."] | None = None) -> "Average":
        """The state of these values; see `masked_sum`.

        Args:
            values: any numeric or bool dtype, `*m *n`; the axes `*n` are averaged over.
            mask: which values are present, bool `*m`; all by default.

        Raises:
            WiringError: the axes of `mask` are not the first axes of `values`.
        """
        total, count = masked_sum(values, jnp.ones(jnp.shape(values)[:1], bool) if mask is None else mask)
        return cls(TwoFloat.of(total), count)

    def compute(self) -> Inexact[Array, ""]:
        """The mean, total / count; nan of nothing."""
        return self.total / self.count.astype(self.total.dtype)
