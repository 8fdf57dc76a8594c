"""An optimizer for each group of parameters, and a rate for each layer."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.config import from_json, to_json
from equikd.errors import ConfigError
from equikd.tree import named_leaves
from tests.train._small import Plain, assert_same, differs, quick

L = ek.lazy
GROUPS = {"first.**": L(optax.adam)(0.01), "**.bias": L(optax.sgd)(0.1), "**": L(optax.sgd)(0.05, momentum=0.9)}
SEPARATE = {"first.**": GROUPS["first.**"], "last.bias": GROUPS["**.bias"], "**": GROUPS["**"]}


@pytest.fixture(scope="module")
def trainer() -> ek.Trainer:
    return quick(optimizer=SEPARATE, num_steps=3)


@pytest.fixture(scope="module")
def result(trainer: ek.Trainer) -> Any:
    return trainer.train()


def labels(params: Any) -> Any:
    def label(path: Any, _: Any) -> str:
        text = jax.tree_util.keystr(path)
        return "first" if "first" in text else "bias" if "bias" in text else "rest"

    return jax.tree_util.tree_map_with_path(label, params)


def by_hand() -> Any:
    optimizers = {"first": optax.adam(0.01), "bias": optax.sgd(0.1), "rest": optax.sgd(0.05, momentum=0.9)}
    return optax.partition(optimizers, labels)


def test_a_dict_is_the_partition_by_hand(result: Any) -> None:
    theirs = quick(optimizer=L(by_hand)(), num_steps=3).train().state
    for one, other in zip(jax.tree.leaves(result.state.params()), jax.tree.leaves(theirs.params()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    paths = [path for path in named_leaves(result.state.opt_state) if path.endswith((".weight", ".bias"))]
    assert len(paths) == 5  # two moments of two leaves, one trace of one


def test_its_floats_are_traced_and_have_paths(trainer: ek.Trainer, result: Any, compilations: Any) -> None:
    compilations.clear()
    slower = ek.override(
        trainer, {"optimizer['last.bias'].learning_rate": 1e-3, 'optimizer["first.**"].learning_rate': 0.02}
    )
    assert slower.optimizer["first.**"].learning_rate == 0.02
    other = slower.train()
    assert compilations.names == []
    assert differs(result.model.last.bias, other.model.last.bias)
    assert from_json(to_json(slower.optimizer)) == slower.optimizer
    assert ek.inspect.check(trainer).floats["optimizer['last.bias'].learning_rate"] == "traced"


@pytest.mark.slow
def test_a_run_with_groups_goes_on_from_its_checkpoint(trainer: ek.Trainer, result: Any, tmp_path: Any) -> None:
    trainer.train(tmp_path)
    longer = ek.override(trainer, {"num_steps": 5})
    assert_same(longer.train(tmp_path).state, longer.train().state)


def test_groups_may_be_of_any_pattern_and_stand_in_nodes() -> None:
    def rest(path: str, leaf: Any) -> bool:
        return leaf.ndim == 1

    groups = ek.optim.Groups(((rest, L(optax.sgd)(0.1)), ("**", {"**.weight": L(optax.adam)(0.01)})))
    clipped = L(optax.chain)(L(optax.clip_by_global_norm)(1.0), groups)
    found = quick(optimizer=clipped, num_steps=2)
    assert found.optimizer[1].groups[0][1].learning_rate == 0.1
    assert ek.override(found, {"optimizer[1].groups[0][1].learning_rate": 0.2}) != found
    moments = [path for path in named_leaves(found.init().opt_state) if ".mu." in path]
    assert [path.rpartition(".mu.")[2] for path in moments] == ["first.weight", "last.weight"]
    assert ek.inspect.check(found).warnings == ()


def test_a_parameter_of_two_groups_and_one_of_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)optimizer: '\*\*.bias' and 'first.\*\*' match the same.*first.bias"):
        quick(optimizer=GROUPS).init()
    with pytest.raises(ConfigError, match=r"optimizer: no pattern matches last.weight"):
        quick(optimizer={"first.**": L(optax.adam)(0.01), "last.bias": L(optax.sgd)(0.1)}).init()
    with pytest.raises(ConfigError, match=r"optimizer\['\*\*'\]: resolves to no optax optimizer"):
        quick(optimizer={"**": L(optax.constant_schedule)(0.1)}).init()


def test_two_lambdas_are_two_groups() -> None:
    groups = ((lambda path, _: path == "a", optax.sgd(1.0)), (lambda path, _: path == "b", optax.sgd(2.0)))
    optimizer = ek.optim._optimizer.partitioned(groups, "optimizer")
    ones = {"a": jnp.ones(()), "b": jnp.ones(())}
    updates, _ = optimizer.update(ones, optimizer.init(ones), ones)
    assert jax.tree.map(float, updates) == {"a": -1.0, "b": -2.0}


# Rates.


@given(
    st.floats(0, 4, width=32, allow_subnormal=False),
    st.floats(0, 4, width=32, allow_subnormal=False),
    st.integers(0, 3),
)
def test_updates_are_scaled_by_pattern_and_by_schedule(first: float, rest: float, step: int) -> None:
    scales = {"a": first, "b.**": ek.optim.Linear(rest, 0.0, 4)}
    optimizer = ek.resolve(ek.optim.ScaleRates(L(optax.sgd)(1.0), scales))
    grads = {"a": jnp.ones(2), "b": {"x": jnp.ones(2)}, "c": jnp.ones(2)}
    state = optimizer.init(grads)._replace(step=jnp.asarray(step))
    updates, new = optimizer.update(grads, state, grads)
    np.testing.assert_allclose(updates["a"], -np.float32(first), rtol=1e-6)
    np.testing.assert_allclose(updates["b"]["x"], -rest * (1 - step / 4), rtol=1e-5, atol=1e-30)
    np.testing.assert_array_equal(updates["c"], -1.0)  # none matches: to the bit
    assert int(new.step) == step + 1


def test_scales_are_traced_and_keep_the_dtype_of_the_update(compilations: Any) -> None:
    scaled = ek.optim.ScaleRates(L(optax.sgd)(0.1), {"first.**": 0.5, "**": 1.0})
    trainer = quick(optimizer=scaled, num_steps=2)
    one = trainer.train().model
    compilations.clear()
    frozen = ek.override(trainer, {"optimizer.scales['first.**']": 0.0}).train().model
    assert compilations.names == []
    first = trainer.init().model
    assert_same(frozen.first, first.first)
    assert differs(one.first, first.first)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), {"a": jnp.ones(2)})
    optimizer = ek.resolve(ek.optim.ScaleRates(L(optax.sgd)(0.1), (("a", L(optax.constant_schedule)(0.5)),)))
    assert optimizer.update(half, optimizer.init(half), half)[0]["a"].dtype == jnp.bfloat16


def test_negative_scales_and_scales_of_nothing_are_refused() -> None:
    wrong = ek.optim.ScaleRates(L(optax.sgd)(0.1), {"first.**": -0.5})
    with pytest.raises(ConfigError, match=r"optimizer: scales: 'first.\*\*' must not be negative, got -0.5"):
        quick(optimizer=wrong).init()
    with pytest.raises(ConfigError, match=r"ScaleRates.scales: Conv2d matches no parameter"):
        quick(optimizer=ek.optim.ScaleRates(L(optax.sgd)(0.1), ((eqx.nn.Conv2d, 0.1),))).init()


def test_the_functional_core_takes_them_too() -> None:
    @ek.config.config
    class Hyper:
        optimizer: Any = ek.optim.ScaleRates(L(optax.sgd)(0.1), {"first.**": 0.0})

    def loss(model: Any, batch: Any, hp: Any, key: Any) -> Any:
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    init, step = ek.train.make_step(loss, optimizer=lambda hp: {"**": hp.optimizer})
    before = init(Hyper(), Plain(key=jax.random.key(0)), jax.random.key(1))
    after, _ = step(Hyper(), before, jnp.ones((4, 6)))
    assert_same(before.model.first, after.model.first)
    assert differs(before.model.last, after.model.last)
