"""What runs leave, for comparisons to the bit."""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from equikd.tree import named_leaves


def rows(workdir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what no two runs have the same."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "speed")} for line in lines]


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """Arrays of a pytree by path, PRNG keys as their integers."""
    arrays = named_leaves(eqx.filter(tree, eqx.is_array))
    raw = {
        k: jax.random.key_data(v) if jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key) else v
        for k, v in arrays.items()
    }
    return {path: np.asarray(value) for path, value in raw.items()}


def assert_same(first: Any, second: Any) -> None:
    """Two pytrees hold the same bits."""
    one, other = leaves(first), leaves(second)
    assert list(one) == list(other)
    assert one
    for path in one:
        assert one[path].dtype == other[path].dtype, path
        assert one[path].tobytes() == other[path].tobytes(), path
