"""The Q-network, for one state, and the player who takes the action that it values most."""

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd.examples.dqn.cartpole import EPISODE, LEAN, TRACK, fallen, moved
from equikd.typing import Array, Float, Integer, PRNGKeyArray, typechecked


class QNetwork(eqx.Module):
    """A state to the value of each action: a multilayer perceptron."""

    layers: eqx.nn.MLP

    def __init__(self, width: int, *, key: PRNGKeyArray) -> None:
        """Build the layers.

        Args:
            width: units of each of the two hidden layers.
            key: PRNG key of the initial weights.
        """
        self.layers = eqx.nn.MLP(4, 2, width, 2, key=key)

    @typechecked
    def __call__(self, state: Float[Array, "4"]) -> Float[Array, "2"]:
        """Discounted failures to come, 0 to -1, for a push to the left and to the right."""
        return self.layers(state / jnp.array([TRACK, 2.5, LEAN, 2.5]))


class Player(eqx.Module):
    """A start to the length of the episode; what evals call in place of the network."""

    network: QNetwork

    @typechecked
    def __call__(self, state: Float[Array, "4"]) -> Integer[Array, ""]:
        """How many steps it has, 500 at most; the one in which the pole falls is the last, and counts as in Gym."""

        def step(carried: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            state, up = carried
            state = moved(state, jnp.argmax(self.network(state)))
            return (state, up & ~fallen(state)), up

        _, up = jax.lax.scan(step, (state, jnp.array(True)), None, length=EPISODE)
        return up.sum()
