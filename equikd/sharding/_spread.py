"""The rules: where a batch, the train state and all else go, on a mesh (`Spread`) or on one device (`Home`)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from equikd.config import resolve
from equikd.errors import ConfigError, DataError, listing, message
from equikd.sharding._settings import DataParallel, Fsdp

_AXIS = "data"  # the one axis of the mesh


@dataclasses.dataclass(frozen=True)
class Spread:
    """A mesh, and where arrays go on it.

    Attributes:
        mesh: of one axis.
        min_bytes: of the arrays of the train state that are spread; None: none is.
    """

    mesh: jax.sharding.Mesh
    min_bytes: int | None = None

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.mesh.size

    @functools.cached_property
    def whole(self) -> jax.sharding.NamedSharding:
        """On each device, all of it."""
        return jax.sharding.NamedSharding(self.mesh, jax.P())

    @functools.cached_property
    def rows(self) -> jax.sharding.NamedSharding:
        """On each device, its share of the rows."""
        return self.along(0)

    def along(self, axis: int) -> jax.sharding.NamedSharding:
        """On each device, its share along an axis."""
        return jax.sharding.NamedSharding(self.mesh, jax.P(*[None] * axis, _AXIS))

    def of(self, leaf: Any) -> jax.sharding.NamedSharding:
        """Where an array of the train state goes.

        Args:
            leaf: an array, or the shape of one.
        """
        axis = self.axis(leaf) if self.is_large(leaf) else None
        return self.whole if axis is None else self.along(axis)

    def each(self, leaves: list[Any]) -> list[jax.sharding.NamedSharding]:
        """Where the leaves of a train state go."""
        return [self.of(leaf) for leaf in leaves]

    def batch(self, batch: Any, rows: int) -> Any:
        """A batch on the devices: spread, or whole on each where they do not divide its rows."""
        return jax.device_put(batch, self.whole if rows % self.devices else self.rows)

    def is_large(self, leaf: Any) -> bool:
        """Whether an array is to be spread, if one of its axes allows it. PRNG keys are not."""
        if self.min_bytes is None or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return False
        return leaf.size * leaf.dtype.itemsize >= max(self.min_bytes, 1)

    def axis(self, leaf: Any) -> int | None:
        """The largest axis that the number of devices divides, the first of equal ones; None where there is none."""
        axes = [axis for axis, size in enumerate(leaf.shape) if size and size % self.devices == 0]
        return max(axes, key=lambda axis: leaf.shape[axis], default=None)

    def options(self, changing: list[Any], kept: list[Any], *, several: bool) -> dict[str, Any]:
        """The shardings at the border of a compiled step.

        Args:
            changing: leaves of the train state, or their shapes.
            kept: likewise, those that no step changes.
            several: whether a call takes several batches, one after the other.
        """
        new, old = self.each(changing), self.each(kept)
        rows = [self.along(1)] * 2 + [self.whole] * 2 if several else [self.rows] * 2
        given = (new, self.whole, old, self.whole, *rows)
        return {"in_shardings": given, "out_shardings": (new, self.whole)}

    def fed(self, array: Any, axis: int = 0) -> Any:
        """An array of a batch as the compiled step takes it.

        Args:
            array: of the batch, or of several.
            axis: of the rows.

        Raises:
            DataError: the devices do not divide its rows.
        """
        self.check_rows(array.shape[axis])
        # An array on the host stays there: jit sends each device its rows faster than `device_put` would.
        on_device = isinstance(array, jax.Array) and array.sharding != self.along(axis)
        return jax.device_put(array, self.along(axis)) if on_device else array

    def check_rows(self, rows: int) -> None:
        """Refuse batches that the devices do not divide.

        Raises:
            DataError: with both numbers, and the near sizes that they divide.
        """
        if rows % self.devices:
            raise uneven(rows, self.devices)

    def wait(self, *trees: Any) -> None:
        """On CPUs, return when results are there; elsewhere at once.

        Devices that are parts of one CPU share its threads, which wait for each other where results are added up. With
        more than some dozens of programs under way XLA finds no thread for the last device, and aborts the process. The
        devices compute on the very cores that the loop would run ahead on, so nothing is lost by waiting.
        """
        if self._on_cpu:
            arrays = [[leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)] for tree in trees]
            jax.block_until_ready([found[0] for found in arrays if found])  # a program's results come together

    @functools.cached_property
    def _on_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    def filled(self, rows: int) -> int:
        """The number of rows that the devices divide, at least as many.

        Example:
            >>> Spread(jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))).filled(5)
            5
        """
        return -(-rows // self.devices) * self.devices


@dataclasses.dataclass(frozen=True)
class Home:
    """One device; or, where `whole` is None, wherever arrays are. The same questions as of a `Spread`."""

    whole: jax.sharding.SingleDeviceSharding | None

    @property
    def rows(self) -> jax.sharding.SingleDeviceSharding | None:
        """Where batches are."""
        return self.whole

    def each(self, leaves: list[Any]) -> jax.sharding.SingleDeviceSharding | None:
        """One answer for all leaves of a train state."""
        del leaves
        return self.whole

    def options(self, changing: list[Any], kept: list[Any], *, several: bool) -> dict[str, Any]:
        """The shardings at the border of a compiled step."""
        del changing, kept, several
        return {} if self.whole is None else {"in_shardings": self.whole, "out_shardings": self.whole}


def spread_of(config: Any) -> Spread | None:
    """The spread of a trainer or its `in_step`; None: one device.

    Raises:
        ConfigError: `mesh` is none, or asks for more devices than there are.
    """
    if config.mesh is None:
        return None
    settings = resolve(config.mesh, root=config, path="mesh")
    if not isinstance(settings, DataParallel | Fsdp):
        expected = "ek.sharding.data_parallel() or ek.sharding.fsdp()"
        raise ConfigError(message("mesh: resolves to no mesh", got=repr(settings)[:200], expected=expected))
    try:
        settings.validate()  # what a node makes has not been validated with the trainer
    except ValueError as error:
        raise ConfigError(f"mesh: {error}") from None
    return _spread(settings.devices, settings.min_bytes if isinstance(settings, Fsdp) else None)


@functools.cache
def _spread(devices: int | None, min_bytes: int | None) -> Spread:
    there = jax.devices()
    if devices is not None and devices > len(there):
        raise ConfigError(
            message(
                f"mesh: {devices} devices are asked for, and there are {len(there)}",
                got=f"devices={devices}; {listing(there, 4)}",
                expected=f"devices <= {len(there)}, or None for all",
                fix="to try it on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{devices} before JAX is imported"
                if there[0].platform == "cpu"
                else None,
            )
        )
    count = len(there) if devices is None else devices
    types = (jax.sharding.AxisType.Auto,)
    return Spread(jax.make_mesh((count,), (_AXIS,), devices=there[:count], axis_types=types), min_bytes)


def uneven(rows: int, devices: int, owner: str = "") -> DataError:
    """The error for batches that the devices do not divide.

    Args:
        rows: of a batch.
        devices: how many.
        owner: what messages call the data, with a colon and a space after it.

    Example:
        >>> print(uneven(20, 8, "train_data: "))
        train_data: a batch of 20 rows cannot be spread over 8 devices
          got:      20 rows, 8 devices
          expected: a multiple of 8, such as 16 or 24
          fix:      set batch_size=16 or batch_size=24; or mesh.devices=5, which divides 20
    """
    sizes = [size for size in (rows // devices * devices, -(-rows // devices) * devices) if size]
    fewer = max(count for count in range(1, devices + 1) if rows % count == 0)
    return DataError(
        message(
            f"{owner}a batch of {rows} rows cannot be spread over {devices} devices",
            got=f"{rows} rows, {devices} devices",
            expected=f"a multiple of {devices}, such as {' or '.join(map(str, sizes))}",
            fix=f"set {' or '.join(f'batch_size={size}' for size in sizes)}; "
            f"or mesh.devices={fewer}, which divides {rows}",
        )
    )
