"""Rematerialisation: the same gradients, from less that is kept."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.train._remat import POLICIES
from tests.train._small import BatchNormed, Dropping, leaves, quick

ADAM = ek.lazy(optax.adam)(1e-2)


def make(model: Any = None, **fields: Any) -> ek.Trainer:
    return quick(model or ek.lazy(Dropping)(0.3), optimizer=ADAM, num_steps=4, **fields)


@pytest.mark.parametrize("policy", ["nothing_saveable", pytest.param("dots_saveable", marks=pytest.mark.slow)])
def test_results_are_the_same(policy: str) -> None:
    plain, again = make().train(), make(remat=policy).train()
    for one, other in zip(leaves(plain.state.params()), leaves(again.state.params()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert plain.metrics.keys() == again.metrics.keys()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"accumulate": 2}, {"model": ek.lazy(BatchNormed)()}])
def test_with_micro_batches_states_and_intermediates(fields: dict[str, Any]) -> None:
    metrics = {"watched": ek.metrics.Mean("interms.first"), "signal": ek.metrics.Mean("grads.interms.last")}
    plain, again = (make(remat=policy, metrics=metrics, **fields).train() for policy in (None, "nothing_saveable"))
    for name, value in plain.metrics.items():
        np.testing.assert_allclose(again.metrics[name], value, rtol=1e-4, atol=1e-6)


def program_of(policy: Any) -> str:
    trainer = make(remat=policy)
    state = trainer.init()
    batch = next(trainer.batches(state))
    arrays, static = eqx.partition((trainer.in_step, state, batch), eqx.is_array)
    run = lambda arrays: eqx.filter(ek.train.default_step(*eqx.combine(arrays, static)), eqx.is_array)
    return str(jax.make_jaxpr(run)(arrays))


def test_the_policy_reaches_the_program() -> None:
    nothing, products = program_of("nothing_saveable"), program_of("dots_saveable")
    assert "remat" not in program_of(None)
    assert "remat" in nothing
    assert products.count("dot_general") < nothing.count("dot_general")  # which computes them again
    own = ek.lazy(jax.checkpoint_policies.save_only_these_names)("none of these")
    assert program_of(own).count("dot_general") == nothing.count("dot_general")


def test_all_names_are_policies_of_jax() -> None:
    for name in POLICIES:
        assert callable(getattr(jax.checkpoint_policies, name))


def test_an_unknown_name_is_refused_with_near_ones(snapshot: Any) -> None:
    with pytest.raises(ek.errors.ConfigError) as caught:
        make(remat="dot_savable").train()
    snapshot("unknown", str(caught.value))
