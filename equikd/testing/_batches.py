"""Batches for laws: drawn arguments of a loss or metric, of which rows can be taken, masked, and padded with junk."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import message
from equikd.testing._arguments import Arguments, Patience, drawn
from equikd.testing._drawing import Options
from equikd.testing._parts import DrawError, Leaf, leaves, written
from equikd.testing._rules import Rules, rules_of

JUNK = (np.nan, np.inf, -np.inf)
WRONG = 97  # no index of any class that is drawn
_RANDOM = np.random.default_rng


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Arguments of a loss or metric, as numpy arrays, and which of these have the axis of rows."""

    leaves: list[Any]
    rowed: list[bool]
    tree: Any
    mask: np.ndarray
    """Bool `b *m`, which rows (or elements) count."""

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.mask.shape[0]

    @property
    def arguments(self) -> dict[str, Any]:
        """Argument -> value."""
        return self.tree.unflatten(self.leaves)

    def with_leaves(self, change: Callable[[Any], Any], mask: np.ndarray | None = None) -> "Batch":
        """The batch with the arrays changed that have rows, and another mask."""
        leaves = [change(leaf) if rowed else leaf for leaf, rowed in zip(self.leaves, self.rowed, strict=True)]
        return dataclasses.replace(self, leaves=leaves, mask=self.mask if mask is None else mask)

    def take(self, index: Any) -> "Batch":
        """Some of the rows, in this order."""
        return self.with_leaves(lambda leaf: leaf[index], self.mask[index])

    def full(self) -> "Batch":
        """All rows count."""
        return dataclasses.replace(self, mask=np.ones_like(self.mask))

    def filled(self, junk: float) -> "Batch":
        """Junk wherever the mask is False."""
        return self.with_leaves(lambda leaf: filled(leaf, self.mask, junk))

    def padded(self, count: int, junk: float) -> "Batch":
        """With some rows of junk at the end, which do not count."""
        longer = np.concatenate([self.mask, np.zeros((count, *self.mask.shape[1:]), bool)])
        wide = self.with_leaves(lambda leaf: np.concatenate([leaf, np.repeat(leaf[:1], count, axis=0)]), longer)
        return wide.filled(junk)

    def nothing(self, junk: float) -> "Batch":
        """Of the same shapes, and all of it padding."""
        return dataclasses.replace(self, mask=np.zeros_like(self.mask)).filled(junk)

    def __repr__(self) -> str:
        return f"mask={self.mask.astype(int).tolist()}, " + ", ".join(
            f"{name}={_shown(value)}" for name, value in self.arguments.items()
        )


def _shown(value: Any) -> str:
    small = isinstance(value, np.ndarray) and value.size <= 12
    return str(np.round(value, 4).tolist() if value.dtype.kind == "f" else value.tolist()) if small else written(value)


def filled(leaf: Any, mask: np.ndarray, junk: float) -> Any:
    """An array with junk wherever the mask, of its elements or of its rows, is False."""
    if leaf.shape[: mask.ndim] != mask.shape:
        mask = np.asarray(mask.any(axis=tuple(range(1, mask.ndim))))
    mask = mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))
    if leaf.dtype.kind in "iu":
        junk = WRONG
    elif leaf.dtype == np.bool_:
        junk = True
    return np.where(mask, leaf, np.asarray(junk).astype(leaf.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """What one example is made of."""

    batch: Batch
    random: np.random.Generator
    junk: float
    stacked: bool
    """Whether to compile a scan and a vmap for its shapes, which takes longer than all else."""


def batches(
    draw: Callable[[Any], Any],
    method: Any,
    options: Options,
    where: Callable[..., bool] | None,
    values: Mapping[str, Callable[..., Any]],
    shared: Collection[str],
    patience: Patience,
) -> tuple[Drawn, Drawn]:
    """Two batches of the same shapes that fit the annotations of a method: of whole numbers, and of any."""
    from hypothesis import strategies as st

    rules, owner = rules_of(method)
    call = drawn(draw, rules, owner, options, where, patience, values=True)
    seed, junk = draw(st.integers(0, 2**16)), draw(st.sampled_from(JUNK))
    one, other = (_batch(call, rules, values, shared, _RANDOM(seed), junk, whole) for whole in (True, False))
    return one, other


def _batch(
    call: Arguments,
    rules: Rules,
    values: Mapping[str, Callable[..., Any]],
    shared: Collection[str],
    random: np.random.Generator,
    junk: float,
    whole: bool,
) -> Drawn:
    from hypothesis import reject

    last = [leaf.shape[-1] for part in call.parts.values() for leaf in _float_leaves(part) if len(leaf.shape) > 1]
    classes = min(last, default=4)

    def make(leaf: Leaf) -> Any:
        if leaf.dtype == "prng_key":
            return leaf.make(int(random.integers(2**16)))
        name = leaf.path.split(".")[0].split("[")[0]
        if name in values:
            return np.asarray(values[name](random, leaf.shape), leaf.dtype)
        if leaf.dtype == "bool":
            return random.random(leaf.shape) < 0.6
        if leaf.dtype.startswith(("int", "uint")):
            return random.integers(0, classes, leaf.shape).astype(leaf.dtype)
        numbers = random.integers(-4, 5, leaf.shape) if whole else random.normal(size=leaf.shape)
        return numbers.astype(jnp.dtype(leaf.dtype))

    args, kwargs = call.build(make)
    if args:
        raise DrawError(message(f"{rules.name}: arguments are given by name", got="positional-only ones"))
    kwargs = dict(kwargs)
    mask = kwargs.pop("mask", None)
    flat, tree = jax.tree.flatten(kwargs)
    flat = [np.asarray(leaf) if is_array(leaf) else leaf for leaf in flat]
    if mask is None:
        first = next((leaf.shape[0] for leaf in flat if is_array(leaf) and leaf.ndim), 1)
        mask = random.random(first) < 0.6
    mask = np.array(mask)
    mask = mask if mask.ndim else mask[None]
    parted = jax.tree.leaves(
        {name: jax.tree.map(lambda _, n=name: n not in shared, part) for name, part in kwargs.items()}
    )
    rowed = [
        may and is_array(leaf) and leaf.shape[:1] == mask.shape[:1] for leaf, may in zip(flat, parted, strict=True)
    ]
    if rules.of_rows and not shared and not any(rowed) and any(leaf.ndim == 0 for leaf in flat if is_array(leaf)):
        reject()  # `...` drawn as a scalar, which has no rows
    return Drawn(Batch(flat, rowed, tree, mask), random, junk, whole)


def is_array(leaf: Any) -> bool:
    kind = getattr(getattr(leaf, "dtype", None), "kind", "")
    return (kind != "" and kind in "biuf") or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact))


def _float_leaves(part: Any) -> Iterator[Leaf]:
    return (leaf for leaf in leaves([part]) if leaf.dtype.startswith(("float", "bfloat")))
