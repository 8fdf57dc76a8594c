"""Averages of the parameters over the updates: `Ema`, exponential, and `Swa`, equal.

    ek.Trainer(
        optimizer=ek.optim.Ema(ek.lazy(optax.adamw)(3e-4), decay=0.999),
        evals={"average": ek.evals.Eval(data=..., transform=ek.optim.averaged)},
        ...
    )
    ek.save_model("model", result.averaged_model)

An average wraps an optimizer, which trains as it would without. It stands in the optimizer's state, so that a
checkpoint holds it and a resume is exact, and it is in float32 whatever the parameters are: in bfloat16, 0.999 x a +
0.001 x p is a. Only what is trained is averaged; frozen leaves and running statistics are those of the model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from equikd.config import config, field
from equikd.errors import ConfigError, listing, message
from equikd.optim._base import Schedule, known, out_of_range, refuse
from equikd.optim._optimizer import Optimizer, as_optimizer
from equikd.optim._scale import Scalable, scale_of
from equikd.tree import named_leaves
from equikd.typing import Array, Float, Int


class AverageState(NamedTuple):
    """The state of `Ema` and `Swa`.

    Attributes:
        step: int32 scalar, updates made.
        weight: float32 scalar; of `Swa` how many points are averaged, of `Ema` what they weigh together.
        average: as the parameters, in float32 (float64 where they are).
        inner: the state of the optimizer.
    """

    step: Int[Array, ""]
    weight: Float[Array, ""]
    average: Any
    inner: Any

    def points_seen(self) -> Any:
        """A tree of the parameters that it looks at; see `_scale.py`."""
        return self.average


@config
class Ema(Optimizer):
    """An optimizer, and the exponential moving average of the parameters that it trains.

    After update n, average = d x average + (1 - d) x parameters, beginning with the initial parameters. Averaging of
    iterates: Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging, SIAM J. Control Optim.
    30(4).

    It averages the parameters plus the updates of its own optimizer: in an `optax.chain` it comes last. Around
    `optax.MultiSteps` it counts the calls, inside of it the updates; `Trainer(accumulate=...)` makes one call for each
    update.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from equikd.config import lazy, resolve
        >>> optimizer = resolve(Ema(lazy(optax.sgd)(1.0), decay=0.75))
        >>> state = optimizer.init(jnp.array(1.0))
        >>> _, state = optimizer.update(jnp.array(4.0), state, jnp.array(1.0))  # the parameter is -3 now
        >>> float(averaged(jnp.array(-3.0), state))
        0.0
    """

    optimizer: Any
    """The optimizer."""
    decay: float | Schedule = 0.999
    """What the average keeps at each update; a schedule is called with the number of updates made before."""
    debias: bool = False
    """Whether the initial parameters count for nothing, as in the bias correction of Adam (Kingma and Ba 2015)."""
    warmup: bool = False
    """Whether the decay is min(decay, (1 + n) / (10 + n)) after n updates, TensorFlow's rule for short runs."""

    def validate(self) -> None:
        """Refuse a decay that is not from 0 to 1."""
        wrong = known(self.decay) and not 0 <= self.decay <= 1  # pyright: ignore[reportOperatorIssue]
        refuse([f"decay must be from 0 to 1, got {self.decay}"] if wrong else [])

    def gradient_transformation(self) -> Scalable:
        """The optimizer, and the average in its state."""

        def rate(state: AverageState) -> tuple[Any, Any]:
            decay = self.decay(state.step) if callable(self.decay) else self.decay
            if self.warmup:
                decay = jnp.minimum(decay, (1 + state.step) / (10 + state.step))
            if not self.debias:
                return state.weight, 1 - decay
            weight = decay * state.weight + (1 - decay)
            return weight, jnp.where(weight > 0, (1 - decay) / jnp.where(weight > 0, weight, 1), 0)

        return _averaging(self.optimizer, rate, first_weight=0.0 if self.debias else 1.0, path="Ema.optimizer")


@config
class Swa(Optimizer):
    """An optimizer, and the plain mean of the parameters from some update on (stochastic weight averaging).

    The mean of the parameters after the updates start, start + every, start + 2 x every, ...; before the first of
    these, the parameters themselves. Izmailov et al. 2018, Averaging Weights Leads to Wider Optima and Better
    Generalization, arXiv:1803.05407, who hold the learning rate constant or let it cycle from `start` on, and average
    once a cycle. They compute the statistics of batch normalisation anew for the mean; here these are those of the run.

    Example:
        >>> import optax
        >>> from equikd.config import lazy
        >>> Swa(lazy(optax.sgd)(0.1), start=750, every=10).every
        10
    """

    optimizer: Any
    """The optimizer."""
    start: int = field(dynamic=True)
    """The first update whose parameters are averaged."""
    every: int = field(dynamic=True, default=1)
    """Updates between two that are averaged."""

    def validate(self) -> None:
        """Refuse a negative start, and an interval below one."""
        refuse(out_of_range(self, not_negative=("start",), positive=("every",)))

    def gradient_transformation(self) -> Scalable:
        """The optimizer, and the average in its state."""

        def rate(state: AverageState) -> tuple[Any, Any]:
            since = state.step + 1 - self.start
            due = (since >= 0) & (since % jnp.maximum(self.every, 1) == 0)
            weight = state.weight + due
            # Before the first point the average follows the parameters.
            return weight, jnp.where(due, 1 / jnp.maximum(weight, 1), jnp.where(weight == 0, 1.0, 0.0))

        return _averaging(self.optimizer, rate, first_weight=0.0, path="Swa.optimizer")


def _averaging(optimizer: Any, rate: Any, *, first_weight: float, path: str) -> Scalable:
    """An optimizer beside an average, which goes a share of the way to the new parameters at each update.

    Args:
        optimizer: the optimizer.
        rate: from the state before an update to (weight after it, share of the way).
        first_weight: the weight at the start.
        path: of the optimizer, for messages.
    """
    optimizer = as_optimizer(optimizer, path)

    def init(params: Any) -> AverageState:
        # A copy even in float32: one array at two places of the state could not be donated.
        average = jax.tree.map(lambda leaf: jnp.array(leaf, dtype=wide(leaf.dtype), copy=True), params)
        return AverageState(
            jnp.zeros((), jnp.int32), jnp.asarray(first_weight, jnp.float32), average, optimizer.init(params)
        )

    def update(updates: Any, state: Any, params: Any = None, *, update_scale: Any = None, **extra_args: Any) -> Any:
        if params is None:
            raise ValueError("an average of the parameters needs them: optimizer.update(updates, state, params)")
        scale = scale_of(update_scale)
        updates, inner = optimizer.update(updates, state.inner, params, update_scale=scale, **extra_args)
        weight, share = rate(state)
        average = jax.tree.map(
            lambda old, new: old + jnp.asarray(share, old.real.dtype) * (new.astype(old.dtype) - old),
            state.average,
            optax.apply_updates(params, updates),
        )
        weight = jnp.asarray(weight, jnp.float32)
        return updates, AverageState(state.step + 1, weight, average, inner)

    return Scalable(init, update)


def wide(dtype: Any) -> Any:
    """A dtype that many small numbers can be added up in: float32, or float64 where it is that."""
    with jax.numpy_dtype_promotion("standard"):  # the caller may have made mixing an error
        return jnp.promote_types(dtype, jnp.float32)


def averaged(model: Any, opt_state: Any, *, cast: bool = True) -> Any:
    """The model whose trained parameters are the averages that an optimizer's state holds.

    As `Eval(transform=ek.optim.averaged)` it is what an eval evaluates; `Result.averaged_model` is it for the end.

    Args:
        model: the model that is trained; whatever is not averaged comes from it.
        opt_state: the state of an optimizer with an `Ema` or `Swa` anywhere in it: in a chain, a group, `MultiSteps`.
        cast: to the dtypes of the model, so that it can stand in its place; False: the averages as they are.

    Raises:
        ConfigError: the state holds no average; or two of one parameter.
    """
    parts = named_leaves(opt_state, is_leaf=_is_average)
    found = {path: part for path, part in parts.items() if _is_average(part)}
    if not found:
        what = "averaged: the optimizer's state holds no average of the parameters"
        raise ConfigError(message(what, fix="optimizer=ek.optim.Ema(ek.lazy(optax.adamw)(...), decay=0.999)"))
    averages: dict[str, Any] = {}
    for part in found.values():
        own = named_leaves(part.average)
        if twice := [path for path in own if path in averages]:
            what = "averaged: the optimizer's state holds two averages of the same parameters"
            fix = "keep one of them"
            raise ConfigError(message(what, where=listing(found), got=listing(twice), fix=fix))
        averages |= own
    leaves = named_leaves(model)
    if cast:
        averages = {path: average.astype(leaves[path].dtype) for path, average in averages.items() if path in leaves}
    new = [averages.get(path, leaf) for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(model), new)


def _is_average(part: Any) -> bool:
    return isinstance(part, AverageState)
