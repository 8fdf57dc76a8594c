"""Groups of parameters: an optimizer of their own, or a share of the rate.

As the dict `optimizer={"encoder.**": ..., "**": ...}`, or as `Groups`, whose patterns may be classes and predicates.
Dicts in configs are sorted, so order says nothing: the pattern "**" means what no other matches, and a parameter that
two others match is an error that names both.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from equikd.config import config
from equikd.optim._base import Schedule, known, refuse
from equikd.optim._optimizer import Optimizer, as_optimizer, partitioned
from equikd.optim._scale import Scalable
from equikd.optim._select import assign, spell
from equikd.typing import Array, Int


@config
class Groups(Optimizer):
    """An optimizer for each group of parameters, as `optax.partition`; the dict form for any pattern.

    `{"encoder.**": a, "**": b}` is `Groups((("encoder.**", a), ("**", b)))`. Each optimizer has state for its own
    parameters alone.

    Example:
        >>> import equinox as eqx, optax
        >>> from equikd.config import lazy
        >>> groups = Groups(((eqx.nn.LayerNorm, lazy(optax.sgd)(0.1)), ("**", lazy(optax.adam)(1e-3))))
        >>> groups.groups[1][1].learning_rate
        0.001
    """

    groups: tuple[tuple[Any, Any], ...]
    """Pairs of a pattern and an optimizer."""

    def gradient_transformation(self) -> Scalable:
        """The partition of these."""
        return partitioned(self.groups, "groups")


class ScaleRatesState(NamedTuple):
    """The state of `ScaleRates`.

    Attributes:
        step: int32 scalar, updates made.
        inner: the state of the optimizer.
    """

    step: Int[Array, ""]
    inner: Any


@config
class ScaleRates(Optimizer):
    """An optimizer whose updates are scaled by pattern: a learning rate for each layer.

    The update of a parameter, weight decay included, times the scale of its pattern; what none matches keeps its own
    ("**" means just that). Scales that fall from the last layer to the first are known as discriminative fine-tuning:
    Howard and Ruder 2018, Universal Language Model Fine-tuning for Text Classification, arXiv:1801.06146, section 3.2,
    who divide by 2.6 from layer to layer.

    Example:
        >>> import optax
        >>> from equikd.config import lazy
        >>> slow_start = ScaleRates(lazy(optax.adam)(1e-3), {"layers[0].**": 0.1, "layers[1].**": 0.3})
        >>> slow_start.scales["layers[0].**"]
        0.1
    """

    optimizer: Any
    """The optimizer."""
    scales: dict[str, float | Schedule] | tuple[tuple[Any, float | Schedule], ...]
    """Glob -> scale, a float or a schedule; or pairs of any pattern and a scale."""

    def validate(self) -> None:
        """Refuse negative scales."""
        negative = [(pattern, scale) for pattern, scale in _pairs(self.scales) if known(scale) and scale < 0]
        refuse([f"scales: {spell(pattern)} must not be negative, got {scale}" for pattern, scale in negative])

    def gradient_transformation(self) -> Scalable:
        """The optimizer, and then the scales."""
        optimizer = as_optimizer(self.optimizer, "ScaleRates.optimizer")
        pairs = _pairs(self.scales)

        def owners(params: Any) -> tuple[int | None, ...]:
            return assign([pattern for pattern, _ in pairs], params, "ScaleRates.scales", whole=False)

        def init(params: Any) -> ScaleRatesState:
            owners(params)
            return ScaleRatesState(jnp.zeros((), jnp.int32), optimizer.init(params))

        def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
            found = owners(updates if params is None else params)
            updates, inner = optimizer.update(updates, state.inner, params, **extra_args)
            scales = [scale(state.step) if callable(scale) else scale for _, scale in pairs]
            leaves, structure = jax.tree.flatten(updates)
            leaves = [
                leaf if owner is None else (leaf * scales[owner]).astype(leaf.dtype)
                for leaf, owner in zip(leaves, found, strict=True)
            ]
            return structure.unflatten(leaves), ScaleRatesState(state.step + 1, inner)

        return Scalable(init, update)


def _pairs(scales: Any) -> tuple[tuple[Any, Any], ...]:
    """Patterns and scales, as pairs."""
    return tuple(scales.items()) if isinstance(scales, dict) else tuple(scales) if type(scales) is tuple else ()
