"""The loss of Q-learning: what an action is said to be worth, against what came of it."""

import jax.numpy as jnp
import optax

from equikd.config import config
from equikd.losses import Loss
from equikd.typing import Array, Float, Integer
from equikd.wiring import KeyPath


@config
class TemporalDifference(Loss):
    """Huber loss of the value of the action that was taken, as Mnih et al. (2015) clip the error."""

    values_of: KeyPath
    """Key path of the value of each action, float `b actions`."""
    action: KeyPath
    """Key path of the action that was taken, integer `b`."""
    target: KeyPath
    """Key path of what it should be worth, float `b`."""

    def values(
        self, values_of: Float[Array, "b actions"], action: Integer[Array, " b"], target: Float[Array, " b"]
    ) -> Float[Array, " b"]:
        """The loss of each transition."""
        taken = jnp.take_along_axis(values_of, action[:, None], axis=1)[:, 0]
        return optax.losses.huber_loss(taken, target)
