"""Metrics of plain values: the mean over all rows that count."""

from equikd.config import config
from equikd.metrics._average import Average
from equikd.metrics._base import Metric
from equikd.typing import Array, Bool, Shaped
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
