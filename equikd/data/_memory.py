"""`InMemory`: arrays that fit the host's memory, shuffled anew each epoch.

The order of an epoch is `numpy.random.default_rng((seed, epoch)).permutation(rows)`: a function of the seed and the
epoch, and of nothing else. So batch number k of a run is known without drawing those before it, and a resumed run goes
on with the very batch that would have come next. Arrays are brought into the dtypes that JAX computes with once, at
first use; a batch then costs one `take` an array.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from equikd.config import config, field
from equikd.config._values import is_part
from equikd.data._arrays import aligned, x64_enabled
from equikd.data._pipeline import Batch, all_real, real_rows, resolved
from equikd.errors import DataError, message


@dataclasses.dataclass(frozen=True)
class _Table:
    """Arrays ready to take rows from."""

    columns: list[np.ndarray]
    structure: Any  # of a whole Batch: unflattening skips its constructor, which costs as much as taking the rows
    rows: int


@config
class InMemory:
    """Batches of the rows of arrays.

    Training shuffles anew each epoch and goes on without end; by default it leaves out the rows at the end of an epoch
    that do not fill a batch (other ones each time). An eval reads all rows in order and pads the last batch.

    The arrays belong to the dataset once given: do not write into them. Some are copied at first use (float64 without
    x64), others are read at each batch, so an edit would reach the one and not the other.

    Raises:
        DataError: at first use, the arrays have no common number of rows, or hold what JAX does not compute with; for
            training, a batch is larger than the data.

    Example:
        >>> data = InMemory({"x": np.arange(10.0), "y": np.arange(10)}, batch_size=4)
        >>> batch = next(data.batches(start=0, seed=0))
        >>> batch.data["x"].dtype.name, sorted(batch.data), batch.mask.tolist()
        ('float32', ['x', 'y'], [True, True, True, True])
        >>> [batch.mask.sum().item() for batch in data.epoch()]
        [4, 4, 2]
    """

    arrays: Any = field(opaque=True)
    """A pytree of arrays with the same number of rows, or a node that loads it: `ek.lazy(load)(...)`."""
    batch_size: int = 32
    """Rows of a batch."""
    shuffle: bool = True
    """Whether training takes the rows in another order each epoch."""
    drop_remainder: bool = True
    """Whether training leaves out the rows that do not fill a batch; otherwise the last batch of an epoch is padded."""
    seed: int | None = None
    """Seed of the order; the trainer's by default."""

    def validate(self) -> None:
        """Refuse a batch without rows and a negative seed."""
        if not is_part(self.batch_size) and self.batch_size < 1:
            raise DataError(message("a batch has one row at least", got=f"batch_size={self.batch_size}"))
        if not is_part(self.seed) and self.seed is not None and self.seed < 0:
            raise DataError(message("a seed is not negative", got=f"seed={self.seed}"))

    @property
    def rows(self) -> int:
        """The number of rows."""
        return _table(resolved(self)).rows

    @property
    def batches_per_epoch(self) -> int:
        """The number of training batches in an epoch: 0 where not even one is full."""
        data = resolved(self)
        rows, size = _table(data).rows, data.batch_size
        return rows // size if data.drop_remainder else -(-rows // size)

    def batches(self, start: int, seed: int) -> Iterator[Batch]:
        """The training stream from batch number `start` on, without end.

        Args:
            start: number of the first batch, over all epochs.
            seed: not negative; used where the field `seed` is None.

        Returns:
            Batches of `batch_size` rows in numpy arrays.

        Raises:
            DataError: `batch_size` is larger than the data and `drop_remainder` is on.
        """
        data = resolved(self)
        table, per_epoch = _table(data), data.batches_per_epoch
        if not per_epoch:
            raise DataError(
                message(
                    "InMemory: a batch is larger than the data, so that no batch is ever full",
                    got=f"batch_size={data.batch_size}, {table.rows} rows",
                    expected=f"batch_size <= {table.rows}",
                    fix="lower batch_size, or pad: InMemory(..., drop_remainder=False)",
                )
            )
        return _stream(table, data, int(start), int(seed) if data.seed is None else data.seed, per_epoch)

    def epoch(self) -> Iterator[Batch]:
        """All rows once, in order; the last batch is padded to `batch_size`.

        Full batches are read-only views of the arrays.
        """
        data = resolved(self)
        table, size = _table(data), data.batch_size
        return (_batch(table, None, start, size) for start in range(0, table.rows, size))

    def spec(self) -> Batch:
        """Shapes and dtypes of a batch."""
        data = resolved(self)
        table, size = _table(data), data.batch_size
        columns = [jax.ShapeDtypeStruct((size, *c.shape[1:]), c.dtype) for c in table.columns]
        return table.structure.unflatten([*columns, jax.ShapeDtypeStruct((size,), bool)])


def order_of(seed: int, epoch: int, rows: int) -> np.ndarray:
    """The row numbers of a training epoch in their order.

    Args:
        seed: not negative.
        epoch: counted from 0.
        rows: the number of rows.

    Returns:
        int64 `rows`, a permutation.

    Example:
        >>> order_of(0, 0, 5).tolist() == np.random.default_rng((0, 0)).permutation(5).tolist()
        True
    """
    if seed < 0:
        raise DataError(message("a seed is not negative", got=str(seed)))
    return np.random.default_rng((seed, epoch)).permutation(rows)


def _stream(table: _Table, data: InMemory, start: int, seed: int, per_epoch: int) -> Iterator[Batch]:
    size, columns, unflatten = data.batch_size, table.columns, table.structure.unflatten
    full, mask = table.rows // size, all_real(size)
    first_epoch, first = divmod(start, per_epoch)
    for epoch in itertools.count(first_epoch):
        order = order_of(seed, epoch, table.rows) if data.shuffle else None
        for number in range(first, per_epoch):
            if order is None or number >= full:
                yield _batch(table, order, number * size, size)
                continue
            picks = order[number * size : (number + 1) * size]
            yield unflatten([*[column.take(picks, 0) for column in columns], mask])
        first = 0


def _batch(table: _Table, order: np.ndarray | None, start: int, size: int) -> Batch:
    """The batch that begins at a place of an order (None: as the rows stand), padded with copies of its first row."""
    count = min(size, table.rows - start)
    if count == size and order is None:
        taken = [column[start : start + size] for column in table.columns]
    else:
        places = np.full(size, start)
        places[:count] += np.arange(count)
        picks = places if order is None else order[places]
        taken = [column.take(picks, 0) for column in table.columns]
    return table.structure.unflatten([*taken, real_rows(count, size)])


def _table(data: InMemory) -> _Table:
    kept = data.__dict__.get("_table")
    if kept is None or kept[0] is not x64_enabled():
        data.validate()
        kept = data.__dict__["_table"] = (x64_enabled(), _made_table(data.arrays))
    return kept[1]


def _made_table(arrays: Any) -> _Table:
    try:
        on_host = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, arrays)
    except TypeError as error:  # PRNG keys have no numpy form
        raise DataError(message("InMemory: an array has no numpy form", got=str(error))) from None
    columns, structure, rows = aligned(on_host, "InMemory")
    of_batch = jax.tree.structure(Batch(structure.unflatten(columns), all_real(rows)))
    return _Table([_frozen(column) for column in columns], of_batch, rows)


def _frozen(array: np.ndarray) -> np.ndarray:
    """A read-only view, for nobody shall write into the data through a batch; contiguous, or each `take` copies all."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
