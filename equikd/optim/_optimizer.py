"""Optimizers: what `Trainer(optimizer=...)` takes, and how it becomes an optax transformation.

    a node                      ek.lazy(optax.adamw)(3e-4)
    a config class of `optim`   ek.optim.Ema(ek.lazy(optax.adamw)(3e-4))
    a dict                      {"encoder.**": ek.lazy(optax.sgd)(1e-3), "**": ek.lazy(optax.adamw)(3e-4)}

Each may stand in the other. Their floats are traced: the transformation is made anew inside each trace, of tracers.
"""

import abc
from typing import Any

import jax
import optax

from equikd.config import resolve
from equikd.errors import ConfigError, message
from equikd.optim._scale import Scalable, scalable
from equikd.optim._select import assign, spell
from equikd.tree import join, parse


class Optimizer(abc.ABC):
    """Base of the optimizers of this package, which are config classes.

    They have `init` and `update` too, so that optax takes them where it takes a transformation: as an argument of
    `optax.chain`, `optax.MultiSteps` and the like. These pass no extra arguments (the loss, for `optax.polyak_sgd`) to
    what they do not know; `ek.lazy(ek.optim.as_optimizer)(...)` is known to them.
    """

    @abc.abstractmethod
    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation, of a config whose nodes are resolved."""

    def init(self, params: Any) -> Any:
        """The optimizer's state for some parameters."""
        return self.gradient_transformation().init(params)

    def update(self, updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        """The updates to add to the parameters, and the new state."""
        return self.gradient_transformation().update(updates, state, params, **extra_args)


def as_optimizer(value: Any, path: str = "optimizer") -> Scalable:
    """The optax transformation that a value means.

    Args:
        value: a transformation, a node that makes one, a config class of `ek.optim`, an object with the method
            `gradient_transformation()` such as `optax.MultiSteps`, or a dict `{pattern: any of these}`.
        path: where it stands, for messages.

    Returns:
        A transformation whose `update` takes extra arguments, among them `update_scale`: a factor of the updates, which
        averages and the like inside of it know of.

    Raises:
        ConfigError: it is something else.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = as_optimizer({"**.bias": optax.sgd(1.0), "**": optax.sgd(0.1)})
        >>> params = {"bias": jnp.ones(()), "weight": jnp.ones(())}
        >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
        >>> float(updates["bias"]), round(float(updates["weight"]), 2)
        (-1.0, -0.1)
    """
    value = resolve(value)
    if isinstance(value, dict):
        return partitioned(tuple(value.items()), path)
    make = getattr(value, "gradient_transformation", None)
    made = make() if callable(make) else value
    if isinstance(made, optax.GradientTransformation):
        return scalable(made)
    raise ConfigError(
        message(
            f"{path}: resolves to no optax optimizer",
            got=f"the function {getattr(made, '__name__', made)}" if callable(made) else repr(made)[:200],
            expected="optax.GradientTransformation",
            fix="optimizer=ek.lazy(optax.adamw)(learning_rate=1e-3)",
        )
    )


def partitioned(groups: tuple[tuple[Any, Any], ...], path: str) -> Scalable:
    """One optimizer for each group of parameters, pairs of a pattern and an optimizer; see `Groups`."""
    patterns = [pattern for pattern, _ in groups]
    labels: list[str] = []
    for index, pattern in enumerate(patterns):  # two lambdas have one spelling
        label = pattern if isinstance(pattern, str) else spell(pattern)
        labels.append(f"{label} ({index})" if label in labels else label)
    optimizers: dict[Any, Any] = {
        label: as_optimizer(one, join((*parse(path), label))) for label, (_, one) in zip(labels, groups, strict=True)
    }

    def partition(params: Any) -> Any:
        owners = assign(patterns, params, path)
        tree = jax.tree.unflatten(jax.tree.structure(params), [labels[owner or 0] for owner in owners])
        return optax.partition(optimizers, lambda _: tree)  # the tree is a model, which optax would call

    def init(params: Any) -> Any:
        return partition(params).init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        like = updates if params is None else params  # a predicate may look at the dtypes of parameters
        return partition(like).update(updates, state, params, **extra_args)

    return Scalable(init, update)
