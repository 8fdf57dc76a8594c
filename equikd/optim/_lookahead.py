"""Lookahead: fast parameters that are trained, and slow ones that follow them now and then."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from equikd.config import config, field
from equikd.optim._base import out_of_range, refuse
from equikd.optim._optimizer import Optimizer, as_optimizer
from equikd.optim._scale import Scalable, scale_of
from equikd.typing import Array, Int


class LookaheadState(NamedTuple):
    """The state of `Lookahead`.

    Attributes:
        step: int32 scalar, updates made.
        slow: the slow parameters.
        inner: the state of the fast optimizer.
    """

    step: Int[Array, ""]
    slow: Any
    inner: Any

    def points_seen(self) -> Any:
        """A tree of the parameters that it looks at; see `_scale.py`."""
        return self.slow


@config
class Lookahead(Optimizer):
    """An optimizer whose parameters go back, every few updates, to a point between where they were and are.

    Every `every` updates, slow = slow + slow_rate x (parameters - slow), and the parameters are set to that. Zhang et
    al. 2019, Lookahead Optimizer: k steps forward, 1 step back, arXiv:1907.08610, algorithm 1. `optax.lookahead`
    computes the same, but wants parameters of a type of its own, which no trainer has; here the slow parameters stand
    in the optimizer's state.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from equikd.config import lazy, resolve
        >>> optimizer = resolve(Lookahead(lazy(optax.sgd)(1.0), every=1))
        >>> updates, _ = optimizer.update(jnp.array(4.0), optimizer.init(jnp.array(1.0)), jnp.array(1.0))
        >>> float(updates)
        -2.0
    """

    optimizer: Any
    """The fast optimizer."""
    slow_rate: float = 0.5
    """How far the slow parameters go, of the way to the fast ones."""
    every: int = field(dynamic=True, default=5)
    """Updates between two such points."""

    def validate(self) -> None:
        """Refuse a negative rate, and an interval below one."""
        refuse(out_of_range(self, not_negative=("slow_rate",), positive=("every",)))

    def gradient_transformation(self) -> Scalable:
        """The fast optimizer, and the slow parameters in its state."""
        optimizer = as_optimizer(self.optimizer, "Lookahead.optimizer")

        def init(params: Any) -> LookaheadState:
            slow = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
            return LookaheadState(jnp.zeros((), jnp.int32), slow, optimizer.init(params))

        def update(updates: Any, state: Any, params: Any = None, *, update_scale: Any = None, **extra_args: Any) -> Any:
            if params is None:
                raise ValueError("lookahead needs the parameters: optimizer.update(updates, state, params)")
            scale = scale_of(update_scale)
            updates, inner = optimizer.update(updates, state.inner, params, update_scale=scale, **extra_args)
            fast, step = optax.apply_updates(params, updates), state.step + 1
            now = step % jnp.maximum(self.every, 1) == 0
            slow = jax.tree.map(
                lambda old, new: jnp.where(now, old + (self.slow_rate * (new - old)).astype(old.dtype), old),
                state.slow,
                fast,
            )
            updates = jax.tree.map(
                lambda update, old, target: jnp.where(now, (target - old).astype(update.dtype), update),
                updates,
                params,
                slow,
            )
            return updates, LookaheadState(step, slow, inner)

        return Scalable(init, update)
