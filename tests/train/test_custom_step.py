"""A step of one's own, from the public pieces of the default one."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import EquikdError
from tests.train._small import BatchNormed, Dropping, arrays, assert_same, differs, evaluated, leaves, quick, small


@ek.config.config
class TargetNetwork:
    """The default step, and a slow copy of the parameters in `state.extra` (Polyak averaging)."""

    rate: float = 0.1

    def __call__(self, config: Any, state: Any, batch: Any) -> Any:
        context = ek.train.loss_and_gradients(config, state, batch)
        state, context = ek.train.apply_updates(config, state, context)
        follow = lambda slow, fast: slow + self.rate * (fast - slow)
        state = eqx.tree_at(lambda s: s.extra, state, jax.tree.map(follow, state.extra, state.params()))
        return state, ek.train.collect(config, context)


def parameters(model: Any) -> Any:
    return eqx.filter(model, eqx.is_inexact_array)


def with_target(rate: float = 0.1, **fields: Any) -> ek.Trainer:
    return quick(step=TargetNetwork(rate=rate), init_extra=parameters, **fields)


def test_a_target_network_follows_the_parameters() -> None:
    result = with_target().train()
    plain = quick()
    state = plain.init()
    slow = state.params()
    for _, batch in zip(range(plain.num_steps), plain.batches(state), strict=False):
        state, _ = ek.train.step(plain, state, batch)
        slow = jax.tree.map(lambda s, p: s + 0.1 * (p - s), slow, state.params())
    for ours, theirs in zip(leaves(result.state.params()), leaves(state.params()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(leaves(result.state.extra), leaves(slow), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert differs(result.state.extra, result.state.params())


def test_the_floats_of_a_step_are_traced_like_all_others(compilations: Any) -> None:
    trainer = with_target()
    assert "step.rate" in ek.tree.named_leaves(trainer.in_step)
    before = trainer.train()
    compilations.clear()
    after = ek.override(trainer, {"step.rate": 0.5}).train()
    same = with_target(rate=0.5).train()
    assert compilations.names == []
    assert differs(before.state.extra, after.state.extra)
    assert_same(before.state.params(), after.state.params())
    assert_same(after.state, same.state)


def test_the_stepper_and_the_public_step_use_it_too() -> None:
    trainer = with_target()
    stepper, state = ek.train.Stepper(trainer, trainer.init()), trainer.init()
    for _, batch in zip(range(3), trainer.batches(state), strict=False):
        stepper.step(batch)
        state, _ = ek.train.step(trainer, state, batch)
    assert_same(stepper.state, state)


def test_extra_is_copied_and_starts_apart_from_the_parameters() -> None:
    """`init_extra` may hand out the very arrays of the model: donation must not meet one buffer twice."""
    trainer = with_target()
    state = trainer.init()
    assert_same(state.extra, state.params())
    stepper = ek.train.Stepper(trainer, state)
    stepper.step(next(trainer.batches(state)))
    assert differs(stepper.state.extra, stepper.state.params())
    assert_same(state.extra, state.params())


def test_a_step_of_the_same_pieces_is_the_default_step() -> None:
    def composed(config: Any, state: Any, batch: Any) -> Any:
        context = ek.train.loss_and_gradients(config, state, batch)
        state, context = ek.train.apply_updates(config, state, context)
        return state, ek.train.collect(config, context)

    own = quick(ek.lazy(BatchNormed)(), step=composed, evals=evaluated()).train()
    default = quick(ek.lazy(BatchNormed)(), evals=evaluated()).train()
    assert_same(own.state, default.state)
    assert own.metrics == default.metrics


@pytest.mark.slow
def test_a_named_step_and_a_node_that_makes_one() -> None:
    one = quick(step=ek.lazy(noisy_step), num_steps=3).train()
    other = quick(step=noisy_step, num_steps=3).train()
    made = quick(step=ek.lazy(make_noisy_step)(scale=0.01), num_steps=3).train()
    assert_same(one.state, other.state)
    for ours, theirs in zip(leaves(made.state), leaves(one.state), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def noisy_step(config: Any, state: Any, batch: Any) -> Any:
    """Noise on the gradients, from the key of the step."""
    return make_noisy_step(0.01)(config, state, batch)


def make_noisy_step(scale: Any) -> Any:
    def step(config: Any, state: Any, batch: Any) -> Any:
        context = ek.train.loss_and_gradients(config, state, batch)
        grads, tree = jax.tree.flatten(context.grads)
        keys = jax.random.split(context.key, len(grads))
        noisy = [g + scale * jax.random.normal(k, g.shape) for g, k in zip(grads, keys, strict=True)]
        state, context = ek.train.apply_updates(config, state, context.replace(grads=tree.unflatten(noisy)))
        return state, ek.train.collect(config, context)

    return step


@ek.config.config
class Count(ek.metrics.Metric):
    """Reads the state's own part from the context."""

    x: ek.KeyPath

    def from_values(self, x: Any) -> Any:
        return ek.metrics.Average.of(jnp.asarray(x, jnp.float32)[None])


def test_metrics_read_extra() -> None:
    def counting(config: Any, state: Any, batch: Any) -> Any:
        state, aux = ek.train.default_step(config, state, batch)
        return eqx.tree_at(lambda s: s.extra["count"], state, state.extra["count"] + 1), aux

    trainer = quick(
        step=counting,
        init_extra={"count": 0},
        metrics={"count": Count(x="extra.count", mask=None)},
        num_steps=4,
        log_every=4,
        evals=evaluated(batch_size=25),  # no padding, for a metric without a mask
    )
    result = trainer.train()
    assert int(result.state.extra["count"]) == 4
    assert result.metrics["train/count"] == np.mean([0, 1, 2, 3])
    assert result.metrics["test/count"] == 4  # an eval sees the state after the last step


def test_a_step_may_report_what_it_likes() -> None:
    def penalised(config: Any, state: Any, batch: Any) -> Any:
        context = ek.train.loss_and_gradients(config, state, batch)
        new, _ = ek.train.apply_updates(config, state, context)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(context.grads)))
        return new, ek.train.Aux(metrics={"gradient": ek.metrics.Average.of(norm[None])})

    result = quick(step=penalised).train()
    assert set(result.metrics) == {"train/gradient"}
    assert result.metrics["train/gradient"] > 0


def test_two_updates_with_two_optimizers() -> None:
    """A second optimizer over another part of the model, its state in `extra`, as adversarial training has it."""
    import optax

    slow = optax.sgd(1e-3)

    def both(config: Any, state: Any, batch: Any) -> Any:
        context = ek.train.loss_and_gradients(config, state, batch)
        new, context = ek.train.apply_updates(config, state, context)
        again = ek.train.loss_and_gradients(config, new, batch)
        updates, extra = slow.update(again.grads.last, state.extra, new.model.last)
        model = eqx.tree_at(lambda m: m.last, new.model, eqx.apply_updates(new.model.last, updates))
        return eqx.tree_at(lambda s: (s.model, s.extra), new, (model, extra)), ek.train.collect(config, context)

    trainer = quick(step=both, init_extra=lambda m: slow.init(eqx.filter(m.last, eqx.is_inexact_array)), num_steps=5)
    result = trainer.train()
    assert int(result.state.step) == 5
    assert differs(result.model, quick(num_steps=5).train().model)


def test_a_step_that_changes_the_structure_of_the_state_is_an_error(snapshot: Any) -> None:
    def growing(config: Any, state: Any, batch: Any) -> Any:
        state, aux = ek.train.default_step(config, state, batch)
        return eqx.tree_at(lambda s: s.extra, state, {"new": jnp.ones(3)}, is_leaf=lambda x: x is None), aux

    with pytest.raises(EquikdError) as error:
        quick(step=growing).init()
    snapshot("structure", str(error.value))


def test_a_step_that_changes_a_dtype_of_the_state_is_an_error() -> None:
    def widening(config: Any, state: Any, batch: Any) -> Any:
        state, aux = ek.train.default_step(config, state, batch)
        return eqx.tree_at(lambda s: s.extra, state, state.extra.astype(jnp.float32) + 1), aux

    def broadcasting(config: Any, state: Any, batch: Any) -> Any:
        state, aux = ek.train.default_step(config, state, batch)
        return eqx.tree_at(lambda s: s.extra, state, jnp.stack([state.extra, state.extra])), aux

    for step, words in ((widening, r"extra was bfloat16\[\], and is float32\[\]"), (broadcasting, r"is bfloat16\[2\]")):
        with pytest.raises(EquikdError, match=words):
            quick(step=step, init_extra=lambda _: jnp.zeros((), jnp.bfloat16)).init()


@pytest.mark.slow
def test_the_forward_pass_alone() -> None:
    trainer = quick(ek.lazy(Dropping)(rate=0.25))
    state = trainer.init()
    data = arrays(10)
    inference = ek.train.forward(trainer.in_step, state, data, inference=True)
    np.testing.assert_allclose(inference.preds, ek.train.predict(trainer, state, data), rtol=1e-5, atol=1e-6)
    training = ek.train.forward(trainer.in_step, state, data)
    assert differs(training.preds, inference.preds)  # dropout
    context = ek.train.loss_and_gradients(trainer.in_step, state, data)
    np.testing.assert_allclose(context.preds, training.preds, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(context.grads) == jax.tree.structure(state.params())


def with_own_gradients(config, state, batch):
    """Gradients of a loss that no config names; only the optimizer and the metrics are the trainer's."""
    context = ek.train.forward(config, state, batch)
    params = state.params()
    grads = jax.tree.map(jnp.ones_like, params)
    state, context = ek.train.apply_updates(config, state, context.replace(params=params, grads=grads))
    return state, ek.train.collect(config, context)


def test_the_pieces_work_with_gradients_of_ones_own():
    trainer = small(losses={}, step=with_own_gradients, optimizer=ek.lazy(optax.sgd)(0.1), num_steps=1)
    before, result = trainer.init(), trainer.train()
    assert set(result.metrics) == {"train/accuracy"}
    moved = jax.tree.map(
        lambda old, new: np.allclose(old - 0.1, new, atol=1e-6), before.params(), result.state.params()
    )
    assert all(jax.tree.leaves(moved))
