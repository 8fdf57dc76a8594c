"""What all runs of one structure share is made once: a bounded, process-wide cache, and the key of a structure.

Two experiments have one structure if one compiled program serves both: the same containers and static values, and
arrays of the same shapes and dtypes, whatever the numbers in them. So a second trainer, a second `train()` or another
learning rate finds what the first one made, traced or compiled.
"""

import collections
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import numpy as np

from equikd.config._values import float_dtype, typed_key

T = TypeVar("T")


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or the shape of one."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray)


def structure_key(*trees: Any) -> Hashable:
    """What trees of one structure have in common; leaves that are no arrays compare by type and value.

    Args:
        *trees: pytrees of arrays, of their shapes, and of static values.

    Example:
        >>> structure_key({"x": np.zeros(2)}) == structure_key({"x": np.ones(2)})
        True
        >>> structure_key({"x": 1}) == structure_key({"x": True})
        False
    """
    arrays, static = eqx.partition(trees, is_array)
    leaves, static_tree = jax.tree.flatten(static)
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(arrays))
    return jax.tree.structure(arrays), static_tree, tuple(map(typed_key, leaves)), shapes, float_dtype().name


class Cache(Generic[T]):
    """The things made last, by key.

    Example:
        >>> cache = Cache(most=2)
        >>> [cache.get(key, lambda key=key: [key]) for key in (1, 2, 1, 3)]
        [[1], [2], [1], [3]]
        >>> cache.get(2, lambda: "made again")
        'made again'
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.made: collections.OrderedDict[Hashable, T] = collections.OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What stands under a key; made, where it is not there."""
        if key not in self.made:
            self.made[key] = make()
            if len(self.made) > self.most:
                self.made.popitem(last=False)
        self.made.move_to_end(key)
        return self.made[key]
