"""Metrics of how values are spread: variance, standard deviation, histogram."""

import jax.numpy as jnp
import numpy as np

from equikd.config import config
from equikd.errors import ConfigError, message
from equikd.metrics._base import Metric
from equikd.metrics._elements import arrays_of, counted, each, wide
from equikd.metrics._moments import Moments, moments_field
from equikd.metrics._state import State, max_field, static_field, sum_field
from equikd.metrics._summaries import BinCounts
from equikd.typing import Array, Bool, Float, Int, Integer
from equikd.wiring import KeyPath


class Spread(State):
    """Squared deviations from the mean, merged as `_moments.py` says.

    Attributes:
        moments: count, mean and sum of squared deviations.
        root: whether the value is the standard deviation.

    Example:
        >>> every = jnp.ones(1, bool)
        >>> first, second = Moments.of(jnp.array([1.0]), every), Moments.of(jnp.array([3.0]), every)
        >>> (Spread(first) | Spread(second)).compute().item()
        1.0
    """

    moments: Moments = moments_field()
    root: bool = static_field(default=False)

    def compute(self) -> Float[Array, ""]:
        """The population variance or its root; nan of nothing."""
        variance = self.moments.variance()
        return arrays_of(variance).sqrt(variance) if self.root else variance


@config
class Variance(Metric):
    """The population variance: mean((values - mean(values))^2), numpy's `var`; nan of nothing.

    It keeps its digits where the mean is large and the deviation small: batches merge by Chan, Golub and LeVeque
    (1983). Ints, bools and bf16 count as their float32 values.

    Example:
        >>> values, mask = jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])
        >>> Variance(values="preds").from_values(values, mask).compute().item()
        1.0
    """

    values: KeyPath
    """Key path of the values, any real dtype, `*m *n`; `*m` is the shape of the mask."""

    def from_values(
        self, values: Float[Array, "..."] | Integer[Array, "..."] | Bool[Array, "..."], mask: Bool[Array, "..."]
    ) -> Spread:
        """Squared deviations of the values that the mask keeps."""
        return Spread(Moments.of(values, mask))


@config
class Std(Metric):
    """The population standard deviation: sqrt(mean((values - mean(values))^2)), numpy's `std`; nan of nothing.

    As exact as `Variance`: right to three digits at mean 1e4 and deviation 0.03, also over many batches.

    Example:
        >>> values, mask = jnp.array([1.0, 5.0, jnp.nan]), jnp.array([True, True, False])
        >>> Std(values="preds").from_values(values, mask).compute().item()
        2.0
    """

    values: KeyPath
    """Key path of the values, any real dtype, `*m *n`; `*m` is the shape of the mask."""

    def from_values(
        self, values: Float[Array, "..."] | Integer[Array, "..."] | Bool[Array, "..."], mask: Bool[Array, "..."]
    ) -> Spread:
        """Squared deviations of the values that the mask keeps."""
        return Spread(Moments.of(values, mask), root=True)


class Bins(State):
    """Counts of values by bin.

    Attributes:
        counts: int32 (int64 under x64), one for each bin.
        below: how many lie below the first bin.
        above: how many lie above the last bin, nan among them.
        edges: float, of the bins; -inf where nothing was counted. They come with each batch, since they may be traced.

    Example:
        >>> one = jnp.int32(1)
        >>> state = Bins(jnp.array([2, 0]), one, one, jnp.array([0.0, 0.5, 1.0]))
        >>> (state | state).compute()
        BinCounts(4 in 2 bins from 0 to 1, 2 below, 2 above)
    """

    counts: Int[Array, " bins"] = sum_field()
    below: Int[Array, ""] = sum_field()
    above: Int[Array, ""] = sum_field()
    edges: Float[Array, " edges"] = max_field()

    def compute(self) -> BinCounts:
        """The counts as a summary."""
        edges = np.asarray(self.edges)
        edges = np.where(np.isneginf(edges), np.nan, edges)
        return BinCounts(np.asarray(self.counts), edges, int(self.below), int(self.above))


@config
class Histogram(Metric):
    """How many values lie in each of some bins of equal width, as numpy's `histogram(values, bins, (low, high))`.

    A bin holds its lower edge, the last one both. What lies outside is counted as `below` or `above`, a nan as `above`.
    The counts are those of elements, 0 of nothing; `low` and `high` may change without a new compile. The value is a
    summary, `BinCounts`, which TensorBoard shows as a histogram; `result.summaries` has the counts.

    Example:
        >>> values, mask = jnp.array([0.1, 0.6, 1.0, 7.0, jnp.nan]), jnp.array([True, True, True, True, False])
        >>> found = Histogram(values="preds", bins=2).from_values(values, mask).compute()
        >>> found, found.counts.tolist()
        (BinCounts(3 in 2 bins from 0 to 1, 0 below, 1 above), [1, 2])
    """

    values: KeyPath
    """Key path of the values, any real dtype, `*m *n`; `*m` is the shape of the mask."""
    low: float = 0.0
    """Lower edge of the first bin."""
    high: float = 1.0
    """Upper edge of the last bin."""
    bins: int = 10
    """Number of bins."""

    def validate(self) -> None:
        """Refuse a range without width, or no bins."""
        if not (self.bins >= 1 and self.low < self.high):
            got = f"bins={self.bins}, low={self.low}, high={self.high}"
            raise ConfigError(message("Histogram: no bins", got=got, expected="bins >= 1 and low < high"))

    def edges(self) -> Float[Array, " edges"]:
        """The bins + 1 edges."""
        steps = jnp.arange(self.bins + 1, dtype=jnp.result_type(float))
        # Edges that are whole numbers are so to the bit, and a label stands on its edge. XLA multiplies by a rounded
        # 1 / bins where we divide, so the quotient is corrected by what it leaves over.
        scaled = self.low * (self.bins - steps) + self.high * steps
        quotient = scaled / self.bins
        return quotient + (scaled - quotient * self.bins) / self.bins

    def from_values(
        self, values: Float[Array, "..."] | Integer[Array, "..."] | Bool[Array, "..."], mask: Bool[Array, "..."]
    ) -> Bins:
        """Counts of the values that the mask keeps."""
        keep, values = each(values, mask), wide(values)
        edges = self.edges().astype(values.dtype)
        index = jnp.searchsorted(edges, values, side="right") - 1
        index = jnp.where(values == edges[-1], self.bins - 1, index)
        counts = counted(index + 1, keep, self.bins + 2)
        known = jnp.where(keep.any(), edges, jnp.full_like(edges, -jnp.inf))
        return Bins(counts[1:-1], counts[0], counts[-1], known)
