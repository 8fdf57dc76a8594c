"""What to say when the device runs out of memory: how big the batch is, what is largest, and the ways out.

The error comes out of whichever call waits for the device, often a read long after the step that failed; so the whole
loop is watched, and the exception keeps its type and gains a note.
"""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

from equikd.data import batch_size
from equikd.errors import message
from equikd.train._setup import Setup
from equikd.tree import named_leaves

_LARGEST = 5


@contextlib.contextmanager
def memory_explained(setup: Setup) -> Iterator[None]:
    """A context in which an out-of-memory error of XLA gains a note."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # Backends disagree on the status: the CPU's says INTERNAL where the dispatch itself fails.
        if "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower():
            error.add_note(advice(setup))
        raise


def advice(setup: Setup) -> str:
    """Batch size, largest leaves of state and batch, and the ways out."""
    leaves = {**named_leaves(setup.state), **named_leaves({"batch": setup.spec.data})}
    sized = {path: leaf for path, leaf in leaves.items() if hasattr(leaf, "shape")}
    size = {path: int(np.prod(leaf.shape)) * leaf.dtype.itemsize for path, leaf in sized.items()}
    largest = sorted(size, key=lambda path: -size[path])[:_LARGEST]
    rows = [f"{p}: {sized[p].dtype}{list(sized[p].shape)}, {readable(size[p])}" for p in largest]
    ways = [
        "a smaller batch_size, of train_data or of the eval's data",
        "recompute activations (remat): eqx.filter_checkpoint around the layers",
        f"accumulate the gradients of micro-batches: Trainer(accumulate={2 * setup.config.accumulate})",
    ]
    if setup.config.precision is None:
        ways.append("activations in bfloat16: Trainer(precision=ek.optim.Precision())")
    if setup.config.mesh is None and jax.local_device_count() > 1:
        ways.append("spread parameters over the devices: Trainer(mesh=ek.sharding.fsdp())")
    ways.append("`equikd check MODULE --memory` tells the bytes of the step before it runs")
    return message(
        "the device ran out of memory in a step or an eval",
        got=f"batches of {batch_size(setup.spec)} rows; the largest leaves:\n" + "\n".join(rows),
        fix="\n".join(ways),
    )


def readable(count: int) -> str:
    """Bytes as a person reads them.

    Example:
        >>> readable(512), readable(40_000)
        ('512 B', '39.1 KiB')
    """
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"
