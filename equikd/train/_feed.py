"""How training batches reach the step: as row numbers of data on the device, or from the host, drawn ahead.

`InMemory` data that fits is put on the device once; from then on a dispatch is given nothing but row numbers, and the
step takes the rows. Other data comes as numpy arrays, which jit sends faster than `device_put` would; a thread draws
them ahead. Either way the batches, and their order, are those of `pipeline.batches(start, seed)`.
"""

import itertools
import os
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from equikd.data import Batch, InMemory, batch_size
from equikd.data._memory import Order
from equikd.data._pipeline import all_real, own_batch
from equikd.errors import DataError, message
from equikd.train._padding import unpadded
from equikd.train._prefetch import Prefetched
from equikd.train._program import ONE, Kind
from equikd.train._setup import Setup
from equikd.train._stepper import Fed, Stepper
from equikd.tree import named_leaves

_SHARE = 4  # data goes on the device where it takes at most one part in so many of what is free there


class Feed(Protocol):
    """Where the loop takes its batches from.

    Attributes:
        most: batches of a dispatch.
    """

    most: int

    def draw(self, count: int) -> Fed | None:
        """The next `count` batches, or as many as there are; None where there are none."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class DeviceFeed:
    """Row numbers of data that lies on the device.

    Args:
        table: pytree of arrays on the device, rows first.
        order: of the rows.
        start: number of the first batch.
        most: batches of a dispatch.
    """

    def __init__(self, table: Any, order: Order, start: int, most: int) -> None:
        self._table, self._order, self._next = table, order, start
        self.most, self._kind = most, Kind(most, gathered=True)
        self._full = all_real(order.size)
        # Sent once; jit would send it with each call.
        where = jax.tree.leaves(table)[0].sharding
        self._all_full = jax.device_put(np.ones((most, order.size), bool), where) if most > 1 else None

    def draw(self, count: int) -> Fed:
        """The row numbers of the next batches; there is no end to them."""
        number, size = self._next, self._order.size
        if self._kind.most == 1:
            self._next += 1
            picks, real = self._order.batch(number)
            mask = self._full if real == size else np.arange(size) < real
            return Fed(self._kind, 1, picks, mask, self._table)
        self._next += count
        picks, mask = self._order.batches(number, count, self._kind.most)
        return Fed(self._kind, count, picks, self._all_full if mask is None else mask, self._table)

    def close(self) -> None:
        """Nothing is open."""


class HostFeed:
    """Batches from the host.

    Args:
        batches: from the first one on.
        spec: of a batch.
        most: batches of a dispatch.
        prefetch: batches that a thread draws ahead; 0: none are.
    """

    def __init__(self, batches: Iterator[Batch], spec: Batch, most: int, prefetch: int) -> None:
        drawn = (_owned(batch) for batch in batches)
        self._batches = Prefetched(drawn, max(prefetch, most)) if prefetch else drawn
        self.most, self._spec, self._kind = most, spec, ONE if most == 1 else Kind(most)
        self._full = np.ones((most, batch_size(spec)), bool)
        self._drawn = 0

    def draw(self, count: int) -> Fed | None:
        """The next batches, in one array of each kind.

        Raises:
            DataError: one of several has another shape than the others.
        """
        if self._kind is ONE:
            batch = next(self._batches, None)
            return None if batch is None else Fed(ONE, 1, batch.data, batch.mask)
        batches = []
        while len(batches) < count and (batch := next(self._batches, None)) is not None:
            self._refuse_other(batch)
            batches.append(batch)
            self._drawn += 1
        if not batches:
            return None
        most, shared = self._kind.most, all_real(batch_size(self._spec))
        data = jax.tree.map(lambda *leaves: _stacked(leaves, most), *[batch.data for batch in batches])
        all_full = all(batch.mask is shared for batch in batches)
        mask = self._full if all_full else _stacked([batch.mask for batch in batches], most)
        return Fed(self._kind, len(batches), data, mask)

    def _refuse_other(self, batch: Batch) -> None:
        got, expected = ({p: _spelt(leaf) for p, leaf in named_leaves(one).items()} for one in (batch, self._spec))
        if got == expected and jax.tree.structure(batch) == jax.tree.structure(self._spec):
            return
        wrong = [path for path in {**expected, **got} if got.get(path) != expected.get(path)]
        lines = [f"{path}: {got.get(path, 'nothing')}, not {expected.get(path, 'there')}" for path in wrong]
        what = f"train_data: batch {self._drawn} of this session is not like the first, so several are not one array"
        fix = "pad to one shape (`ek.data.pad`), or set steps_per_call=1"
        raise DataError(message(what, got="\n".join(lines) or "other containers", fix=fix))

    def close(self) -> None:
        """Draws no more."""
        self._batches.close()


def _owned(batch: Any) -> Batch:
    """A batch of arrays that nobody writes over; the mask of a full one is shared, and says that this is so."""
    if type(batch) is Batch and batch.mask is all_real(len(batch.mask)):
        return batch
    return own_batch(batch)


def _spelt(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _stacked(leaves: Any, most: int) -> Any:
    """Arrays as one, of `most`; nobody reads what comes after them."""
    if any(isinstance(leaf, jax.Array) for leaf in leaves):
        return jnp.stack([*leaves, *[leaves[-1]] * (most - len(leaves))])
    stack = np.empty((most, *leaves[0].shape), leaves[0].dtype)
    for place, leaf in enumerate(leaves):
        stack[place] = leaf
    return stack


def feed_of(setup: Setup, stepper: Stepper, start: int, most: int) -> Feed:
    """The training batches from number `start` on.

    Args:
        setup: the checked experiment.
        stepper: says where they are needed.
        start: number of the first one.
        most: batches of a dispatch.

    Raises:
        DataError: there are none.
    """
    batches = batches_from(setup, start)
    data, where = setup.data, stepper.device
    if where is not None and isinstance(data, InMemory) and fits(data, where):
        return DeviceFeed(data.table.on_device(where), data.order(setup.seed), start, most)
    needed = itertools.islice(unpadded(batches, setup.config, ""), setup.num_steps - start)
    return HostFeed(needed, setup.spec, most, setup.prefetch)


def batches_from(setup: Setup, start: int) -> Iterator[Batch]:
    """The training batches from number `start` on, as the data gives them.

    Raises:
        DataError: there are none.
    """
    try:
        return setup.data.batches(start, setup.seed)
    except DataError as error:
        raise DataError(f"train_data: {error}") from error


def fits(data: Any, where: jax.sharding.SingleDeviceSharding | None) -> bool:
    """Whether data goes on the device as a whole.

    Args:
        data: the training pipeline.
        where: the device; None: there are several.
    """
    return where is not None and type(data) is InMemory and data.table.nbytes * _SHARE <= free_bytes(where)


def free_bytes(where: jax.sharding.SingleDeviceSharding) -> int:
    """The bytes that are free on a device; on a CPU, in the memory of the machine."""
    (device,) = where.device_set
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return 2**32
