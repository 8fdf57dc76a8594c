"""What enters the step: references, pins, and one leaf for one value."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import ConfigError
from equikd.tree import named_leaves
from tests.train._small import BATCH, Counted, Dropping, LayerNormed, assert_same, differs, evaluated, leaves, quick


def error(weight: Any = 1.0) -> Any:
    return ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label", weight=weight)


@pytest.mark.slow
def test_num_steps_in_a_schedule_recompiles_nothing(compilations: Any) -> None:
    def make(num_steps: int) -> ek.Trainer:
        rate = ek.optim.WarmupCosine(0.0, 0.1, warmup_steps=2, decay_steps=ek.ref("num_steps"))
        return quick(optimizer=ek.lazy(optax.sgd)(rate), num_steps=num_steps)

    make(12).train()
    compilations.clear()
    Counted.traces[0] = 0
    result = make(20).train()
    ek.override(make(12), {"num_steps": 20}).train()
    assert compilations.names == []
    assert Counted.traces[0] == 0
    # As with the number itself, and as optax's own schedule has it.
    rate = ek.optim.WarmupCosine(0.0, 0.1, warmup_steps=2, decay_steps=20)
    assert_same(result.state, quick(optimizer=ek.lazy(optax.sgd)(rate), num_steps=20).train().state)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 20)
    state = make(20).init()
    for step, batch in zip(range(20), make(20).batches(state), strict=False):
        grads = eqx.filter_grad(_loss)(state.model, batch.data)
        model = eqx.apply_updates(state.model, jax.tree.map(lambda g, step=step: -schedule(step) * g, grads))
        state, _ = ek.train.step(make(20), state, batch)
        for ours, theirs in zip(leaves(state.model), leaves(model), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def _loss(model: Any, batch: Any) -> Any:
    logits = jax.vmap(model)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def test_a_referred_float_is_one_leaf_with_two_readers(compilations: Any) -> None:
    def make(value: float) -> ek.Trainer:
        losses = {"a": error(ek.ref("shared.weight")), "b": error(ek.ref("shared.weight"))}
        return quick(losses=losses, shared={"weight": value, "unused": 1.0})

    names = [path for path in named_leaves(make(0.5).in_step) if "weight" in path]
    assert len(names) == 1
    before = make(0.5).train()
    compilations.clear()
    after = ek.override(make(0.5), {"shared.weight": 2.0}).train()
    assert compilations.names == []
    assert_same(after.state, make(2.0).train().state)
    plain = quick(losses={"a": error(2.0), "b": error(2.0)}).train()
    assert_same(after.state, plain.state)
    assert after.metrics == plain.metrics
    assert before.metrics["train/weighted/a"] != after.metrics["train/weighted/a"]
    assert after.metrics["train/weighted/a"] == after.metrics["train/weighted/b"]


def test_a_reference_inside_the_step_is_one_leaf_with_two_readers(compilations: Any) -> None:
    trainer = quick(losses={"a": error(0.5), "b": error(ek.ref("losses.a.weight"))})
    assert [path for path in named_leaves(trainer.in_step) if "weight" in path] == ["losses.a.weight"]
    trainer.train()
    compilations.clear()
    after = ek.override(trainer, {"losses.a.weight": 2.0}).train()
    assert compilations.names == []
    assert after.metrics["train/weighted/a"] == after.metrics["train/weighted/b"]
    assert after.metrics == quick(losses={"a": error(2.0), "b": error(2.0)}).train().metrics


@pytest.mark.slow
def test_a_gradient_reaches_a_referred_float_from_both_its_readers() -> None:
    losses = {"a": error(ek.ref("shared.weight")), "b": error(ek.ref("shared.weight"))}
    trainer = quick(losses=losses, shared={"weight": 0.5})
    state = trainer.init()
    batch = next(trainer.batches(state))
    grads = jax.grad(lambda config: ek.train.step(config, state, batch)[1].loss)(trainer.in_step)
    (grad,) = [leaf for path, leaf in named_leaves(grads).items() if "weight" in path]
    np.testing.assert_allclose(grad, 2 * _loss(state.model, batch.data), rtol=1e-5)


@pytest.mark.slow
def test_a_reference_to_a_reference_names_the_same_leaf() -> None:
    losses = {
        "a": error(ek.ref("shared.alias")),
        "b": error(ek.ref("shared.weight")),
        "c": error(ek.ref("shared.inside")),
        "d": error(0.25),
    }
    shared = {"weight": 0.5, "alias": ek.ref("shared.weight"), "inside": ek.ref("losses.d.weight")}
    trainer = quick(losses=losses, shared=shared)
    assert len([path for path in named_leaves(trainer.in_step) if "weight" in path]) == 2
    metrics = trainer.train().metrics
    plain = quick(losses={"a": error(0.5), "b": error(0.5), "c": error(0.25), "d": error(0.25)}).train().metrics
    assert metrics == plain


@pytest.mark.slow
def test_a_reference_to_a_node_and_to_a_config(compilations: Any) -> None:
    def make(peak: float, steps: int) -> ek.Trainer:
        schedule = ek.optim.Linear(peak, 0.0, transition_steps=ek.ref("num_steps"))
        return quick(
            losses={"a": error(ek.ref("shared.fall"))},
            optimizer=ek.lazy(optax.chain)(ek.ref("shared.clip"), ek.lazy(optax.sgd)(ek.ref("shared.fall"))),
            shared={"fall": schedule, "clip": ek.lazy(optax.clip_by_global_norm)(0.1)},
            num_steps=steps,
        )

    before = make(0.5, 12).train()
    compilations.clear()
    after = ek.override(make(0.5, 12), {"shared.fall.init_value": 0.25, "shared.clip.max_norm": 0.05}).train()
    longer = ek.override(make(0.5, 12), {"num_steps": 14}).train()
    assert compilations.names == []
    assert differs(before.state, after.state)
    assert int(longer.state.step) == 14
    fall = ek.optim.Linear(0.25, 0.0, transition_steps=12)
    plain = quick(
        losses={"a": error(fall)},
        optimizer=ek.lazy(optax.chain)(ek.lazy(optax.clip_by_global_norm)(0.05), ek.lazy(optax.sgd)(fall)),
    ).train()
    assert_same(after.state, plain.state)


@pytest.mark.slow
def test_a_referred_int_of_a_module_is_static(compilations: Any) -> None:
    def make(width: int) -> ek.Trainer:
        return quick(
            ek.lazy(eqx.nn.MLP)(6, 3, ek.ref("shared.width"), 1), inputs={"x": "batch.x"}, shared={"width": width}
        )

    assert make(4).train().model.layers[0].weight.shape == (4, 6)
    compilations.clear()
    assert make(5).train().model.layers[0].weight.shape == (5, 6)
    assert compilations.names.count("jit(flat_step)") == 1


class Weighed(Counted):
    scale: Any

    def __init__(self, scale: float, *, key: jax.Array) -> None:
        self.ends(key)
        self.scale = scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x))) * self.scale


@pytest.mark.slow
def test_a_model_may_read_what_stands_elsewhere(compilations: Any) -> None:
    """Its hyperparameters follow, from outside the step and from within."""
    outside = quick(ek.lazy(Weighed)(ek.ref("shared.scale")), shared={"scale": 0.5})
    inside = quick(ek.lazy(Weighed)(ek.ref("losses.ce.weight")), losses={"ce": error(0.5)})
    for trainer, path in ((outside, "shared.scale"), (inside, "losses.ce.weight")):
        before = trainer.train()
        compilations.clear()
        after = ek.override(trainer, {path: 2.0}).train()
        assert compilations.names == []
        assert float(before.model.scale) == 0.5
        assert float(after.model.scale) == 2.0
        assert differs(before.state.params(), after.state.params())


def test_a_static_value_that_a_model_reads_elsewhere_makes_another_model() -> None:
    def make(width: int) -> ek.Trainer:
        return quick(
            ek.lazy(eqx.nn.MLP)(6, 3, ek.ref("optimizer[1].k"), 1),
            optimizer=ek.lazy(optax.chain)(ek.lazy(optax.sgd)(0.1), ek.lazy(_nothing)(k=width)),
        )

    assert make(4).init().model.layers[0].weight.shape == (4, 6)
    assert make(5).init().model.layers[0].weight.shape == (5, 6)


def _nothing(k: int) -> Any:
    del k
    return optax.identity()


def test_a_reference_of_an_eval_leads_to_what_the_trainer_has() -> None:
    own = {"a": error(ek.ref("losses.ce.weight"))}
    evals = {"test": ek.evals.Eval(data=evaluated()["test"].data, losses=own)}
    metrics = quick(losses={"ce": error(0.25)}, evals=evals).train().metrics
    np.testing.assert_allclose(metrics["test/loss"], 0.25 * metrics["test/losses/a"], rtol=1e-6)


def test_a_reference_that_leads_nowhere_or_back_is_an_error() -> None:
    for target, words in (("shared.wieght", "weight"), ("losses.a.weight", "back to itself")):
        trainer = quick(losses={"a": error(ek.ref(target))}, shared={"weight": 1.0})
        with pytest.raises(ConfigError, match=words):
            trainer.init()


@pytest.mark.slow
def test_trace_leaves_out_all_other_floats(compilations: Any) -> None:
    narrow = quick(ek.lazy(Dropping)(rate=0.25), trace=("optimizer.*", "losses.**"))
    assert "model.rate" not in named_leaves(narrow.in_step)
    assert {path.partition(".")[0] for path in named_leaves(narrow.in_step)} == {"optimizer", "losses"}
    before = narrow.train()
    compilations.clear()
    ek.override(narrow, {"optimizer.learning_rate": 0.3}).train()
    assert compilations.names == []
    after = ek.override(narrow, {"model.rate": 0.5}).train()
    assert compilations.names == ["jit(flat_step)"]
    assert differs(before.state, after.state)
    wide = quick(ek.lazy(Dropping)(rate=0.25)).train().metrics
    for ours, theirs in zip(jax.tree.leaves(before.metrics), jax.tree.leaves(wide), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_pattern_of_trace_without_a_match_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"learning_rat.*matches no float"):
        quick(trace=("optimizer.learning_rat",)).in_step  # noqa: B018


@ek.config.config
class Power(ek.metrics.Metric):
    x: ek.KeyPath
    factor: float = 1.0

    def from_values(self, x: Any) -> Any:
        return ek.metrics.Average.of(self.factor * x**2)


@pytest.mark.slow
def test_a_pattern_of_trace_may_match_only_what_an_eval_does_not_have() -> None:
    metrics = {"gradient": Power(x="grads.first.weight", mask=None)}
    trainer = quick(metrics=metrics, evals=evaluated(), trace=("metrics.gradient.factor",))
    results = trainer.train().metrics
    assert "train/gradient" in results
    assert "test/gradient" not in results


def test_a_float_that_a_module_declares_static_is_no_leaf() -> None:
    assert "model.eps" not in named_leaves(quick(ek.lazy(LayerNormed)(eps=1e-5)).in_step)
    outside = quick(ek.lazy(LayerNormed)(eps=ek.ref("shared.eps")), shared={"eps": 1e-2})
    assert [path for path in named_leaves(outside.in_step) if "eps" in path] == []
    assert_same(outside.train().state, quick(ek.lazy(LayerNormed)(eps=1e-2)).train().state)


def test_the_part_in_the_step_has_the_batch_size_of_no_one() -> None:
    """Nothing of the data, so that arrays never enter a compiled call."""
    assert not any(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in jax.tree.leaves(quick().in_step))
    assert BATCH not in jax.tree.leaves(quick().in_step)


def test_patterns_of_trace_reach_into_what_is_referred_to() -> None:
    fall = ek.optim.Linear(0.5, 0.0, transition_steps=4)
    options = {"optimizer": ek.lazy(optax.sgd)(ek.ref("shared.fall")), "shared": {"fall": fall}}
    traced = quick(trace=("shared.fall.init_value",), **options)
    leaves_of_fall = [path for path in named_leaves(traced.in_step) if path.endswith("_value")]
    assert leaves_of_fall == ["referred['shared.fall'].init_value"]
    with pytest.raises(ConfigError, match=r"shared\.fall\.init_value"):
        quick(trace=("shared.fall.init_valu",), **options).in_step  # noqa: B018


def test_patterns_of_trace_without_a_match_are_one_report(snapshot: Any) -> None:
    patterns = ("optimizer.learning_rat", "optimizer.learning_rate", "model.dropout.*")
    with pytest.raises(ConfigError) as error:
        quick(ek.lazy(Dropping)(rate=0.25), trace=patterns).in_step  # noqa: B018
    snapshot("trace_without_match", str(error.value))


@pytest.mark.slow
def test_a_reference_into_what_another_leads_to_is_the_same_leaf(compilations: Any) -> None:
    def make(first: str, second: str, peak: float = 0.5) -> ek.Trainer:
        fall = ek.optim.Linear(peak, 0.0, transition_steps=12)
        losses = {"a": error(ek.ref(first)), "b": error(ek.ref(second))}
        return quick(losses=losses, shared={"fall": fall})

    for paths in (("shared.fall", "shared.fall.init_value"), ("shared['fall'].init_value", "shared.fall")):
        trainer = make(*paths)
        found = [path for path in named_leaves(trainer.in_step) if "init_value" in path]
        assert len(found) == 1
        before = trainer.train()
        compilations.clear()
        after = ek.override(trainer, {"shared.fall.init_value": 0.25}).train()
        assert compilations.names == []
        assert differs(before.state, after.state)
        assert_same(after.state, make(*paths, peak=0.25).train().state)
