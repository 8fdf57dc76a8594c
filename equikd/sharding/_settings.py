"""Settings of a mesh, plain data: `data_parallel()` and `fsdp()`, the values of `Trainer.mesh`."""

from equikd.config import config


def _check_devices(devices: int | None) -> None:
    if devices is not None and devices < 1:
        raise ValueError(f"devices must be at least 1, got {devices}")


@config
class DataParallel:
    """The rows of each batch are spread over the devices, the train state is whole on each."""

    devices: int | None = None
    """How many devices, the first ones; None: all."""

    def validate(self) -> None:
        """Refuse no device at all."""
        _check_devices(self.devices)


@config
class Fsdp:
    """As `DataParallel`, and the large arrays of the train state are spread too, each along one axis."""

    devices: int | None = None
    """How many devices, the first ones; None: all."""
    min_bytes: int = 2**20
    """Arrays of at least that many bytes are spread; smaller ones are not worth the messages."""

    def validate(self) -> None:
        """Refuse no device at all, and sizes below zero."""
        _check_devices(self.devices)
        if self.min_bytes < 0:
            raise ValueError(f"min_bytes must be at least 0, got {self.min_bytes}")


def data_parallel(devices: int | None = None) -> DataParallel:
    """Training on several devices at once: rows spread, parameters on each; numbers are those of one device.

    Args:
        devices: how many, the first of `jax.devices()`; None: all.

    Returns:
        A value for `Trainer.mesh`, plain data.

    Example:
        >>> data_parallel(devices=4)
        DataParallel(devices=4)
    """
    return DataParallel(devices)


def fsdp(devices: int | None = None, *, min_bytes: int = 2**20) -> Fsdp:
    """Fully sharded data parallel training: as `data_parallel`, for models that one device cannot hold with optimizer.

    Parameters, the optimizer's state and every other array of the train state of at least `min_bytes` are spread along
    their largest axis that the number of devices divides; those that have none stay whole. `ek.inspect.check` tells
    which, and how many bytes a device holds.

    Args:
        devices: how many, the first of `jax.devices()`; None: all.
        min_bytes: of the arrays that are spread, 1 MiB by default.

    Returns:
        A value for `Trainer.mesh`, plain data.

    Example:
        >>> fsdp(min_bytes=2**16)
        Fsdp(devices=None, min_bytes=65536)
    """
    return Fsdp(devices, min_bytes)
