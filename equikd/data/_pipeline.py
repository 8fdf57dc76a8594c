"""Batches and the protocol of what yields them.

A compiled program has one shape, so a pipeline yields batches of one fixed size, and a *mask* says which rows are
real: `Batch(data, mask)`, a pytree. Where the rows run out, the last batch is filled up with copies of a real row
(`pad`), which losses and metrics leave out. A bare pytree of arrays is a batch whose rows are all real.

A `Pipeline` has three methods. `batches(start, seed)` is the training stream from batch number `start` on: since the
order depends on nothing but the seed, a position in it is one integer, all that a checkpoint stores of it. `epoch()` is
one pass in order, every row once, for evals. `spec()` is the shape of a batch, known before a run draws any.
"""

import functools
import operator
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np

from equikd.config import resolve
from equikd.config._dataclass import fields_of
from equikd.config._resolve import references
from equikd.config._values import is_part
from equikd.data._arrays import aligned, spell_array
from equikd.errors import DataError, message
from equikd.tree import walk
from equikd.typing import Array, Bool, PyTree


class Batch(eqx.Module):
    """Rows, and which of them are real.

    Attributes:
        data: pytree of arrays, `b` rows each; key paths read it as `batch`.
        mask: bool `b`; a row where it is False is padding and never changes a result.

    Example:
        >>> Batch({"x": np.zeros((2, 3))}, np.array([True, False])).mask.tolist()
        [True, False]
    """

    data: PyTree
    mask: Bool[Array | np.ndarray, " b"]


@runtime_checkable
class Pipeline(Protocol):
    """What a trainer and its evals read batches from. All batches of a pipeline fit its `spec`.

    The arrays of a batch are not written again once it is handed out, for the step may read them later; `as_batch`
    copies those of a bare pytree.

    Example:
        >>> class Noise:
        ...     def batches(self, start, seed):
        ...         for number in itertools.count(start):
        ...             yield as_batch(np.random.default_rng((seed, number)).normal(size=(8, 2)))
        ...     def epoch(self):
        ...         return itertools.islice(self.batches(0, 0), 4)
        ...     def spec(self):
        ...         return element_spec(next(self.epoch()))
        >>> import itertools
        >>> isinstance(Noise(), Pipeline)
        True
    """

    def batches(self, start: int, seed: int) -> Iterator[Batch]:
        """The training stream from batch number `start` on; its order is a function of the seed alone. It may end."""
        ...

    def epoch(self) -> Iterator[Batch]:
        """One pass in order: every row exactly once, the last batch padded to the one fixed size."""
        ...

    def spec(self) -> Batch:
        """A batch of `jax.ShapeDtypeStruct`."""
        ...


def as_batch(element: Any) -> Batch:
    """An element as a batch, its arrays in the dtypes that JAX computes with.

    Args:
        element: a `Batch`, or a bare pytree of arrays with `b` rows each, all of them real. Whatever numpy reads as an
            array is one (a CPU tensor of torch, too); arrays of JAX and tracers stay what they are. The arrays of a
            bare pytree are copied, for the step may still read them when their owner writes the next batch over them.

    Returns:
        The batch; its mask is a read-only numpy array unless the element brings its own.

    Raises:
        DataError: a leaf is no array or has no rows, a number does not fit its dtype, the arrays disagree about the
            number of rows, or the mask does not fit; all at once, each with its path.

    Example:
        >>> as_batch({"x": np.zeros((2, 3)), "y": np.arange(2)}).data["y"].dtype
        dtype('int32')
    """
    data, mask = (element.data, element.mask) if isinstance(element, Batch) else (element, None)
    leaves, structure, rows = aligned(data, "the batch")
    if mask is None:
        return Batch(structure.unflatten(map(_copied, leaves)), all_real(rows))
    if type(mask) is not np.ndarray and not isinstance(mask, jax.Array | jax.ShapeDtypeStruct):
        mask = np.asarray(mask)
    if mask.shape != (rows,) or mask.dtype != bool:
        raise DataError(message("the mask does not fit the batch", got=spell_array(mask), expected=f"bool[{rows}]"))
    if mask is element.mask and all(map(operator.is_, leaves, jax.tree.leaves(data))):
        return element  # as it comes from a pipeline: a new one would cost more than the checks
    return Batch(structure.unflatten(leaves), mask)


def own_batch(element: Any) -> Batch:
    """An element as a batch that shares no memory with arrays of numpy, which their owner may write over.

    JAX on a CPU takes numpy arrays without a copy where they are aligned, and computes after the call has returned. The
    mask of a full batch becomes the shared one, which tells the stepper that the arrays are ours.
    """
    batch = as_batch(element)
    if not isinstance(element, Batch):
        return batch
    mask = batch.mask
    if isinstance(mask, np.ndarray):
        mask = all_real(len(mask)) if mask.all() else mask.copy()
    return Batch(jax.tree.map(_copied, batch.data), mask)


def _copied(array: Any) -> Any:
    return np.array(array) if isinstance(array, np.ndarray) else array


def batch_size(batch: Batch) -> int:
    """The number of rows of a batch, those of padding included.

    Example:
        >>> batch_size(as_batch(np.zeros((5, 2))))
        5
    """
    return batch.mask.shape[0]


def element_spec(batch: Batch) -> Batch:
    """Shapes and dtypes of a batch, as a batch of `jax.ShapeDtypeStruct`.

    Example:
        >>> element_spec(as_batch(np.zeros((5, 2)))).data.shape
        (5, 2)
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def pad(batch: Batch, size: int) -> Batch:
    """A batch filled up to `size` rows with copies of its first row, which the mask leaves out.

    Copies of a real row, because a model may fail on what no real row holds (zeros divide badly). The result is in the
    host's memory.

    Args:
        batch: at most `size` rows.
        size: the number of rows of the result.

    Example:
        >>> padded = pad(as_batch(np.array([3, 4])), 3)
        >>> padded.data.tolist(), padded.mask.tolist()
        ([3, 4, 3], [True, True, False])
    """
    rows = batch_size(batch)
    if rows == size:
        return batch
    picks = np.concatenate([np.arange(rows), np.zeros(size - rows, int)])
    data = jax.tree.map(lambda x: np.asarray(x).take(picks, 0), batch.data)
    return Batch(data, np.asarray(batch.mask).take(picks) & real_rows(rows, size))


@functools.lru_cache(maxsize=1024)
def real_rows(count: int, size: int) -> np.ndarray:
    """The mask of `size` rows whose first `count` are real; shared, hence read-only."""
    mask = np.arange(size) < count
    mask.flags.writeable = False
    return mask


def all_real(size: int) -> np.ndarray:
    """The mask of `size` real rows; shared, hence read-only."""
    return real_rows(size, size)


def exhausted(drawn: int, wanted: int, path: str = "train_data") -> DataError:
    """The error for training data that ends before the run does.

    Args:
        drawn: batches that the data gave, counted from the start of the run.
        wanted: `num_steps`.
        path: the config path of the data.

    Example:
        >>> print(exhausted(7, 100))
        train_data: the data ended after 7 batches, but num_steps is 100
          fix:      set num_steps=7, or give data that goes on, such as ek.data.Iterable(make, repeat=True)
    """
    lower = f"set num_steps={drawn}, or " if drawn else ""
    return DataError(
        message(
            f"{path}: the data ended after {drawn} batches, but num_steps is {wanted}",
            fix=f"{lower}give data that goes on, such as ek.data.Iterable(make, repeat=True)",
        )
    )


def resolved(data: Any, root: Any = None, path: str = "") -> Any:
    """A config whose nodes are built, once: kept in the instance, unless it refers to values outside of it.

    Args:
        data: a config.
        root: the config that its references are looked up in.
        path: where it stands in `root`, for messages.
    """
    if not any(is_part(part) for keys, part in walk(fields_of(data)) if keys):
        return data
    kept = data.__dict__.get("_resolved")
    if kept is None:
        kept = resolve(data, root=root, path=path)
        if not references(data):
            data.__dict__["_resolved"] = kept
    return kept
