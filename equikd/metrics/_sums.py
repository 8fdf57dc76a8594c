"""Sums that keep what rounding takes away, and counts that never wrap.

A float32 sum loses what is smaller than its last bit: 16,777,216 + 1 is 16,777,216, and a mean over a long run drifts.
A *two-float* number is a pair, `high + low`, of which `low` holds the rounding errors of `high` (about 48 bits
together). The errors come from Knuth's TwoSum: `(a + b) - a` is not `b`, and what is missing can be computed exactly.
That works while the compiler keeps the order of additions; XLA does, unless its fast-math flag for CPUs is set.

Ints saturate: a sum past the largest int stays there, where a state's `finalize` sees and refuses it.
"""

import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import WiringError, message
from equikd.typing import Array, Bool, Inexact, Shaped


class TwoFloat(eqx.Module):
    """A float array with its rounding error; the number is `high + low`, element by element.

    Attributes:
        high: the rounded sum, float32 at least.
        low: what rounding took from it, same shape and dtype; 0 where `high` is not finite.

    Example:
        >>> total = TwoFloat.of(jnp.float32(2**24)) + TwoFloat.of(jnp.float32(1))
        >>> total = total + TwoFloat.of(jnp.float32(1))
        >>> total.value.item()
        16777218.0
    """

    high: Inexact[Array, "*n"]
    low: Inexact[Array, "*n"]

    @classmethod
    def of(cls, value: Any) -> "TwoFloat":
        """A number that carries no error yet.

        Args:
            value: array or scalar, any numeric or bool dtype; a `TwoFloat` is returned as it is.
        """
        if isinstance(value, TwoFloat):
            return value
        value = jnp.asarray(value)
        value = value.astype(sum_dtype(value.dtype))
        return cls(value, jnp.zeros(value.shape, value.dtype))

    @property
    def value(self) -> Inexact[Array, "*n"]:
        """The number in its plain dtype."""
        return self.high + self.low

    def __add__(self, other: "TwoFloat") -> "TwoFloat":
        high, error = two_sum(self.high, other.high)
        # An infinite sum has an error of inf - inf, which would turn it into nan.
        return TwoFloat(high, jnp.where(jnp.isfinite(high), self.low + other.low + error, jnp.zeros_like(high)))


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The rounded sum, and its error to the bit (Knuth 1969, The Art of Computer Programming 2, 4.2.2)."""
    total = jnp.add(a, b)
    of_b = jnp.subtract(total, a)
    return total, jnp.add(jnp.subtract(a, jnp.subtract(total, of_b)), jnp.subtract(b, of_b))


def exact_sum(values: Shaped[Array, "b ..."], mask: Bool[Array, "b ..."] | None = None) -> TwoFloat:
    """The sum over the first axis as a two-float number, for `sum_field(exact=True)`.

    Rows are added in pairs, pairs of pairs and so on, errors kept at each level: the result is the same to about 1e-13,
    so in nearly all cases to the bit, however rows are ordered, split and padded.

    Args:
        values: any numeric or bool dtype.
        mask: which values count, bool; its axes are the first axes of `values`. What it leaves out may hold nan.

    Returns:
        A pair in the shape of one row, float32 (float64 for 64-bit values).

    Raises:
        WiringError: `values` has no axis, or `mask` is not bool or does not fit.

    Example:
        >>> exact_sum(jnp.array([2.0**24, 1.0, 1.0, jnp.nan]), jnp.array([True, True, True, False])).value.item()
        16777218.0
    """
    values = jnp.asarray(values)
    if values.ndim == 0:
        raise WiringError(message("a sum over rows needs an axis of rows", got="a scalar", fix="TwoFloat.of(value)"))
    values = values.astype(sum_dtype(values.dtype))
    if mask is not None:
        values = jnp.where(fitting_mask(mask, values), values, jnp.zeros_like(values))
    total = TwoFloat.of(values)
    rows = values.shape[0]
    if rows == 0:
        return TwoFloat.of(jnp.zeros(values.shape[1:], values.dtype))
    while rows > 1:  # halves, not neighbours: a slice costs less than a stride
        half = rows // 2
        first, second, rest = (_cut(total, *cut) for cut in ((0, half), (half, 2 * half), (2 * half, rows)))
        total = first + second
        if rows % 2:
            total = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), total, rest)
        rows = half + rows % 2
    return jax.tree.map(operator.itemgetter(0), total)


def _cut(total: TwoFloat, start: int, stop: int) -> TwoFloat:
    return TwoFloat(total.high[start:stop], total.low[start:stop])


def fitting_mask(mask: Any, values: Any) -> Any:
    """A mask in a shape that broadcasts against values whose first axes are its own.

    Raises:
        WiringError: it is not bool, or its axes are not the first axes of `values`.
    """
    mask = jnp.asarray(mask)
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
                else "values with the axes of the mask first",
                fix="mask=None, if the values are no rows of the batch",
            )
        )
    return mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))


def sum_dtype(dtype: Any) -> Any:
    """At least float32: a bf16 sum sticks at 256, and a mean over ints is no int."""
    wide = jnp.issubdtype(dtype, jnp.inexact) and np.dtype(dtype).itemsize >= 4
    return dtype if wide else jnp.float32


def count_dtype() -> Any:
    """The dtype of counts: int32, int64 under x64."""
    return jnp.result_type(int)


def add(a: Any, b: Any) -> Any:
    """The sum; of ints the largest one where it does not fit, or where either is the largest already.

    Args:
        a: array, of no bools.
        b: array of the same shape and dtype.
    """
    total = jnp.add(a, b)
    if not jnp.issubdtype(total.dtype, jnp.integer):
        return total
    a, b = jnp.asarray(a, total.dtype), jnp.asarray(b, total.dtype)
    most = jnp.asarray(jnp.iinfo(total.dtype).max, total.dtype)
    # Signed: the sum of two numbers of one sign has another. Unsigned: it is below its parts.
    wrapped = ((a ^ total) & (b ^ total)) < 0 if jnp.issubdtype(total.dtype, jnp.signedinteger) else total < a
    return jnp.where(wrapped | (a == most) | (b == most), most, total)


def has_overflowed(value: Any) -> bool:
    """Whether an array on the host is a sum of ints that went past the largest one."""
    value = np.asarray(value)
    return value.dtype.kind in "iu" and bool((value == np.iinfo(value.dtype).max).any())
