"""A pole on a cart, with the constants of Gym's CartPole-v1 (Barto, Sutton and Anderson 1983).

A state is the cart's position and speed, and the pole's angle and turning speed; an action pushes left (0) or right
(1). All functions work on NumPy and JAX arrays with any leading axes.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from equikd.typing import Array, Bool, Float, Integer

GRAVITY, CART, POLE, LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TRACK, LEAN = 2.4, math.radians(12)
EPISODE = 500
"""Steps after which an episode ends in any case."""


def moved(state: Float[Array, "*b 4"], action: Integer[Array, "*b"]) -> Float[Array, "*b 4"]:
    """The state a fiftieth of a second after a push."""
    _, speed, angle, turning = jnp.moveaxis(state, -1, 0)
    force = jnp.where(action == 1, FORCE, -FORCE)
    sine, cosine, mass = jnp.sin(angle), jnp.cos(angle), CART + POLE
    pull = (force + POLE * LENGTH * turning**2 * sine) / mass
    turned = (GRAVITY * sine - cosine * pull) / (LENGTH * (4 / 3 - POLE * cosine**2 / mass))
    pushed = pull - POLE * LENGTH * turned * cosine / mass
    rates = jnp.stack([speed, pushed, turning, turned], axis=-1)
    return state + SECONDS * rates


def fallen(state: Float[Array, "*b 4"]) -> Bool[Array, "*b"]:
    """Whether the cart has left the track, or the pole leans by more than 12 degrees."""
    return (jnp.abs(state[..., 0]) > TRACK) | (jnp.abs(state[..., 2]) > LEAN)


def transitions(rows: int) -> dict[str, np.ndarray]:
    """Single moves in random states; the same ones each time.

    Args:
        rows: how many.

    Returns:
        `state` and `after`, float32 `n 4`; `action`, int32 `n`; `fallen`, bool `n`, whether that was the end.
    """
    draw = np.random.default_rng(0)
    state = (draw.uniform(-1, 1, (rows, 4)) * [TRACK, 2.5, LEAN, 2.5]).astype(np.float32)
    action = draw.integers(0, 2, rows).astype(np.int32)
    after = jax.device_get(moved(jnp.asarray(state), jnp.asarray(action)))
    return {"state": state, "action": action, "after": after, "fallen": np.asarray(fallen(jnp.asarray(after)))}


def starts(rows: int) -> dict[str, np.ndarray]:
    """States in which an episode begins, near the middle and upright; the same ones each time.

    Args:
        rows: how many.

    Returns:
        `state`, float32 `n 4`.
    """
    return {"state": np.random.default_rng(1).uniform(-0.05, 0.05, (rows, 4)).astype(np.float32)}
