"""What the devices of a mesh hold: which arrays of the train state are spread, and the bytes that leaves on one."""

import dataclasses
from typing import Any

import jax

from equikd.data import batch_size
from equikd.sharding import spread_of
from equikd.train._setup import Setup
from equikd.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class Devices:
    """What the devices of a mesh hold.

    Attributes:
        count: of the devices.
        rows: of a training batch on each.
        bytes: of the train state in all.
        bytes_each: of the train state on one device.
        spread: path of each array of the train state that is spread -> its shape on one device.
        undivided: large arrays that stay whole, since the number of devices divides none of their axes, by path.
    """

    count: int
    rows: int
    bytes: int
    bytes_each: int
    spread: dict[str, jax.ShapeDtypeStruct]
    undivided: dict[str, jax.ShapeDtypeStruct]


def devices_of(setup: Setup) -> Devices | None:
    """What the devices hold, or None for one device without a mesh."""
    mesh = spread_of(setup.config)
    if mesh is None:
        return None
    leaves = {path: leaf for path, leaf in named_leaves(setup.state).items() if hasattr(leaf, "dtype")}
    large = {path: leaf for path, leaf in leaves.items() if mesh.is_large(leaf)}
    parts = {
        path: jax.ShapeDtypeStruct(mesh.of(leaf).shard_shape(leaf.shape), leaf.dtype)
        for path, leaf in large.items()
        if mesh.axis(leaf) is not None
    }
    undivided = {path: leaf for path, leaf in large.items() if path not in parts}
    each = sum(_bytes(parts.get(path, leaf)) for path, leaf in leaves.items())
    rows = batch_size(setup.spec) // mesh.devices
    return Devices(mesh.devices, rows, sum(map(_bytes, leaves.values())), each, parts, undivided)


def uneven_parts(setup: Setup) -> list[str]:
    """A warning of micro-batches that the devices do not divide."""
    mesh, parts = spread_of(setup.config), setup.config.accumulate
    if mesh is None or parts == 1 or batch_size(setup.spec) % (parts * mesh.devices) == 0:
        return []
    size = -(-batch_size(setup.spec) // parts)
    return [f"accumulate: {mesh.devices} devices do not divide a micro-batch of {size} rows, so devices repeat work"]


def _bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize
