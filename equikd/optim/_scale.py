"""The factor of the updates, `update_scale`: where it is applied.

A guard that has gone back (`ek.train.RollBack`) makes updates smaller by a factor. What looks at the parameters that an
update leads to, an average say, must see those that are there afterwards. So the factor goes inward, as an extra
argument of `update`, and is applied where a transformation of optax begins: once, and inside of all averages.

An average may stand in a transformation of optax, which hands no factor on: `optax.chain(clip, Ema(adam))`. Then a
context variable does, while the step is traced, and outside of it the parameters that it looks at are left out.
"""

import contextvars
from typing import Any

import jax
import optax

from equikd.errors import ConfigError, listing, message
from equikd.tree import named_leaves

_handed: "contextvars.ContextVar[Any]" = contextvars.ContextVar("update_scale", default=None)


class Scalable(optax.GradientTransformationExtraArgs):
    """A transformation whose `update` takes `update_scale`, a float32 scalar that its updates are multiplied by.

    None, or no such argument, is no factor.
    """


def scalable(made: optax.GradientTransformation) -> Scalable:
    """A transformation that takes a factor; one that does stays as it is.

    Args:
        made: any transformation of optax.

    Raises:
        ConfigError: in `update`, that a factor cannot be right for what it holds.
    """
    if isinstance(made, Scalable):
        return made
    inner = optax.with_extra_args_support(made)

    def update(updates: Any, state: Any, params: Any = None, *, update_scale: Any = None, **extra_args: Any) -> Any:
        if update_scale is None:
            return inner.update(updates, state, params, **extra_args)
        inside = _points_in(state)
        token = _handed.set(update_scale)
        try:
            updates, state = inner.update(updates, state, params, **extra_args)
        finally:
            _handed.reset(token)
        return _scaled(updates, update_scale, inside), state

    return Scalable(inner.init, update)


def scale_of(update_scale: Any) -> Any:
    """The factor for a transformation that looks at points: the one that it was given, or that of the one around it."""
    return _handed.get() if update_scale is None else update_scale


def _scaled(updates: Any, scale: Any, inside: set[str]) -> Any:
    """Updates times a factor, but for those at the paths `inside`."""
    found = named_leaves(updates)
    leaves = [leaf if path in inside else leaf * scale.astype(leaf.dtype) for path, leaf in found.items()]
    return jax.tree.unflatten(jax.tree.structure(updates), leaves)


def _points_in(state: Any) -> set[str]:
    """The paths of the parameters that something in a state looks at; such states have a method `points_seen`."""
    parts = {path: part for path, part in named_leaves(state, is_leaf=_has_points).items() if _has_points(part)}
    found: set[str] = set()
    for part in parts.values():
        own = named_leaves(part.points_seen())
        if twice := [path for path in own if path in found]:
            what = "optimizer: two averages stand side by side, and updates are to be scaled inside of one"
            fix = "one around the other: ek.optim.Ema(ek.optim.Lookahead(...)); or a guard other than RollBack"
            raise ConfigError(message(what, where=listing(parts), got=listing(twice), fix=fix))
        found |= own.keys()
    return found


def _has_points(part: Any) -> bool:
    return callable(getattr(type(part), "points_seen", None))
