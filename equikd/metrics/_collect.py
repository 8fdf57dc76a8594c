"""`CollectFirst`: the first rows themselves, for a look at what a model predicts."""

import functools
from collections.abc import Callable

from equikd.config import config
from equikd.errors import ConfigError, message
from equikd.metrics._base import Metric
from equikd.metrics._rows import Rows
from equikd.metrics._state import State, truncate_field
from equikd.metrics._summaries import Values
from equikd.typing import Array, Bool, Num, PyTree
from equikd.wiring import KeyPath


@functools.cache  # the state's class is part of the program: one for each n, for good
def first_rows_of(n: int) -> Callable[[Rows], State]:
    """The class of states that keep the first n rows."""

    class FirstRows(State):
        """The first real rows.

        Attributes:
            rows: of any tree of arrays.
        """

        __qualname__ = "FirstRows"
        rows: Rows = truncate_field(n)

        def compute(self) -> Values:
            """The real rows, numpy arrays `rows ...` in the tree they came in; of nothing none."""
            return Values(self.rows.real())

    return FirstRows


@config
class CollectFirst(Metric):
    """The first n real rows of an interval or dataset, in order, as `Values`; fewer where there are fewer.

    Rows of padding, and those that the mask leaves out, are passed over, and n rows are all that is kept in memory.

    Example:
        >>> import jax.numpy as jnp
        >>> preds, mask = jnp.array([3, 1, 4, 1, 5]), jnp.array([True, False, True, True, True])
        >>> CollectFirst(values="preds", n=3).from_values(preds, mask).compute().values.tolist()
        [3, 4, 1]
    """

    values: KeyPath
    """Key path of any tree of arrays that have the batch axis first, `b ...`: `preds`, `batch.image`, `batch`."""
    n: int = 8
    """How many rows are kept."""

    def validate(self) -> None:
        """Refuse to keep nothing."""
        if self.n < 1:
            raise ConfigError(message("CollectFirst.n: no rows are kept", got=str(self.n), expected="n >= 1"))

    def from_values(self, values: PyTree[Num[Array, "b ..."] | Bool[Array, "b ..."]], mask: Bool[Array, " b"]) -> State:
        """The first rows that the mask keeps."""
        return first_rows_of(self.n)(Rows(values, mask))
