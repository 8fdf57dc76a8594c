"""Evals: exact over all rows, whatever the batch size and whatever the padding holds."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.data import Batch, InMemory
from equikd.errors import EquikdError
from equikd.evals import Eval
from equikd.examples.digits import Digits, get_config, load
from equikd.train._setup import prepare
from tests.train import _experiment

NAMES = {"loss", "losses/ce", "weighted/ce", "accuracy"}


def evaluated(trainer: ek.Trainer, data: Any, state: Any, **options: Any) -> dict[str, float]:
    """The results of one eval of a state."""
    trainer = ek.override(trainer, {"evals": {"it": Eval(data=data, **options)}})
    (one,) = prepare(trainer).evals
    aux = ek.evals.evaluate(one.config, ek.train._check.view_of(state), one.data.epoch(), one.empty)
    return {name: float(value) for name, value in jax.device_get(aux).results().items()}


@pytest.fixture(scope="module")
def digits():
    """The digits example after some steps, with weights and smoothing that are not the defaults."""
    changes = {"losses.ce.weight": 0.5, "losses.ce.label_smoothing": 0.1, "writers": (), "evals": {}}
    trainer = ek.override(get_config(Digits(num_steps=30, width=32)), changes)
    return trainer, trainer.train()


@pytest.fixture(scope="module")
def oracle(digits):
    """Loss and accuracy over the whole test split at once, by numpy in double precision."""
    _, result = digits
    test = load("test")
    logits = np.asarray(result.predict(test), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    target = np.eye(10)[test["label"]] * 0.9 + 0.1 / 10
    loss = -(target * log_p).sum(1).mean()
    right = logits.argmax(1) == test["label"]
    return {"losses/ce": loss, "weighted/ce": 0.5 * loss, "loss": 0.5 * loss, "accuracy": right.mean()}


@pytest.mark.parametrize("batch_size", [1, 7, 64, 360, 1000])
def test_the_batch_size_changes_nothing(digits, oracle, batch_size, compilations):
    trainer, result = digits
    compilations.clear()
    got = evaluated(trainer, InMemory(load("test"), batch_size=batch_size), result.state)
    assert got.keys() == NAMES
    for name in NAMES:
        assert got[name] == pytest.approx(oracle[name], abs=1e-6), name
    compiled = list(compilations.names)
    assert sum("eval" in name for name in compiled) == 1  # for all its batches, the padded one too
    again = evaluated(trainer, InMemory(load("test"), batch_size=batch_size), result.state)
    assert again == got
    assert compilations.names == compiled


@pytest.mark.parametrize("filler", [np.nan, np.inf, -np.inf, 1e30])
def test_what_padding_holds_does_not_matter(digits, oracle, filler):
    trainer, result = digits
    test = load("test")

    def read() -> Any:
        for start in range(0, 360, 100):
            rows = {name: column[start : start + 100] for name, column in test.items()}
            count = len(rows["label"])
            image = np.full((100, 8, 8), filler, np.float32)
            label = np.full(100, -5, np.int32)
            image[:count], label[:count] = rows["image"], rows["label"]
            yield Batch({"image": image, "label": label}, np.arange(100) < count)

    got = evaluated(trainer, ek.data.Iterable(read), result.state)
    for name in NAMES:
        assert got[name] == pytest.approx(oracle[name], abs=1e-6), name


def test_batches_without_real_rows_count_nowhere(digits, oracle):
    trainer, result = digits
    test = load("test")

    def read() -> Any:
        yield Batch(test, np.zeros(360, bool))
        yield Batch(test, np.ones(360, bool))
        yield Batch(jax.tree.map(np.zeros_like, test), np.zeros(360, bool))

    got = evaluated(trainer, ek.data.Iterable(read), result.state)
    assert got == pytest.approx(oracle, abs=1e-6)


def test_new_floats_compile_nothing(digits, compilations):
    trainer, result = digits
    data = InMemory(load("test"), batch_size=90)
    first = evaluated(trainer, data, result.state)
    compilations.clear()
    changed = ek.override(trainer, {"losses.ce.weight": 2.0, "losses.ce.label_smoothing": 0.3, "model.dropout": 0.7})
    second = evaluated(changed, data, result.state)
    assert compilations.names == []
    assert second["accuracy"] == first["accuracy"]  # inference mode: no dropout
    assert second["weighted/ce"] == pytest.approx(2 * second["losses/ce"], rel=1e-6)
    assert second["losses/ce"] != first["losses/ce"]


def test_running_statistics_are_used_and_kept():
    trainer = _experiment.get_config(_experiment.Args(num_steps=20))
    state = ek.override(trainer, {"writers": (), "evals": {}}).train().state
    before = [np.array(leaf) for leaf in jax.tree.leaves(state.model_state)]
    test = _experiment.load(50, seed=1)
    got = [evaluated(trainer, InMemory(test, batch_size=size), state) for size in (1, 13, 50)]
    for one in got[1:]:
        assert one == pytest.approx(got[0], abs=1e-6)
    for leaf, old in zip(jax.tree.leaves(state.model_state), before, strict=True):
        np.testing.assert_array_equal(leaf, old)


def small(**changes: Any) -> ek.Trainer:
    data = {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(16, 2)}
    given: dict[str, Any] = {
        "model": ek.lazy(eqx.nn.Linear)(2, 2),
        "inputs": {"x": "batch.x"},
        "losses": {"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        "optimizer": ek.lazy(optax.sgd)(0.1),
        "train_data": InMemory(data, batch_size=4),
        "num_steps": 25,
        "log_every": 1000,
        "writers": (),
        "evals": {"test": Eval(data=InMemory(data, batch_size=8))},
    }
    return ek.Trainer(**given | changes)


@pytest.mark.parametrize(("every", "steps"), [(10, [10, 20, 25]), (5, [5, 10, 15, 20, 25]), (None, [25]), (100, [25])])
def test_an_eval_runs_at_its_interval_and_at_the_end(every, steps):
    result = ek.override(small(), {"evals.test.every": every}).train()
    assert [row.step for row in result.history if row.split == "test"] == steps


def test_evals_of_several_datasets_stand_side_by_side():
    data = {"x": np.ones((4, 2), np.float32)}
    evals = {
        "b": Eval(data=InMemory(data, batch_size=2), every=10),
        "a": Eval(data=InMemory(data, batch_size=4), every=20),
    }
    result = small(evals=evals).train()
    assert [(row.step, row.split) for row in result.history] == [
        (10, "b"),
        (20, "a"),
        (20, "b"),
        (25, "train"),
        (25, "a"),
        (25, "b"),
    ]
    assert result.metrics["a/loss"] == pytest.approx(result.metrics["b/loss"], rel=1e-6)


def test_an_eval_leaves_the_training_as_it_was():
    with_evals = ek.override(small(), {"evals.test.every": 1}).train()
    without = small(evals={}).train()
    np.testing.assert_array_equal(with_evals.model.weight, without.model.weight)
    assert with_evals.metrics["train/loss"] == without.metrics["train/loss"]


def test_an_eval_inherits_what_can_run_in_it():
    metrics = {
        "mean": ek.metrics.Mean(values="preds"),
        "norm": ek.metrics.Mean(values="grads.weight", mask=None),
    }
    result = small(metrics=metrics).train()
    assert {"train/mean", "train/norm", "test/mean"} <= result.metrics.keys()
    assert "test/norm" not in result.metrics


def test_an_eval_may_have_its_own_losses_and_metrics():
    own = Eval(
        data=InMemory({"x": np.ones((4, 2), np.float32), "y": np.zeros((4, 2), np.float32)}, batch_size=4),
        losses={"zero": ek.losses.SquaredError(preds="preds", targets="batch.y")},
        metrics={"mean": ek.metrics.Mean(values="batch.x")},
    )
    result = small(evals={"own": own, "none": Eval(data=own.data, losses={}, metrics={})}).train()
    own_names = {"own/loss", "own/losses/zero", "own/weighted/zero", "own/mean"}
    assert {name for name in result.metrics if not name.startswith("train/")} == own_names
    assert result.metrics["own/mean"] == 1


def test_naming_what_cannot_run_in_an_eval_is_an_error(snapshot):
    metrics = {"norm": ek.metrics.Mean(values="grads.weight", mask=None)}
    test = Eval(data=InMemory({"y": np.ones((4, 2), np.float32)}, batch_size=4), metrics=metrics)
    with pytest.raises(EquikdError) as error:
        small(evals={"test": test}).train()
    snapshot("cannot_run", str(error.value))


def test_a_weight_that_changes_is_that_of_the_step_of_the_eval():
    weight = ek.optim.Linear(1.0, 0.0, transition_steps=50)
    losses = {"mse": ek.losses.SquaredError(preds="preds", targets="batch.x", weight=weight)}
    result = ek.override(small(losses=losses), {"evals.test.every": 10}).train()
    for row in (row for row in result.history if row.split == "test"):
        assert row.metrics["weighted/mse"] == pytest.approx(row.metrics["losses/mse"] * (1 - row.step / 50), rel=1e-5)
        assert row.metrics["loss"] == pytest.approx(row.metrics["weighted/mse"], rel=1e-6)


def test_the_device_is_read_once_an_eval(digits, monkeypatch):
    trainer, result = digits
    reads = []
    monkeypatch.setattr(jax, "device_get", lambda tree, get=jax.device_get: reads.append(1) or get(tree))
    evaluated(trainer, InMemory(load("test"), batch_size=10), result.state)
    assert len(reads) == 1


def test_an_eval_takes_any_iterable_of_the_rows(digits, oracle):
    trainer, result = digits
    test = load("test")

    def read() -> Any:
        for start in itertools.count(0, 50):
            if start >= 360:
                return
            yield {name: column[start : start + 50] for name, column in test.items()}

    assert evaluated(trainer, read, result.state) == pytest.approx(oracle, abs=1e-6)
    assert jnp.isfinite(evaluated(trainer, read, result.state)["loss"])
