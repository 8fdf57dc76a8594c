"""Metrics of plain values: mean, sum, and the smallest and largest, over all rows that count."""

import jax.numpy as jnp

from equikd.config import config
from equikd.metrics._average import Average
from equikd.metrics._base import Metric
from equikd.metrics._elements import each, kept
from equikd.metrics._state import State, empty_state, max_field, min_field, sum_field
from equikd.metrics._sums import TwoFloat
from equikd.typing import Array, Bool, Inexact, Shaped
from equikd.wiring import KeyPath


@config
class Mean(Metric):
    """The mean of values: sum(values where mask) / count(mask).

    Values that have more axes than the mask are averaged over those as well. Ints and bools count as their float32
    values, bf16 is summed in float32.

    Example:
        >>> import jax.numpy as jnp
        >>> values, mask = jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False])
        >>> Mean(values="preds").from_values(values, mask).compute().item()
        1.5
    """

    values: KeyPath
    """Key path of the values, any numeric dtype, `*m *n`; `*m` is the shape of the mask."""

    def from_values(self, values: Shaped[Array, "..."], mask: Bool[Array, "..."]) -> Average:
        """Sum and count of the values that the mask keeps."""
        return Average.of(values, mask)


class Total(State):
    """A sum, which does not drift over a long run.

    Attributes:
        exact: float32 (float64 for 64-bit values) and its error.

    Example:
        >>> (Total(jnp.float32(1)) | Total(jnp.float32(2))).compute().item()
        3.0
    """

    exact: TwoFloat = sum_field(exact=True)

    def compute(self) -> Inexact[Array, ""]:
        """The sum; 0 of nothing."""
        return self.exact.value


@config
class Sum(Metric):
    """The sum of values: sum(values where mask), 0 of nothing; numpy's `sum`.

    Ints and bools count as their float32 values, bf16 is summed in float32; the sums of batches are added with their
    rounding errors.

    Example:
        >>> values, mask = jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False])
        >>> Sum(values="preds").from_values(values, mask).compute().item()
        3.0
    """

    values: KeyPath
    """Key path of the values, any numeric dtype, `*m *n`; `*m` is the shape of the mask. All elements are added."""

    def from_values(self, values: Shaped[Array, "..."], mask: Bool[Array, "..."]) -> Total:
        """Sum of the values that the mask keeps."""
        return Total(TwoFloat.of(kept(values, mask).sum()))


class Lowest(State):
    """The smallest value.

    Attributes:
        value: of the dtype of the values.

    Example:
        >>> (Lowest(jnp.int32(1)) | Lowest(jnp.int32(2))).compute().item()
        1
    """

    value: Shaped[Array, ""] = min_field()

    def compute(self) -> Shaped[Array, ""]:
        """The smallest value; of nothing +inf, or the largest int."""
        return self.value


class Highest(State):
    """The largest value.

    Attributes:
        value: of the dtype of the values.

    Example:
        >>> (Highest(jnp.int32(1)) | Highest(jnp.int32(2))).compute().item()
        2
    """

    value: Shaped[Array, ""] = max_field()

    def compute(self) -> Shaped[Array, ""]:
        """The largest value; of nothing -inf, or the smallest int."""
        return self.value


@config
class Min(Metric):
    """The smallest value: min(values where mask), numpy's `min`.

    A nan that counts makes it nan. Of nothing it is what changes no minimum: +inf, or the largest int of the dtype.

    Example:
        >>> values, mask = jnp.array([3.0, 2.0, jnp.nan]), jnp.array([True, True, False])
        >>> Min(values="preds").from_values(values, mask).compute().item()
        2.0
    """

    values: KeyPath
    """Key path of the values, any real dtype, `*m *n`; `*m` is the shape of the mask."""

    def from_values(self, values: Shaped[Array, "..."], mask: Bool[Array, "..."]) -> Lowest:
        """The smallest of the values that the mask keeps."""
        nothing = empty_state(Lowest(jnp.zeros((), values.dtype))).value  # what changes no minimum
        chosen = jnp.where(each(values, mask), values, jnp.full_like(values, nothing))
        return Lowest(chosen.min(initial=nothing))


@config
class Max(Metric):
    """The largest value: max(values where mask), numpy's `max`.

    A nan that counts makes it nan. Of nothing it is what changes no maximum: -inf, or the smallest int of the dtype.

    Example:
        >>> values, mask = jnp.array([3.0, 2.0, jnp.nan]), jnp.array([True, True, False])
        >>> Max(values="preds").from_values(values, mask).compute().item()
        3.0
    """

    values: KeyPath
    """Key path of the values, any real dtype, `*m *n`; `*m` is the shape of the mask."""

    def from_values(self, values: Shaped[Array, "..."], mask: Bool[Array, "..."]) -> Highest:
        """The largest of the values that the mask keeps."""
        nothing = empty_state(Highest(jnp.zeros((), values.dtype))).value  # what changes no maximum
        chosen = jnp.where(each(values, mask), values, jnp.full_like(values, nothing))
        return Highest(chosen.max(initial=nothing))
