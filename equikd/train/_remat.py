"""Rematerialisation: less memory for the backward pass, since it computes some values again.

`jax.checkpoint` is put around the whole of what is differentiated: forward pass and losses. Its policy says what is
kept. For a single layer, `eqx.filter_checkpoint` in the model does the same.
"""

from collections.abc import Callable
from typing import Any

import jax

from equikd.config import resolve
from equikd.errors import listing, message, nearest

# Those that are policies themselves; the others make one of names or of other policies.
POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


def check_policy(policy: Any) -> None:
    """Refuse what names no policy.

    Raises:
        ValueError: with near names.
    """
    if isinstance(policy, str) and policy not in POLICIES:
        near, expected = nearest(policy, POLICIES), listing(POLICIES)
        raise ValueError(message(f"remat names no policy, got {policy!r}", near=near, expected=f"one of {expected}"))


def rematerialised(config: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose backward pass keeps what the policy of a config says.

    Args:
        config: `trainer.in_step`.
        function: of arrays to arrays.
    """
    policy = resolve(config.remat, root=config, path="remat")
    if policy is None:
        return function
    if isinstance(policy, str):
        policy = getattr(jax.checkpoint_policies, policy)
    return jax.checkpoint(function, policy=policy)
