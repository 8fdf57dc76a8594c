"""A step of one's own, from the public pieces of the default one."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import ConfigError, EquikdError, WiringError
from equikd.train._custom import check_updatable
from equikd.wiring import Context
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


# Gradients of some of the losses, and of any scalar.


TWO = {
    "ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label"),
    "size": ek.losses.ParameterL2("params.**.weight", weight=0.1),
}


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_gradients_of_the_losses_add_up(accumulate: int) -> None:
    trainer = quick(losses=TWO, accumulate=accumulate)
    state, data = trainer.init(), arrays(16)

    @eqx.filter_jit
    def contexts(state: Any, data: Any) -> Any:
        every = [ek.train.loss_and_gradients(trainer.in_step, state, data, only) for only in (None, "ce", ("size",))]
        return [(one.grads, one.totals.compute(), {n: s.compute() for n, s in one.losses.items()}) for one in every]

    (whole, *report), (of_data, *same), (of_size, *_) = contexts(state, data)
    assert jax.tree.structure(of_data) == jax.tree.structure(whole)
    for both, one, other in zip(*map(leaves, (whole, of_data, of_size)), strict=True):
        np.testing.assert_allclose(both, one + other, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(of_size.first.weight, 0.2 * state.model.first.weight, rtol=1e-6)
    assert differs(whole, of_data)
    assert_same(report, same)  # all losses are reported, whichever are differentiated


def test_the_gradient_of_any_scalar_of_the_model() -> None:
    """With the penalty written by hand, the gradient is that of the same penalty among the losses."""
    own, default = quick(), quick(losses=TWO)
    state, data = own.init(), arrays(16)

    @eqx.filter_jit
    def contexts(state: Any, data: Any) -> Any:
        def loss(model: Any) -> Any:
            context = ek.train.forward(own.in_step, state, data, model=model)
            total, context = ek.train.losses_of(own.in_step, context)
            return total + 0.1 * sum(jnp.sum(layer.weight**2) for layer in (model.first, model.last)), context

        ours = ek.train.gradients(own.in_step, state, loss)
        theirs = ek.train.loss_and_gradients(default.in_step, state, data)
        return [(one.grads, one.params, one.preds, one.batch, one.key) for one in (ours, theirs)]

    (ours, *rest), (theirs, *others) = contexts(state, data)
    for one, other in zip(leaves(ours), leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert_same(rest, others)


@pytest.mark.slow
def test_running_statistics_and_frozen_parts_go_through_gradients() -> None:
    def own(config: Any, state: Any, batch: Any) -> Any:
        forward = lambda model: ek.train.forward(config, state, batch, model=model)
        context = ek.train.gradients(config, state, lambda model: ek.train.losses_of(config, forward(model)))
        state, context = ek.train.apply_updates(config, state, context)
        return state, ek.train.collect(config, context)

    fields: dict[str, Any] = {"trainable": "first.**", "num_steps": 3, "evals": evaluated(None)}
    ours = quick(ek.lazy(BatchNormed)(), step=own, **fields).train()
    default = quick(ek.lazy(BatchNormed)(), **fields).train()
    assert_same(ours.state, default.state)
    assert ours.metrics == default.metrics


# What people get wrong.


def composed(config: Any, state: Any, batch: Any) -> Any:
    context = ek.train.loss_and_gradients(config, state, batch)
    state, context = ek.train.apply_updates(config, state, context)
    return state, context


def returning(make: Any) -> Any:
    def my_step(config: Any, state: Any, batch: Any) -> Any:
        new, context = composed(config, state, batch)
        return make(state, new, context, ek.train.collect(config, context))

    return my_step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("returns_nothing", returning(lambda *_: None)),
        ("returns_the_state_alone", returning(lambda old, new, context, aux: new)),
        ("returns_the_model", returning(lambda old, new, context, aux: (new.model, aux))),
        ("returns_the_context", returning(lambda old, new, context, aux: (new, context))),
        ("returns_plain_numbers", returning(lambda old, new, context, aux: (new, {"loss": aux.loss}))),
        (
            "reports_no_states",
            returning(lambda old, new, context, aux: (new, ek.train.Aux(metrics={"loss": aux.loss, "a": Count("x")}))),
        ),
        (
            "forgets_the_step",
            returning(lambda old, new, context, aux: (eqx.tree_at(lambda s: s.step, new, old.step), aux)),
        ),
    ],
)
def test_what_a_step_returns_is_told_when_it_is_wrong(name: str, step: Any, snapshot: Any) -> None:
    with pytest.raises(EquikdError) as error:
        quick(step=step).init()
    snapshot(name, str(error.value))


def without_config(state: Any, batch: Any) -> Any: ...


def test_a_step_of_other_arguments(snapshot: Any) -> None:
    with pytest.raises(ConfigError) as error:
        quick(step=without_config).init()
    snapshot("other_arguments", str(error.value))
    with pytest.raises(ConfigError) as error:
        quick(step=ek.lazy(dict)(rate=0.1)).init()  # a node of what makes no step
    snapshot("no_function", str(error.value))


def test_updates_need_gradients_of_the_parameters(snapshot: Any) -> None:
    def with_grads(change: Any) -> Any:
        def step(config: Any, state: Any, batch: Any) -> Any:
            context = ek.train.loss_and_gradients(config, state, batch)
            state, context = ek.train.apply_updates(config, state, change(context))
            return state, ek.train.collect(config, context)

        return step

    def no_gradients(config: Any, state: Any, batch: Any) -> Any:
        return ek.train.apply_updates(config, state, ek.train.forward(config, state, batch))

    other = with_grads(lambda context: context.replace(grads=context.grads.first))
    shape = lambda grads: eqx.tree_at(lambda g: g.first.weight, grads, grads.first.weight.T)
    steps = {
        "no_gradients": no_gradients,
        "gradients_of_a_part": other,
        "gradients_of_another_shape": with_grads(lambda context: context.replace(grads=shape(context.grads))),
    }
    for name, step in steps.items():
        with pytest.raises(WiringError) as error:
            quick(step=step).init()
        snapshot(name, str(error.value))


def test_losses_that_are_not_there(snapshot: Any) -> None:
    def step(config: Any, state: Any, batch: Any) -> Any:
        return ek.train.loss_and_gradients(config, state, batch, only=("ce", "siz"))

    for accumulate in (1, 4):
        with pytest.raises(WiringError) as error:
            quick(step=step, losses=TWO, accumulate=accumulate).init()
        snapshot("only", str(error.value))


@pytest.mark.parametrize(
    ("name", "out"),
    [("loss_alone", lambda total, context: total), ("loss_of_rows", lambda total, context: (context.preds, context))],
)
def test_a_loss_that_is_no_scalar_and_context(name: str, out: Any, snapshot: Any) -> None:
    def step(config: Any, state: Any, batch: Any) -> Any:
        def loss(model: Any) -> Any:
            context = ek.train.forward(config, state, batch, model=model)
            return out(*ek.train.losses_of(config, context))

        return ek.train.gradients(config, state, loss)

    with pytest.raises(WiringError) as error:
        quick(step=step).init()
    snapshot(name, str(error.value))


def test_key_paths_that_lead_nowhere_are_told_with_their_place(snapshot: Any) -> None:
    """The check of the default step cannot know what this one computes; its own trace does."""

    def my_step(config: Any, state: Any, batch: Any) -> Any:
        state, context = composed(config, state, batch)
        return state, ek.train.collect(config, context)

    accuracy = ek.metrics.Accuracy(preds="preds", labels="batch.labels")
    wrapped = ek.metrics.TreeMap(ek.metrics.Mean("extra.cout", mask=None))
    cross_entropy = ek.losses.SoftmaxCrossEntropy(logits="pred", labels="batch.label")
    wrong: dict[str, dict[str, Any]] = {
        "metric_of_a_step": {"metrics": {"right": accuracy}},
        "wrapped_metric_of_a_step": {"metrics": {"wrapped": wrapped}, "init_extra": {"count": 0}},
        "loss_of_a_step": {"losses": {"ce": cross_entropy}},
    }
    for name, fields in wrong.items():
        with pytest.raises(WiringError) as error:
            quick(step=my_step, **fields).init()
        snapshot(name, str(error.value))


def test_paths_of_gradients_are_spelt_as_paths():
    """Those of a model that is a list begin with an index."""
    params, grads = [jnp.zeros(2), {"a b": jnp.zeros(2)}], [jnp.zeros(3), {"a b": jnp.zeros(2), "c": jnp.zeros(2)}]
    with pytest.raises(WiringError) as error:
        check_updatable(Context(model=params, params=params, grads=grads))
    assert "grads[0] is float32[3]" in str(error.value)
    assert "grads[1].c is no parameter" in str(error.value)
