"""Where data and state live. One process, one device for now: batches go to the compiled step as they are."""

from typing import Any

import jax

from equikd.errors import EquikdError, message


def place(batch: Any) -> Any:
    """A batch as the compiled step takes it.

    Args:
        batch: a pytree of host or device arrays, batch axis first.

    Returns:
        The batch; host arrays stay on the host, which jit transfers faster than a call of its own would.

    Raises:
        EquikdError: there are several processes, which equikd does not support yet.

    Example:
        >>> place({"x": 1})
        {'x': 1}
    """
    return batch


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
