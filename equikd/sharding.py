"""Where data and state live. One process, one device for now: batches go to the compiled step as they are.

JAX compiles once more where an array that was committed to its device (by `device_put(x, device)`, or as the result of
a computation on such arrays) stands in for one that was not. So the state is committed to its home from init on, and
the step is compiled for that device, whatever the arrays of a live model or a batch are.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd._compat import Tracer
from equikd.errors import EquikdError, message


def place(batch: Any) -> Any:
    """A batch as the compiled step takes it.

    Args:
        batch: a pytree of host or device arrays, batch axis first.

    Returns:
        The batch; host arrays stay on the host, which jit transfers faster than a call of its own would. All feeding
        goes through here, so that a mesh has one door.

    Example:
        >>> place({"x": 1})
        {'x': 1}
    """
    return batch


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


def settle(tree: Any) -> Any:
    """A tree whose arrays are committed to its home; where that costs no transfer, they share their memory.

    Example:
        >>> settle({"x": jnp.zeros(3), "name": "x"})["x"].committed
        True
    """
    arrays, others = eqx.partition(tree, eqx.is_array)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        return tree
    where = home(arrays)
    return tree if where is None else eqx.combine(jax.device_put(arrays, where), others)


def check_processes() -> None:
    """Refuse a run over several processes.

    Raises:
        EquikdError: `jax.process_count()` is not 1.
    """
    if jax.process_count() != 1:
        raise EquikdError(
            message(
                "training over several processes is not supported yet",
                got=f"jax.process_count() = {jax.process_count()}",
                expected="1",
                fix="start one process, without jax.distributed.initialize",
            )
        )
