"""`CollectFirst`: the first rows that count, whatever the batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equikd.config import validate
from equikd.errors import ConfigError
from equikd.metrics import CollectFirst, empty_state
from equikd.typing import ShapeError
from equikd.wiring import Context


@pytest.mark.parametrize("shape", [(), (2, 3)])
@pytest.mark.parametrize("kind", [np.float32, np.int8, np.bool_, jnp.bfloat16])
def test_equals_a_slice_of_the_rows_that_count(kind, shape):
    metric = CollectFirst(values="preds", n=5)
    of = jax.jit(metric.from_values)
    for seed in range(20):
        random = np.random.default_rng(seed)
        values = random.normal(0, 9, (24, *shape)).astype(kind)
        mask = random.random(24) < 0.4
        states = [of(values[i : i + 8], mask[i : i + 8]) for i in (0, 8, 16)]
        found = (states[0] | (states[1] | states[2])).finalize().compute().values
        assert type(found) is np.ndarray
        assert found.dtype == kind
        np.testing.assert_array_equal(found, values[mask][:5])


def test_a_tree_of_rows_in_a_scan_and_of_nothing():
    metric = CollectFirst(values="batch", n=3)
    batch = {"x": np.arange(8.0, dtype=np.float32).reshape(4, 2), "label": np.arange(4)}
    mask = np.array([False, True, True, False])
    empty = empty_state(jax.eval_shape(lambda: metric.from_context(Context(batch=batch, mask=mask))))
    step = lambda state, _: (state | metric.from_context(Context(batch=batch, mask=jnp.asarray(mask))), None)
    state, _ = jax.lax.scan(step, jax.tree.map(jnp.asarray, empty), None, length=2)
    assert state.finalize().compute().values["label"].tolist() == [1, 2, 1]
    assert state.finalize().compute().values["x"].tolist() == [[2, 3], [4, 5], [2, 3]]
    assert empty.finalize().compute().values["x"].shape == (0, 2)


def test_no_rows_and_wrong_rows():
    with pytest.raises(ConfigError, match=r"CollectFirst\.n"):
        validate(CollectFirst(values="preds", n=0))
    with pytest.raises(ShapeError):
        CollectFirst(values="preds").from_values({"x": jnp.ones(3), "y": jnp.ones(2)}, jnp.ones(3, bool))
