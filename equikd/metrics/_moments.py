"""Mean and squared deviations that merge: a variance that is right where E[x^2] - E[x]^2 gives 0.

At mean 1e4 and deviation 0.03 the squares agree in all digits that float32 has, so their difference is noise. Here each
batch takes its deviations from its own mean, and two batches merge by the formula for parallel samples of Chan, Golub
and LeVeque (1983, "Algorithms for computing the sample variance"):

    spread = spread_a + spread_b + (mean_b - mean_a)^2 * count_a * count_b / (count_a + count_b)

The mean is kept as the sum of two floats, since a deviation may be smaller than the last digit of the mean.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import message
from equikd.metrics._elements import each, wide
from equikd.metrics._fields import Rule
from equikd.metrics._sums import TwoFloat, add, count_dtype, has_overflowed, two_sum
from equikd.typing import Array, Bool, Float, Int, Shaped


class Moments(eqx.Module):
    """Count, mean and squared deviations of values under a mask.

    Attributes:
        count: number of true elements of the mask.
        mean: of the values, float32 (float64 for 64-bit values).
        rest: what the mean lost in rounding.
        spread: sum of squared deviations from the mean, and its error; over axes that the mask does not have, their
            mean.
    """

    count: Int[Array, ""]
    mean: Float[Array, ""]
    rest: Float[Array, ""]
    spread: TwoFloat

    @classmethod
    def of(cls, values: Shaped[Array, "..."], mask: Bool[Array, "..."]) -> "Moments":
        """The moments of the values that the mask keeps; see `masked_sum` for shapes."""
        keep, values = each(values, mask), wide(values)
        inner = math.prod(values.shape[mask.ndim :])
        count = mask.sum(dtype=count_dtype()) if inner else jnp.zeros((), count_dtype())
        number = jnp.maximum(count, 1).astype(values.dtype) * max(inner, 1)  # as ints it may be past the largest one
        zeros = jnp.zeros_like(values)
        center = jnp.where(keep, values, zeros).sum() / number
        from_center = jnp.where(keep, values - center, zeros)
        shift = from_center.sum() / number  # `center` is rounded; deviations from it say by how much
        deviations = jnp.where(keep, from_center - shift, zeros)
        mean, rest = _two_sum(center, shift)
        return cls(count, mean, rest, TwoFloat.of((deviations * deviations).sum() / max(inner, 1)))

    def variance(self) -> Any:
        """The population variance, nan of nothing."""
        return self.spread.value / self.count.astype(self.mean.dtype)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The sum of two floats and its rounding error, which is 0 where the sum is not finite."""
    total, error = two_sum(a, b)
    return total, jnp.where(jnp.isfinite(total), error, jnp.zeros_like(error))


def _merge(a: Moments, b: Moments) -> Moments:
    count = add(a.count, b.count)
    dtype = a.mean.dtype
    share = b.count.astype(dtype) / jnp.maximum(count, 1).astype(dtype)
    apart = (b.mean - a.mean) + (b.rest - a.rest)
    mean, rest = _two_sum(a.mean, a.rest + apart * share)
    spread = a.spread + b.spread + TwoFloat.of(apart * apart * share * a.count.astype(dtype))
    both = Moments(count, mean, rest, spread)
    # A side without rows changes nothing, to the bit.
    either = jax.tree.map(lambda x, y: jnp.where(b.count == 0, x, y), a, both)
    return jax.tree.map(lambda x, y: jnp.where(a.count == 0, x, y), b, either)


def _empty(shapes: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def _finish(moments: Moments) -> Moments:
    if has_overflowed(moments.count):
        got = f"{moments.count.dtype}, at most {np.iinfo(moments.count.dtype).max:,}"
        raise OverflowError(message("a count does not fit its dtype", got=got, fix="measure fewer values"))
    return moments


def moments_field() -> Any:
    """A field of a state that holds `Moments`."""
    return eqx.field(metadata={"merge": Rule(_merge, _empty, finish=_finish)})
