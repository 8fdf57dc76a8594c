"""One process, so far."""

import jax

from equikd.errors import EquikdError, message


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
