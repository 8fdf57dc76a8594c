"""Masks by pattern: what is trained, and what decays. See `_select.py` for what a pattern is.

    ek.Trainer(trainable=ek.optim.freeze("encoder.**"), ...)
    ek.lazy(optax.adamw)(3e-4, weight_decay=0.1, mask=ek.optim.decay(except_="**.bias"))

Both are plain data. `trainable` is the one filter of a trainer: what it leaves out has no gradient, no optimizer state
and no place in the optimizer's part of a checkpoint, and stays as it is to the bit. A mask of an optimizer only says
which of the trained parameters a part of it touches.
"""

import dataclasses
from typing import Any

import jax

from equikd.config import config
from equikd.optim._select import members, select, spell


@config
class Freeze:
    """What is not trained; written with `freeze`."""

    patterns: Any
    """Globs, predicates and classes."""


def freeze(*patterns: Any) -> Freeze:
    """All parameters but some, as the value of `Trainer(trainable=...)`.

    Args:
        *patterns: globs over parameter paths, predicates (path, leaf), classes of modules, or tuples of these.

    Returns:
        Plain data; in a tuple with other patterns, `trainable=("encoder.**", freeze("encoder.norm.**"))`, it takes its
        parameters out of theirs.

    Example:
        >>> freeze("encoder.**")
        Freeze(patterns=('encoder.**',))
    """
    return Freeze(patterns)


@dataclasses.dataclass(frozen=True)  # no config: optax takes a pytree for the mask itself
class Decay:
    """A mask for optax, from parameters to a tree of bools; written with `decay`."""

    only: Any = ()
    """What it is true for; empty: all."""
    except_: Any = ()
    """What it is false for all the same."""

    def __call__(self, params: Any) -> Any:
        """A tree like `params`, with a bool for each leaf."""
        structure = jax.tree.structure(params)
        wanted = (True,) * structure.num_leaves
        if members(self.only):
            wanted = select(self.only, params, f"decay({spell(self.only)})")
        spared = select(self.except_, params, f"decay(except_={spell(self.except_)})")
        return structure.unflatten([one and not other for one, other in zip(wanted, spared, strict=True)])


def decay(*only: Any, except_: Any = ()) -> Decay:
    """A mask for optax: which parameters decay.

    Biases and the scales of norm layers usually do not. It is for whatever in optax takes a mask as a function of the
    parameters: `optax.adamw(..., mask=...)`, `optax.add_decayed_weights`, `optax.masked`.

    Args:
        *only: patterns of what decays; none: everything.
        except_: a pattern of what does not.

    Returns:
        Plain data that is called with the parameters.

    Example:
        >>> decay(except_="**.bias")({"layer": {"weight": 1.0, "bias": 2.0}})
        {'layer': {'bias': False, 'weight': True}}
    """
    return Decay(only, except_)


def trained(wanted: Any, params: Any) -> tuple[bool, ...]:
    """Which parameters a value of `Trainer.trainable` means.

    Args:
        wanted: None (all), a pattern, a `Freeze`, or a tuple of these.
        params: all that could be trained, None elsewhere.

    Returns:
        One verdict for each leaf of `params`.
    """
    parts = () if wanted is None else members(wanted)
    frozen = tuple(one.patterns for one in parts if isinstance(one, Freeze))
    chosen = tuple(one for one in parts if not isinstance(one, Freeze))
    everything = wanted is None or (frozen and not chosen)
    count = jax.tree.structure(params).num_leaves
    keep = (True,) * count if everything else select(chosen, params, "trainable")
    drop = select(frozen, params, f"trainable: freeze{spell(members(frozen))}") if frozen else (False,) * count
    return tuple(one and not other for one, other in zip(keep, drop, strict=True))
