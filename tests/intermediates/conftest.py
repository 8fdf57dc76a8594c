"""What the tests of intermediates compare with: equality to the bit."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest


def _bits(leaf: Any) -> Any:
    if not eqx.is_array(leaf):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return str(leaf.dtype), np.shape(leaf), np.asarray(leaf).tobytes()


@pytest.fixture(scope="session")
def same() -> Callable[[Any, Any], None]:
    """`same(one, other)`: pytrees of one structure whose arrays are equal to the bit."""

    def compare(one: Any, other: Any) -> None:
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for (path, left), right in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
            assert _bits(left) == _bits(right), f"{jax.tree_util.keystr(path)}: {left} is not {right}"

    return compare
