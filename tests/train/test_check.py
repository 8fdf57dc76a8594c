"""What is wrong with an experiment is said before anything is computed, all at once, with the place and the way out.

Each message here is one that a user meets. `refused` also asserts that nothing was compiled and nothing written.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import ConfigError, EquikdError, WiringError
from tests.train._small import BATCH, CLASSES, FEATURES, Dropping, Plain, arrays, evaluated, small

L = ek.lazy
Refused = Callable[..., str]


@pytest.fixture
def refused(compilations: Any, tmp_path: Path, snapshot: Any) -> Refused:
    """`refused(name, trainer)`: its error, from `init` and from `train`, equals the snapshot `name`."""

    def check(name: str, trainer: ek.Trainer, kind: type[Exception] = WiringError, **live: Any) -> str:
        compilations.clear()
        texts = []
        for run in (trainer.init, lambda **live: trainer.train(tmp_path / "run", **live)):
            with pytest.raises(kind) as error:
                run(**live)
            notes = [note for note in getattr(error.value, "__notes__", []) if "JAX has removed" not in note]
            own = [str(error.value)] if isinstance(error.value, EquikdError) else []
            texts.append("\n".join([*own, *notes]))
        assert texts[0] == texts[1]
        assert [name for name in compilations.names if "step" in name or "eval" in name] == []
        assert not (tmp_path / "run").exists()
        assert len(texts[0].splitlines()) <= 40
        assert max(map(len, texts[0].splitlines())) <= 400
        snapshot(name, texts[0])
        return texts[0]

    return check


def cross_entropy(**options: Any) -> Any:
    return ek.losses.SoftmaxCrossEntropy(**{"logits": "preds", "labels": "batch.label", **options})


def accuracy(**options: Any) -> Any:
    return ek.metrics.Accuracy(**{"preds": "preds", "labels": "batch.label", **options})


@ek.config.config(kw_only=True)
class Norm(ek.metrics.Metric):
    """The mean square of something."""

    values: ek.KeyPath | None
    mask: ek.KeyPath | None = None

    def from_values(self, values: Any) -> ek.metrics.Average:
        return ek.metrics.Average.of(jnp.stack([jnp.mean(leaf**2) for leaf in jax.tree.leaves(values)]))


# Key paths.


def test_everything_that_is_connected_wrongly_is_one_report(refused):
    trainer = small(
        inputs={"x": "batch.xx"},
        losses={"ce": cross_entropy(labels="batch.lable"), "ok": cross_entropy()},
        metrics={
            "accuracy": accuracy(labels="labels"),
            "norm": Norm(values="grad"),
            "mask": accuracy(mask="batch.masks"),
        },
        evals={"test": ek.evals.Eval(data=evaluated()["test"].data, metrics={"acc": accuracy(labels="batch.label.x")})},
    )
    text = refused("all_wrong_key_paths", trainer)
    for where in (
        "inputs.x",
        "losses.ce.labels",
        "metrics.accuracy.labels",
        "metrics.norm.values",
        "metrics.mask.mask",
        "evals.test.metrics.acc.labels",
    ):
        assert sum(line.removeprefix("- ").startswith(f"{where} = ") for line in text.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("input", {"inputs": {"x": "batch.X"}}),
        ("input_argument", {"inputs": {"X": "batch.x"}}),
        ("nothing_fills", {"inputs": {}}),
        ("loss", {"losses": {"ce": cross_entropy(logits="preds.logits")}}),
        ("mask_of_a_loss", {"losses": {"ce": cross_entropy(mask="batch.real")}}),
        ("metric", {"metrics": {"norm": Norm(values="grads.layers[3]")}}),
        ("unfilled", {"metrics": {"norm": Norm(values=None)}}),
        ("pattern", {"metrics": {"norm": Norm(values="grads.**")}}),
        ("misspelt", {"losses": {"ce": cross_entropy(logits="preds[")}}),
    ],
)
def test_one_wrong_key_path(name, fields, refused):
    refused(f"key_path_{name}", small(**fields))


def test_right_key_paths_are_not_reported_with_a_wrong_one(refused):
    """The report knows what a metric of the training step sees, down to the states of optimizer and losses."""
    right = {
        "grads": Norm(values="grads.first.weight"),
        "updates": Norm(values="updates.last"),
        "params": Norm(values="params"),
        "count": Norm(values="opt_state[0].count"),
        "total": Norm(values="losses.ce.total"),
        "config": Norm(values="config.model.rate"),
        "model": Norm(values="model.dropout.p"),
        "step": Norm(values="step"),
    }
    small(metrics=right).init()
    text = refused("one_among_right_ones", small(metrics=right | {"norm": Norm(values="grads.firs.weight")}))
    assert "connected wrongly" not in text


def test_what_waits_for_predictions_is_not_reported_where_there_are_none(refused):
    text = refused("no_predictions", small(inputs={"x": "batch.X"}, metrics={"a": accuracy(preds="preds.logits")}))
    assert "logits" not in text


def test_an_eval_that_names_what_only_training_has(refused):
    data = evaluated()["test"].data
    evals = {"test": ek.evals.Eval(data=data, metrics={"norm": Norm(values="grads.first.weight")})}
    refused("grads_in_an_eval", small(evals=evals))


def test_what_only_training_has_is_not_inherited():
    metrics = {"norm": Norm(values="grads.first.weight"), "accuracy": accuracy(), "updates": Norm(values="updates")}
    results = small(metrics=metrics, evals=evaluated(every=None), num_steps=2).train().metrics
    assert {name for name in results if name.startswith("test/")} == {
        "test/loss",
        "test/losses/ce",
        "test/weighted/ce",
        "test/accuracy",
    }
    assert {"train/norm", "train/updates"} <= set(results)


# Shapes.


def test_a_batch_that_the_model_does_not_take(refused):
    wide = arrays()
    wide["x"] = np.concatenate([wide["x"], wide["x"]], axis=1)
    text = refused("shape_of_the_batch", small(train_data=ek.data.InMemory(wide, batch_size=BATCH)))
    assert f"[{BATCH}, {2 * FEATURES}]" in text


class Annotated(Plain):
    @ek.typechecked
    def __call__(self, x: ek.typing.Float[ek.typing.Array, "h w"]) -> Any:
        return x


def test_a_batch_that_the_models_annotations_refuse(refused):
    refused("shape_of_the_batch_annotated", small(L(Annotated)()))


class Reshaping(Plain):
    def __call__(self, x):
        return x.reshape(2, 4)


def test_the_line_of_the_model_is_named(refused):
    text = refused("line_of_the_model", small(L(Reshaping)()))
    assert "test_check.py" in text


def test_a_model_for_whole_batches_without_per_example(refused):
    class Whole(Plain):
        def __call__(self, x):
            return x @ jnp.ones((FEATURES, CLASSES)) if x.ndim == 2 else x[:, None] @ jnp.ones((FEATURES, CLASSES))

    refused("whole_batches", small(L(Whole)()))


def test_an_eval_whose_data_does_not_fit_the_model(refused):
    other = {"x": np.ones((10, 2), np.float32), "label": np.zeros(10, np.int32)}
    missing = {"label": np.zeros(10, np.int32)}
    evals = {
        "wide": ek.evals.Eval(data=ek.data.InMemory(other, batch_size=5)),
        "bare": ek.evals.Eval(data=ek.data.InMemory(missing, batch_size=5)),
    }
    refused("eval_data", small(evals=evals))


def test_labels_of_another_shape(refused):
    data = arrays()
    data["label"] = np.zeros((len(data["x"]), 2, 2), np.int32)
    refused("shape_of_labels", small(train_data=ek.data.InMemory(data, batch_size=BATCH)))


@ek.config.config
class Broken(ek.losses.Loss):
    """A loss of one's own with a fault."""

    x: ek.KeyPath

    def values(self, x: Any) -> Any:
        return x @ x


def test_a_fault_in_a_loss_of_ones_own(refused):
    refused("fault_in_a_loss", small(losses={"broken": Broken(x="preds")}))


def test_shapes_and_key_paths_are_one_report(refused):
    losses = {"broken": Broken(x="preds"), "ce": cross_entropy(labels="batch.y")}
    evals = {"test": ek.evals.Eval(data=evaluated()["test"].data, metrics={"a": accuracy(labels="grads")})}
    text = refused("shapes_and_key_paths", small(losses=losses, evals=evals))
    assert [text.count(part) for part in ("losses.broken", "losses.ce.labels", "evals.test.metrics.a.labels")] == [
        1,
        1,
        1,
    ]


def test_a_mask_that_does_not_fit(refused):
    data = arrays() | {"keep": np.ones((96, 7), bool)}
    trainer = small(
        losses={"ce": cross_entropy(mask="batch.keep")}, train_data=ek.data.InMemory(data, batch_size=BATCH)
    )
    refused("shape_of_a_mask", trainer)


def test_a_model_that_needs_a_key_and_takes_none(refused):
    class Keyless(Dropping):
        def __call__(self, x):
            return self.last(self.dropout(jax.nn.relu(self.first(x))))

    refused("no_key", small(L(Keyless)(rate=0.5)), RuntimeError)


def test_an_error_of_another_kind_keeps_its_type_and_says_what_the_model_was_called_on(refused):
    class Faulty(Plain):
        def __call__(self, x):
            return {}["missing"]

    refused("another_error", small(L(Faulty)()), KeyError)


class Branching(Plain):
    rate: float
    other: float

    def __init__(self, rate: float, other: float, *, key: jax.Array) -> None:
        self.ends(key)
        self.rate, self.other = rate, other

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.first(x) if self.rate > 0 else self.other * self.first(x))


def test_python_control_flow_on_a_traced_float_names_the_float_and_the_pin(refused):
    trainer = small(L(Branching)(rate=0.5, other=0.25), evals=evaluated())
    text = refused("control_flow", trainer, jax.errors.TracerBoolConversionError)
    assert "model.other" not in text
    ek.override(trainer, {"model.rate": ek.pin(0.5)}).init()


@ek.config.config
class Guarded(ek.losses.Loss):
    """A loss that looks at its own float."""

    x: ek.KeyPath
    scale: float = 1.0

    def values(self, x: Any) -> Any:
        return self.scale * x.sum(-1) if self.scale > 0 else x.sum(-1)


def test_control_flow_in_a_loss_or_an_optimizer_names_the_float_too(refused):
    guarded = small(losses={"guarded": Guarded(x="preds", scale=2.0)})
    refused("control_flow_in_a_loss", guarded, jax.errors.TracerBoolConversionError)
    ek.override(guarded, {"losses.guarded.scale": ek.pin(2.0)}).init()


# Kinds.


def not_a_loss() -> Any:
    return optax.l2_loss


def test_losses_and_metrics_that_are_none_are_one_report(refused):
    trainer = small(
        losses={"a": L(not_a_loss)(), "b": L(eqx.nn.Identity)()},
        metrics={"loss": accuracy(), "losses/x": accuracy(), "c": L(optax.sgd)(0.1)},
        evals={"test": ek.evals.Eval(data=evaluated()["test"].data, losses={"d": L(dict)()})},
    )
    refused("kinds", trainer, ConfigError)


def test_a_loss_that_is_none_where_it_is_written(snapshot):
    with pytest.raises(ConfigError) as error:
        small(losses={"a": optax.l2_loss})
    snapshot("function_as_a_loss", str(error.value))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("schedule", L(optax.constant_schedule)(0.1)), ("function", L(optax.adam)), ("nothing", None), ("number", 0.1)],
)
def test_an_optimizer_that_is_none(name, optimizer, refused):
    refused(f"optimizer_{name}", small(optimizer=optimizer), ConfigError)


def test_an_argument_that_the_optimizer_does_not_have(snapshot):
    with pytest.raises(ConfigError) as error:
        L(optax.adamw)(learning_rat=0.1)
    snapshot("optimizer_argument", re.sub(r"where: .*", "where: ...", str(error.value)))


def test_patterns_of_trainable_without_a_match(refused):
    refused("trainable", small(trainable=("first.*", "model.last.weight", "layers[0].weight")), ConfigError)


def test_no_model(refused):
    refused("no_model", ek.override(small(), {"model": None}), ConfigError)


# Live models.


def test_a_live_model_of_another_structure(refused):
    trainer = small(L(eqx.nn.MLP)(FEATURES, CLASSES, 8, 1))
    key = jax.random.key(0)
    refused("live_shapes", trainer, ConfigError, model=eqx.nn.MLP(FEATURES, CLASSES, 9, 1, key=key))
    refused("live_depth", trainer, ConfigError, model=eqx.nn.MLP(FEATURES, CLASSES, 8, 2, key=key))
    other = eqx.nn.MLP(FEATURES, CLASSES, 8, 1, activation=jax.nn.gelu, key=key)
    refused("live_activation", trainer, ConfigError, model=other)


def test_nothing_is_compiled_by_a_check_that_passes(compilations):
    trainer = small(evals=evaluated())
    trainer.init()
    compilations.clear()
    from equikd.train._setup import prepare

    prepare(ek.override(trainer, {"optimizer.learning_rate": 0.5}))
    assert compilations.names == []


def own_step(config: Any, state: ek.train.TrainState, batch: Any) -> Any:
    context = ek.train.loss_and_gradients(config, state, batch)
    state, context = ek.train.apply_updates(config, state, context)
    return state, ek.train.collect(config, context)


def test_with_a_step_of_ones_own_the_evals_are_checked_all_the_same(refused):
    evals = {"test": ek.evals.Eval(data=evaluated()["test"].data, metrics={"a": accuracy(labels="batch.labels")})}
    small(step=own_step, evals=evaluated()).init()
    refused("own_step", small(step=own_step, evals=evals))


def test_injected_hyperparameters_are_warned_of(snapshot):
    injected = L(optax.inject_hyperparams)(optax.adam)(learning_rate=1e-3)
    with pytest.warns(UserWarning, match="inject_hyperparams") as caught:
        small(optimizer=injected).init()
    snapshot("injected", str(caught[0].message))
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "optimizer",
    [
        L(L(optax.inject_hyperparams)(optax.adam))(learning_rate=1e-3),
        L(optax.inject_hyperparams(optax.adam))(learning_rate=1e-3),
        L(optax.chain)(L(optax.clip)(1.0), L(optax.inject_hyperparams(optax.adam))(learning_rate=1e-3)),
        ek.lazy.partial(optax.inject_hyperparams(optax.adam))(learning_rate=1e-3)(),
        ek.ref("shared.opt"),
    ],
)
def test_however_hyperparameters_are_injected(optimizer):
    shared = {"opt": L(optax.inject_hyperparams(optax.sgd))(learning_rate=1e-3)}
    with pytest.warns(UserWarning, match="inject_hyperparams") as caught:
        small(optimizer=optimizer, shared=shared).init()
    assert len(caught) == 1


def test_training_needs_a_loss(refused):
    refused("no_losses", small(losses={}), ConfigError)


def test_evals_may_have_any_name():
    trainer = small(evals={"test-small": evaluated()["test"], "a b/c": evaluated()["test"]}, num_steps=2)
    assert {"test-small/loss", "a b/c/loss"} <= set(trainer.train().metrics)


def test_evals_whose_results_could_have_one_name():
    evals = {"a": evaluated()["test"], "a/b": evaluated()["test"]}
    with pytest.raises(ConfigError, match=r"'a/b' and 'a' could have one name"):
        small(evals=evals).train()


class LooksAtData(Plain):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.first(x) if x.sum() > 0 else self.first(-x))


def test_control_flow_on_a_batch_blames_no_float():
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        small(L(LooksAtData)()).init()
    assert "Python needs the value of a traced float" not in "".join(error.value.__notes__)
