"""Packing: many scalars as few arrays. A compiled call costs by the leaf, and most accumulators are scalars."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Layout = tuple[tuple[int, ...], ...]
"""For each packed array, the positions of the leaves that it holds."""


def layout_of(leaves: Sequence[Any]) -> Layout:
    """Scalars of one dtype share an array; any other leaf is an array of its own.

    Example:
        >>> layout_of([jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.ones(()), jnp.zeros(4)])
        ((0, 2), (1,), (3,))
    """
    groups: dict[Any, list[int]] = {}
    for position, leaf in enumerate(leaves):
        groups.setdefault(position if leaf.shape else str(leaf.dtype), []).append(position)
    return tuple(map(tuple, groups.values()))


def pack(layout: Layout, leaves: Sequence[Any], stack: Callable[..., Any] = jnp.stack) -> list[Any]:
    """Leaves as packed arrays; `stack` is `np.stack` where they lie on the host."""
    return [leaves[group[0]] if len(group) == 1 else stack([leaves[at] for at in group]) for group in layout]


@functools.partial(jax.jit, static_argnums=0)
def unpack(layout: Layout, packed: Sequence[Any]) -> list[Any]:
    """The leaves again; compiled once for a layout, whatever the programs that fill it.

    Example:
        >>> leaves = [jnp.zeros(()), jnp.ones(())]
        >>> [leaf.item() for leaf in unpack(((0, 1),), pack(((0, 1),), leaves))]
        [0.0, 1.0]
    """
    leaves: dict[int, Any] = {}
    for group, array in zip(layout, packed, strict=True):
        leaves |= {group[0]: array} if len(group) == 1 else zip(group, array, strict=True)
    return [leaves[at] for at in sorted(leaves)]
