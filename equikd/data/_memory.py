"""`InMemory`: arrays that fit the host's memory, shuffled anew each epoch.

The order of an epoch is `numpy.random.default_rng((seed, epoch)).permutation(rows)`: a function of the seed and the
epoch, and of nothing else. So batch number k of a run is known without drawing those before it, and a resumed run goes
on with the very batch that would have come next. Arrays are brought into the dtypes that JAX computes with once, at
first use; a batch then costs one `take` an array.

Where the arrays fit on the device, a run puts them there once, and its step takes the rows of a batch itself: all that
the host then hands over are row numbers. These come from the same `Order`, so both ways give the same batches.
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
class Table:
    """Arrays ready to take rows from.

    Attributes:
        columns: the arrays, rows first.
        structure: of a whole `Batch`: unflattening skips its constructor, which costs as much as taking the rows.
        rows: how many there are.
    """

    columns: list[np.ndarray]
    structure: Any
    rows: int
    _placed: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(column.nbytes for column in self.columns)

    def on_device(self, where: Any) -> Any:
        """The `data` of a batch of all rows, on a device; put there once.

        Args:
            where: a sharding.
        """
        if where not in self._placed:
            columns = jax.device_put(self.columns, where)
            self._placed[where] = self.structure.unflatten([*columns, all_real(self.rows)]).data
        return self._placed[where]


class Order:
    """Which rows the batches of a training stream hold: a function of the seed and the epoch alone.

    Example:
        >>> order = Order(rows=5, size=2, seed=0, shuffle=False, drop_remainder=False)
        >>> order.per_epoch, [(picks.tolist(), real) for picks, real in map(order.batch, (0, 2, 3))]
        (3, [([0, 1], 2), ([4, 4], 1), ([0, 1], 2)])
    """

    def __init__(self, rows: int, size: int, seed: int, shuffle: bool, drop_remainder: bool) -> None:
        self.rows, self.size, self.seed, self.shuffle = rows, size, seed, shuffle
        self.per_epoch = rows // size if drop_remainder else -(-rows // size)
        self._full = rows // size
        self._dtype = np.int32 if rows < 2**31 else np.int64
        self._epoch, self._rows = -1, np.arange(0)

    def batch(self, number: int) -> tuple[np.ndarray, int]:
        """The row numbers of a batch, int32 `size`, and how many of them are real; the others repeat its first row.

        Args:
            number: of the batch, over all epochs, from 0.
        """
        epoch, place = divmod(number, self.per_epoch)
        picks = self._of(epoch)[place * self.size : (place + 1) * self.size]
        if place < self._full:
            return picks, self.size
        filler = np.full(self.size - len(picks), picks[0], self._dtype)
        return np.concatenate([picks, filler]), len(picks)

    def batches(self, number: int, count: int, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The row numbers of `count` batches from one on, int32 `length size`; and, bool of that shape, which are real.

        Args:
            number: of the first batch.
            count: how many, at most `length`; what comes after them is 0.
            length: of the first axis.

        Returns:
            The row numbers; and None where all rows are real.
        """
        picks, real = np.zeros((length, self.size), self._dtype), None
        done = 0
        while done < count:
            epoch, place = divmod(number + done, self.per_epoch)
            if place < self._full:
                some = min(count - done, self._full - place)
                rows = self._of(epoch)[place * self.size : (place + some) * self.size]
                picks[done : done + some] = rows.reshape(some, self.size)
            else:
                some = 1
                picks[done], kept = self.batch(number + done)
                real = np.ones((length, self.size), bool) if real is None else real
                real[done] = real_rows(kept, self.size)
            done += some
        return picks, real

    def _of(self, epoch: int) -> np.ndarray:
        if self._epoch != epoch and (self.shuffle or self._epoch < 0):
            order = order_of(self.seed, epoch, self.rows) if self.shuffle else np.arange(self.rows)
            self._epoch, self._rows = epoch, order.astype(self._dtype)
            self._rows.flags.writeable = False  # batches are views of it
        return self._rows


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
        return _stream(_table(data), data.order(seed), int(start))

    def order(self, seed: int) -> Order:
        """Which rows the training batches hold.

        Args:
            seed: not negative; used where the field `seed` is None.

        Raises:
            DataError: `batch_size` is larger than the data and `drop_remainder` is on.
        """
        data = resolved(self)
        rows, size = _table(data).rows, data.batch_size
        order = Order(rows, size, int(seed) if data.seed is None else data.seed, data.shuffle, data.drop_remainder)
        if not order.per_epoch:
            raise DataError(
                message(
                    "InMemory: a batch is larger than the data, so that no batch is ever full",
                    got=f"batch_size={size}, {rows} rows",
                    expected=f"batch_size <= {rows}",
                    fix="lower batch_size, or pad: InMemory(..., drop_remainder=False)",
                )
            )
        return order

    @property
    def table(self) -> Table:
        """The arrays, ready to take rows from."""
        return _table(resolved(self))

    def epoch(self) -> Iterator[Batch]:
        """All rows once, in order; the last batch is padded to `batch_size`.

        Full batches are read-only views of the arrays.
        """
        data = resolved(self)
        table, size = _table(data), data.batch_size
        return (_batch(table, start, size) for start in range(0, table.rows, size))

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


def _stream(table: Table, order: Order, start: int) -> Iterator[Batch]:
    mask, size, unflatten = all_real(order.size), order.size, table.structure.unflatten
    for number in itertools.count(start):
        if not order.shuffle:
            yield _batch(table, number % order.per_epoch * size, size)  # views, where they are whole
            continue
        picks, real = order.batch(number)
        rows = [column.take(picks, 0) for column in table.columns]
        yield unflatten([*rows, mask if real == size else real_rows(real, size)])


def _batch(table: Table, start: int, size: int) -> Batch:
    """The rows from a place on as they stand, padded with copies of the first one."""
    count = min(size, table.rows - start)
    if count == size:
        taken = [column[start : start + size] for column in table.columns]
    else:
        places = np.full(size, start)
        places[:count] += np.arange(count)
        taken = [column.take(places, 0) for column in table.columns]
    return table.structure.unflatten([*taken, real_rows(count, size)])


def _table(data: InMemory) -> Table:
    kept = data.__dict__.get("_table")
    if kept is None or kept[0] is not x64_enabled():
        data.validate()
        kept = data.__dict__["_table"] = (x64_enabled(), _made_table(data.arrays))
    return kept[1]


def _made_table(arrays: Any) -> Table:
    try:
        on_host = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, arrays)
    except TypeError as error:  # PRNG keys have no numpy form
        raise DataError(message("InMemory: an array has no numpy form", got=str(error))) from None
    columns, structure, rows = aligned(on_host, "InMemory")
    of_batch = jax.tree.structure(Batch(structure.unflatten(columns), all_real(rows)))
    return Table([_frozen(column) for column in columns], of_batch, rows)


def _frozen(array: np.ndarray) -> np.ndarray:
    """A read-only view, for nobody shall write into the data through a batch; contiguous, or each `take` copies all."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
