"""Norms of trees: equal to optax's and numpy's, by path, averaged over steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from equikd.errors import WiringError
from equikd.metrics import Norm, empty_state
from equikd.metrics._aux import Aux
from equikd.wiring import Context

MODEL = eqx.filter(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), eqx.is_inexact_array)
ROWS = jnp.array([True, False])


def results(metric, *trees):
    states = [metric.from_context(Context(params=tree, grads=tree, mask=ROWS)) for tree in trees]
    state = states[0]
    for other in states[1:]:
        state = state | other
    return Aux(metrics={"norm": state}).results()


@pytest.mark.parametrize("seed", range(20))
def test_equals_optax_and_numpy(seed):
    keys = jax.random.split(jax.random.key(seed), 2)
    trees = [jax.tree.map(lambda x, key=key: 1 + jax.random.normal(key, x.shape), MODEL) for key in keys]
    total = np.mean([optax.tree.norm(tree) for tree in trees])
    np.testing.assert_allclose(results(Norm(tree="params"), *trees)["norm"], total, rtol=1e-5)
    by_leaf = results(Norm(tree="grads", per_leaf=True), *trees)
    assert set(by_leaf) == {"norm/total"} | {f"norm/layers[{i}].{leaf}" for i in (0, 1) for leaf in ("weight", "bias")}
    np.testing.assert_allclose(by_leaf["norm/total"], total, rtol=1e-5)
    expected = np.mean([np.linalg.norm(tree.layers[1].weight) for tree in trees])
    np.testing.assert_allclose(by_leaf["norm/layers[1].weight"], expected, rtol=1e-5)


def test_globs_choose_leaves():
    weights = results(Norm("params.**.weight", per_leaf=True), MODEL)
    assert set(weights) == {"norm/total", "norm/layers[0].weight", "norm/layers[1].weight"}
    both = np.hypot(weights["norm/layers[0].weight"], weights["norm/layers[1].weight"])
    np.testing.assert_allclose(weights["norm/total"], both, rtol=1e-6)
    part = results(Norm("params.layers.*.bias", per_leaf=True), MODEL)
    assert set(part) == {"norm/total", "norm/[0].bias", "norm/[1].bias"}
    assert set(results(Norm("params.layers[0].bias", per_leaf=True), MODEL)) == {"norm"}
    assert results(Norm("params.**"), MODEL) == results(Norm("params"), MODEL)


@pytest.mark.parametrize("pattern", ["params.**.wieght", "params.weight*", "params.layer[*].weight", "**.weight"])
def test_a_glob_that_fits_nothing_is_an_error(pattern, snapshot):  # case 15
    with pytest.raises(WiringError) as error:
        results(Norm(pattern), MODEL)
    name = pattern.translate(str.maketrans({"*": "_", ".": "_", "[": "_", "]": None}))
    snapshot(f"norm_glob{name}", str(error.value))


def test_a_leaf_that_is_named_as_the_total_is_an_error():
    with pytest.raises(WiringError, match="named 'total'"):
        results(Norm(tree="params", per_leaf=True), {"total": jnp.ones(2)})


def test_a_step_without_rows_counts_nothing():
    metric = Norm(tree="grads", per_leaf=True)
    bad = {"w": jnp.full(2, jnp.nan)}
    state = metric.from_values(bad, jnp.zeros(2, bool))
    one = metric.from_values({"w": jnp.array([3.0, 4.0])}, ROWS)
    assert (state | one).compute()["w"] == 5
    assert np.isnan(jax.device_get(state | empty_state(state)).compute()["total"])
    assert metric.takes_mask  # so it is fit for padded data


def test_dtypes():
    metric = Norm(tree="grads")
    state = metric.from_values({"a": jnp.full(4096, 1, jnp.bfloat16), "b": jnp.array([0 + 0j, 3j])}, ROWS)
    np.testing.assert_allclose(state.compute(), np.sqrt(4105), rtol=1e-6)
    assert state.total.high.dtype == jnp.float32
