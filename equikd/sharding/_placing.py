"""Putting things where the rules say: batches and states on their way to a program, and values inside a trace."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd._compat import Tracer
from equikd.sharding._spread import Spread, spread_of


def place(batch: Any, spread: Spread | None = None, axis: int = 0) -> Any:
    """A batch as the compiled step takes it.

    Args:
        batch: a pytree of host or device arrays, batch axis first.
        spread: the devices; None: one.
        axis: of the rows; of several batches in one array, 1.

    Returns:
        The batch; host arrays stay on the host, which jit transfers faster than a call of its own would. All feeding
        goes through here.

    Raises:
        DataError: the devices do not divide the rows.

    Example:
        >>> place({"x": 1})
        {'x': 1}
    """
    return batch if spread is None else jax.tree.map(lambda array: spread.fed(array, axis), batch)


def home(tree: Any) -> jax.sharding.SingleDeviceSharding | None:
    """The device of a state: the one that its arrays are committed to, or JAX's default device.

    Args:
        tree: a pytree; leaves that are no arrays on a device, such as shapes, have no say.

    Returns:
        None where arrays are spread over devices: each then keeps its own sharding.

    Example:
        >>> home({"x": 1}).device_set == {jax.local_devices()[0]}
        True
    """
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)]
    devices = {device for array in arrays if array.committed for device in array.devices()}
    devices = devices or jnp.zeros(()).devices()
    return jax.sharding.SingleDeviceSharding(devices.pop()) if len(devices) == 1 else None


def settle(tree: Any, spread: Spread | None = None) -> Any:
    """A train state, or part of one, whose arrays are committed to their places; if they are there, they stay.

    Args:
        tree: a pytree; what is no array stays as it is.
        spread: the devices; None: the home of the tree.

    Example:
        >>> settle({"x": jnp.zeros(3), "name": "x"})["x"].committed
        True
    """
    arrays, others = eqx.partition(tree, eqx.is_array)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        return tree
    where = home(arrays) if spread is None else jax.tree.map(spread.of, arrays)
    return tree if where is None else eqx.combine(jax.device_put(arrays, where), others)


def everywhere(tree: Any, spread: Spread | None) -> Any:
    """Inside a trace: results that are whole on each device, whatever XLA would choose. None: the tree itself."""
    return tree if spread is None else eqx.filter_shard(tree, spread.whole)


def micro_batches(tree: Any, spread: Spread | None) -> Any:
    """Inside a trace: arrays with the axis of micro-batches first, each of which is spread over all devices.

    Without it, XLA would leave the rows where they are, and most devices would wait while few compute a micro-batch.
    Rows that the devices do not divide are left to XLA.
    """
    if spread is None:
        return tree
    constrained = lambda leaf: jax.lax.with_sharding_constraint(leaf, spread.along(1))
    fits = lambda leaf: leaf.ndim > 1 and leaf.shape[1] % spread.devices == 0
    return jax.tree.map(lambda leaf: constrained(leaf) if fits(leaf) else leaf, tree)


def filled_rows(config: Any, rows: int) -> int:
    """How many rows a batch of an eval or a prediction is filled up to, for the devices to divide it.

    A model that takes whole batches, or some of their arrays unmapped, would see the padding: its batches stay as they
    are, and each device computes all of one that does not divide.

    Args:
        config: a trainer or its `in_step`.
        rows: of the batch.
    """
    spread = spread_of(config)
    return rows if spread is None or config.unmapped or not config.per_example else spread.filled(rows)
