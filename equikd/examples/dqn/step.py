"""One step of Q-learning, from the public pieces of the default step; the target network is the state's `extra`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd.config import config
from equikd.data import Batch
from equikd.metrics import Aux
from equikd.train import TrainState, apply_updates, collect, loss_and_gradients


def slow_copy(model: Any) -> Any:
    """The target network before the first update: the model itself."""
    return model


@config
class SlowTarget:
    """The network learns what a slow copy of it says of the next state, lest it runs after its own tail.

    The copy moves towards the network by a small part of the way in each step (Lillicrap et al. 2016,
    arXiv:1509.02971), where Mnih et al. (2015) copy the whole of it now and then. The network itself chooses the next
    action (van Hasselt et al. 2016, arXiv:1509.06461). Both floats are traced.
    """

    rate: float = 0.05
    """Part of the way that the slow copy goes in one step."""
    discount: float = 0.99
    """Worth of what happens a step later."""

    def __call__(self, config: Any, state: TrainState, batch: Batch) -> tuple[TrainState, Aux]:
        """One update of the network, and of its slow copy."""
        after, fallen = batch.data["after"], batch.data["fallen"]
        # The network chooses and the copy says what that is worth: the largest of several guesses would be too large.
        choice = jax.vmap(state.model)(after).argmax(axis=-1)
        worth = jnp.take_along_axis(jax.vmap(state.extra)(after), choice[:, None], axis=-1)[:, 0]
        target = jnp.where(fallen, -1.0, self.discount * worth)
        batch = Batch({**batch.data, "target": target}, batch.mask)

        context = loss_and_gradients(config, state, batch)
        state, context = apply_updates(config, state, context)

        follow = lambda slow, fast: slow + self.rate * (fast - slow) if eqx.is_inexact_array(slow) else slow
        slow = jax.tree.map(follow, state.extra, state.model)
        return eqx.tree_at(lambda state: state.extra, state, slow), collect(config, context)
