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
from equikd.typing import Array, Bool, Float, Int
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


# When, on what, and of which model.


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"at": (0,)}, [0, 25]),
        ({"at": (0,), "final": False}, [0]),
        ({"at": (3, 7, 99)}, [3, 7, 25]),
        ({"at": (7, 10), "every": 10}, [7, 10, 20, 25]),
        ({"every": 10, "final": False}, [10, 20]),
        ({"every": 5, "final": False}, [5, 10, 15, 20, 25]),
        ({"final": False}, []),
    ],
    ids=["first_and_last", "first", "steps", "both", "interval", "interval_that_ends", "never"],
)
def test_when_an_eval_runs(options, steps):
    data = small().evals["test"].data
    result = small(evals={"test": Eval(data=data, **options)}).train()
    assert [row.step for row in result.history if row.split == "test"] == steps
    if 0 in steps:
        before = small().evaluate(small().init())
        assert {f"test/{name}": value for name, value in result.history[0].metrics.items()} == before


def test_an_eval_that_never_runs_can_be_asked_for(tmp_path):
    trainer = small(evals={"test": Eval(data=small().evals["test"].data, final=False)})
    result = trainer.train(tmp_path / "run")
    assert not any(name.startswith("test/") for name in result.metrics)
    assert not any(name.startswith("test/") for name in trainer.train(tmp_path / "run").metrics)  # complete already
    assert trainer.evaluate(result.state) == small().evaluate(result.state)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"num_batches": 0}, "num_batches"), ({"at": (-1,)}, "at must hold"), ({"every": 0}, "every must be")],
    ids=["num_batches", "at", "every"],
)
def test_numbers_that_mean_nothing_are_refused(changes, says):
    with pytest.raises(EquikdError, match=says):
        ek.override(small(), {f"evals.test.{name}": value for name, value in changes.items()}).train()


@pytest.mark.parametrize("num_batches", [1, 2, 5, None])
def test_the_first_batches_alone(num_batches):
    data = {"x": np.arange(14, dtype=np.float32).reshape(7, 2)}
    mean = {"mean": ek.metrics.Mean(values="batch.x")}
    one = Eval(data=InMemory(data, batch_size=2), num_batches=num_batches, metrics=mean)
    rows = 7 if num_batches is None else min(7, 2 * num_batches)
    assert small(evals={"test": one}).evaluate(small().init())["test/mean"] == data["x"][:rows].mean()


def test_full_batches_need_no_mask():
    data = {"x": np.arange(14, dtype=np.float32).reshape(7, 2)}
    mean = {"mean": ek.metrics.Mean(values="batch.x", mask=None)}
    one = Eval(data=InMemory(data, batch_size=2), num_batches=3, metrics=mean)
    assert small(evals={"test": one}).evaluate(small().init())["test/mean"] == data["x"][:6].mean()
    with pytest.raises(EquikdError, match="takes no mask"):
        ek.override(small(evals={"test": one}), {"evals.test.num_batches": 4}).evaluate(small().init())


def scaled(model: Any, scale: float) -> Any:
    return jax.tree.map(lambda leaf: leaf * scale if eqx.is_inexact_array(leaf) else leaf, model)


def halved(model: Any) -> Any:
    return scaled(model, 0.5)


class Sloped(eqx.Module):
    layer: eqx.nn.Linear
    slope: float

    def __init__(self, slope: float, *, key: Any) -> None:
        self.layer, self.slope = eqx.nn.Linear(2, 2, key=key), slope

    def __call__(self, x: Any) -> Any:
        return self.slope * self.layer(x)


def doubled_slope(model: Any) -> Any:
    return eqx.tree_at(lambda model: model.slope, model, 2 * model.slope)


def broken(model: Any) -> Any:
    return model["weight"]


def of_extra(model: Any, step: Any, extra: Any) -> Any:
    return jax.tree.map(lambda leaf, other: jnp.where(step < 5, leaf, other), model, extra)


def without_argument() -> Any:
    return None


def of_what(model: Any, weights: Any) -> Any:
    return model


def to_a_number(model: Any) -> Any:
    return jnp.zeros(())


def test_a_transform_makes_the_model_that_is_evaluated(compilations):
    trainer = ek.override(small(), {"evals.test.transform": halved})
    state = trainer.init()
    by_hand = eqx.tree_at(lambda state: state.model, state, halved(state.model))
    assert trainer.evaluate(state) == small().evaluate(by_hand)
    result = trainer.train()
    assert result.metrics["train/loss"] == small().train().metrics["train/loss"]  # training keeps its own
    scale = ek.lazy.partial(scaled)(scale=0.5)
    by_node = ek.override(small(), {"evals.test.transform": scale})
    assert by_node.evaluate(state) == trainer.evaluate(state)
    compilations.clear()
    other = ek.override(by_node, {"evals.test.transform.scale": 0.25}).evaluate(state)
    assert other != trainer.evaluate(state)
    assert compilations.names == []  # a number of the transform is traced like any other


def test_a_transform_may_use_the_rest_of_the_state():
    trainer = small(
        init_extra=halved, evals={"test": Eval(data=small().evals["test"].data, transform=of_extra, at=(4, 5))}
    )
    state = trainer.init()
    assert trainer.evaluate(state) == small().evaluate(state)
    late = eqx.tree_at(lambda state: state.step, state, jnp.int32(5))
    by_hand = eqx.tree_at(lambda state: state.model, late, halved(state.model))
    assert trainer.evaluate(late) == small().evaluate(by_hand)


def test_a_hyperparameter_of_the_model_reaches_the_transform():
    model = ek.lazy(Sloped)(slope=0.25)
    trainer = small(model=model, evals={"test": Eval(data=small().evals["test"].data, transform=doubled_slope)})
    state = trainer.init()
    steeper = ek.override(trainer, {"model.slope": 0.5})
    other = ek.override(trainer, {"model.slope": 0.5, "evals.test.transform": None})
    assert trainer.evaluate(state) == other.evaluate(state)
    assert steeper.evaluate(state) != trainer.evaluate(state)


@pytest.mark.parametrize("transform", [without_argument, of_what, to_a_number])
def test_a_transform_that_does_not_fit(transform, snapshot):
    with pytest.raises(EquikdError) as error:
        ek.override(small(), {"evals.test.transform": transform}).train()
    snapshot(f"transform_{transform.__name__}", str(error.value))


def test_a_transform_that_fails_is_named():
    with pytest.raises(TypeError) as error:
        ek.override(small(), {"evals.test.transform": broken}).train()
    assert "evals.test.transform" in error.value.__notes__


@pytest.mark.parametrize("batch_size", [3, 8, 16])
def test_what_reads_no_rows_counts_once_whatever_the_batch_size(batch_size):
    """And it needs no mask where the last batch is padded."""
    metrics = {
        "sum": ek.metrics.Sum(values="model.weight", mask=None),
        "histogram": ek.metrics.Histogram(values="model.weight", low=-2.0, high=2.0, mask=None),
        "each": ek.metrics.TreeMap(ek.metrics.Std(values="model", mask=None)),
        "mean": ek.metrics.Mean(values="preds"),
    }
    data = InMemory({"x": np.ones((16, 2), np.float32)}, batch_size=batch_size)
    trainer = small(evals={"test": Eval(data=data, metrics=metrics)}, num_steps=1)
    result = trainer.train()
    weight, bias = (np.asarray(leaf) for leaf in (result.model.weight, result.model.bias))
    assert result.metrics["test/sum"] == pytest.approx(weight.sum(), rel=1e-6)
    assert result.metrics["test/each/bias"] == pytest.approx(bias.std(), rel=1e-6)
    assert result.summaries["test/histogram"].total == weight.size


@ek.config.config
class NoState(ek.metrics.Metric):
    def from_values(self, mask: Any) -> Any:
        return jnp.zeros(3)


def test_a_metric_that_gives_no_state(snapshot):
    with pytest.raises(EquikdError) as error:
        small(metrics={"mine": NoState()}).train()
    snapshot("no_state", str(error.value))


# What is inherited.

UNLABELLED = InMemory({"x": np.ones((4, 2), np.float32)}, batch_size=2)


def labelled(**changes: Any) -> ek.Trainer:
    """With a metric on labels, which the eval's data lacks."""
    data = {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(16, 2), "label": np.arange(16) % 2}
    metrics = {"accuracy": ek.metrics.Accuracy(preds="preds", labels="batch.label")}
    given = {"train_data": InMemory(data, batch_size=4), "metrics": metrics, "evals": {"test": Eval(data=UNLABELLED)}}
    return small(**given | changes)


def test_a_metric_that_an_eval_cannot_compute_is_refused(snapshot):
    with pytest.raises(EquikdError) as error:
        labelled().train()
    snapshot("inherited_lacks", str(error.value))


def test_unless_it_is_skipped_on_purpose():
    skipped = ek.metrics.SkipIfMissing(labelled().metrics["accuracy"], missing="batch.label")
    result = labelled(metrics={"accuracy": skipped}).train()
    assert "train/accuracy" in result.metrics
    assert {name for name in result.metrics if name.startswith("test/")} == {
        "test/loss",
        "test/losses/mse",
        "test/weighted/mse",
    }


def test_what_is_skipped_everywhere_is_misspelt(snapshot):
    wrong = ek.metrics.SkipIfMissing(ek.metrics.Accuracy(preds="preds", labels="batch.lable"), missing="batch.lable")
    with pytest.raises(EquikdError) as error:
        labelled(metrics={"accuracy": wrong}).train()
    snapshot("skipped_everywhere", str(error.value))
    own = {"test": Eval(data=UNLABELLED, metrics={"mine": wrong})}
    with pytest.raises(EquikdError, match=r"evals\.test\.metrics\.mine"):
        labelled(evals=own).train()


def test_a_penalty_on_params_is_left_out_of_evals_and_with_it_metrics_of_its_state():
    losses = {"mse": small().losses["mse"], "l2": ek.losses.ParameterL2(weight=1e-3)}
    metrics = {
        "l2": ek.metrics.Mean(values="losses.l2.total", mask=None),
        "mse": ek.metrics.Mean("losses.mse.total", mask=None),
    }
    result = small(losses=losses, metrics=metrics).train()
    assert {"test/losses/mse", "test/mse"} <= result.metrics.keys()
    assert not {"test/losses/l2", "test/l2"} & result.metrics.keys()


# States that keep all rows.


class Scores(ek.metrics.State):
    rows: ek.metrics.Rows = ek.metrics.concat_field()
    count: Int[Array, ""] = ek.metrics.sum_field()

    def compute(self) -> Any:
        values = self.rows.real()
        return {"median": np.median(values) if len(values) else np.nan, "count": self.count}


@ek.config.config
class Median(ek.metrics.Metric):
    x: ek.KeyPath

    def from_values(self, x: Float[Array, "b d"], mask: Bool[Array, " b"]) -> Scores:
        return Scores(ek.metrics.Rows(x[:, 0], mask), mask.sum(dtype=jnp.int32))


@pytest.mark.parametrize("batch_size", [1, 3, 16, 50])
def test_all_rows_are_gathered_on_the_host(batch_size, compilations):
    data = {"x": np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)}
    metrics = {"median": Median("batch.x"), "mean": ek.metrics.Mean("batch.x")}
    one = Eval(data=InMemory(data, batch_size=batch_size), metrics=metrics, every=10)
    result = small(evals={"test": one}).train()
    assert [row.split for row in result.history] == ["test", "test", "train", "test"]
    (prepared,) = prepare(small(evals={"test": one})).evals
    view, batches = ek.train._check.view_of(result.state), list(prepared.data.epoch())
    aux = ek.evals.evaluate(prepared.config, view, batches, prepared.empty)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(aux.metrics["median"]))
    compilations.clear()
    ek.evals.evaluate(prepared.config, view, batches, prepared.empty)
    assert compilations.names == []
    assert result.metrics["test/median/median"] == pytest.approx(np.median(data["x"][:, 0]))
    assert result.metrics["test/median/count"] == 16
    assert result.metrics["test/mean"] == pytest.approx(data["x"].mean(), abs=1e-6)


def test_all_rows_of_a_training_interval_are_refused(snapshot):
    with pytest.raises(EquikdError) as error:
        small(metrics={"median": Median("batch.x")}).train()
    snapshot("rows_in_training", str(error.value))


def test_a_median_is_of_all_rows_in_their_order():
    values = np.arange(10, dtype=np.float32)
    data = {"x": np.stack([values, values], axis=1)}
    one = Eval(data=InMemory(data, batch_size=4), metrics={"median": Median("batch.x")})
    (prepared,) = prepare(small(evals={"test": one})).evals
    view = ek.train._check.view_of(small().init())
    aux = ek.evals.evaluate(prepared.config, view, prepared.data.epoch(), prepared.empty)
    np.testing.assert_array_equal(aux.metrics["median"].rows.real(), values)


@pytest.mark.parametrize("path", ["preds[", "", "batch..x", "grads["], ids=["bracket", "empty", "dots", "of_training"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_misspelt_key_path_is_told_with_its_place(path, accumulate):
    wrong = small(metrics={"mean": ek.metrics.Mean(values=path)}, accumulate=accumulate)
    with pytest.raises(EquikdError, match=r"metrics\.mean\.values"):
        wrong.train()


class Shifted(eqx.Module):
    """A transform that holds a number, so it cannot be hashed while it is traced."""

    shift: Any

    def __call__(self, model: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + self.shift if eqx.is_inexact_array(leaf) else leaf, model)


def test_a_transform_may_be_a_module():
    trainer = ek.override(small(), {"evals.test.transform": ek.lazy(Shifted)(0.0)})
    state = trainer.init()
    assert trainer.evaluate(state) == small().evaluate(state)
    assert ek.override(trainer, {"evals.test.transform.shift": 1.0}).evaluate(state) != trainer.evaluate(state)
