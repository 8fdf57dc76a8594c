"""The trainer as data, what it hands out, and how it ends."""

import dataclasses
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.config import flatten, from_json, to_json
from equikd.errors import ConfigError, DataError, EquikdError
from equikd.train import Record, TrainState
from equikd.tree import named_leaves
from tests.train import _experiment, _small

DATA = {"x": np.linspace(-1, 1, 48, dtype=np.float32).reshape(24, 2)}


def small(**changes: Any) -> ek.Trainer:
    """A linear model on two numbers."""
    given: dict[str, Any] = {
        "model": ek.lazy(eqx.nn.Linear)(2, 2),
        "inputs": {"x": "batch.x"},
        "losses": {"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        "optimizer": ek.lazy(optax.adam)(0.1),
        "train_data": ek.data.InMemory(DATA, batch_size=4),
        "num_steps": 12,
        "log_every": 5,
        "writers": (),
    }
    return ek.Trainer(**given | changes)


class Kept:
    """An open writer that keeps what it is told, and may fail."""

    def __init__(self, fails_at: tuple[str, int] = ("", 0), error: type[BaseException] = OSError) -> None:
        self.said: list[tuple[str, Any]] = []
        self.fails_at, self.error = fails_at, error

    def _say(self, what: str, value: Any = None) -> None:
        self.said.append((what, value))
        if self.fails_at == (what, sum(said == what for said, _ in self.said)):
            raise self.error(what)

    def tick(self, step: int) -> None:
        self._say("tick", step)

    def write(self, record: Record) -> None:
        self._say("write", record)

    def flush(self) -> None:
        self._say("flush")

    def close(self) -> None:
        self._say("close")

    def of(self, what: str) -> list[Any]:
        return [value for said, value in self.said if said == what]


OPEN: dict[str, Kept] = {}


@ek.config.config
class Keep:
    """Opens the writer that a test has put in `OPEN`."""

    name: str = "first"

    def open(self, run: Any) -> Kept:
        OPEN[self.name].said.append(("open", run))
        return OPEN[self.name]


@pytest.fixture
def kept() -> Kept:
    OPEN.clear()
    OPEN["first"] = Kept()
    return OPEN["first"]


# --- as data ----------------------------------------------------------------------------------------------------------


def test_a_trainer_is_frozen_plain_data():
    trainer = _experiment.get_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        trainer.num_steps = 3
    assert trainer == _experiment.get_config()
    assert hash(trainer) == hash(_experiment.get_config())
    assert ek.override(trainer, {"num_steps": 7}) != trainer
    assert trainer.num_steps == 200
    schedule = [f"optimizer.learning_rate.{name}" for name in ("init_value", "peak_value", "end_value", "exponent")]
    counts = ["optimizer.learning_rate.warmup_steps", "optimizer.learning_rate.decay_steps"]
    floats = ["model.dropout", "losses.ce.weight", "losses.ce.label_smoothing", *schedule]
    assert set(named_leaves(trainer.in_step)) == {*floats, *counts}


def test_json_is_the_identity():
    trainer = _experiment.get_config()
    text = to_json(trainer)
    assert to_json(from_json(text)) == text
    assert from_json(text) == trainer
    assert from_json(json.dumps(json.loads(text), indent=2)) == trainer
    assert flatten(from_json(text)) == flatten(trainer)


def test_override_reaches_every_value():
    trainer = _experiment.get_config()
    for path, value in flatten(trainer).items():
        if isinstance(value, float):
            assert flatten(ek.override(trainer, {path: value / 2 + 0.25}))[path] == value / 2 + 0.25


def test_diff_says_what_an_override_has_changed():
    trainer = _experiment.get_config()
    changed = ek.override(trainer, {"losses.ce.weight": 0.5, "evals.test.every": None})
    assert {path: (a, b) for path, a, b in ek.diff(trainer, changed)} == {
        "losses.ce.weight": (1.0, 0.5),
        "evals.test.every": (70, None),
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_steps": 0}, "Trainer: num_steps must be an int of at least 1, got 0"),
        ({"log_every": 0}, "log_every must be an int of at least 1"),
        ({"evals": {"train": ek.evals.Eval(data=ek.data.InMemory(DATA))}}, "an eval cannot be named 'train'"),
        (
            {"evals": {"test": ek.evals.Eval(data=ek.data.InMemory(DATA), every=0)}},
            "evals.test: every must be at least 1",
        ),
        ({"checkpoints": ek.train.Checkpoints(every=0)}, "checkpoints: every must be at least 1"),
        ({"checkpoints": ek.train.Checkpoints(keep=0)}, "checkpoints: keep must be at least 1"),
        ({"writers": ("console",)}, "writers[0]: 'console'"),
        ({"model": None}, "there is no model"),
        ({"num_steps": ek.ref("nowhere")}, "leads nowhere"),
    ],
)
def test_a_wrong_trainer_is_refused(changes, said):
    with pytest.raises(EquikdError) as error:
        small(**changes).train()
    assert said in str(error.value)


# --- what it hands out ------------------------------------------------------------------------------------------------


def test_predict_is_the_model_in_inference_mode():
    trainer = _experiment.get_config(_experiment.Args(num_steps=30))
    result = trainer.train()
    batch = _experiment.load(17, seed=3)
    model, state = eqx.nn.inference_mode(result.model), result.state.model_state

    @jax.jit
    def direct(x):
        return jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(x, state)[0]

    wanted = direct(batch["x"])
    np.testing.assert_allclose(result.predict(batch), wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(result.predict(batch), result.predict(batch))  # no dropout
    np.testing.assert_array_equal(result.predict(batch), ek.train.predict(trainer, result.state, batch))
    one = {name: column[:1] for name, column in batch.items()}
    np.testing.assert_allclose(result.predict(one), wanted[:1], rtol=1e-6, atol=1e-6)
    only_x = {"x": batch["x"]}  # labels are not what a prediction needs
    np.testing.assert_array_equal(result.predict(only_x), result.predict(batch))


def test_predict_takes_models_of_whole_batches():
    linear = ek.lazy(Batched)(2)
    result = small(model=linear, per_example=False).train()
    np.testing.assert_allclose(result.predict(DATA), DATA["x"] @ np.asarray(result.model.weight), rtol=1e-6)


class Batched(eqx.Module):
    weight: jax.Array

    def __init__(self, size: int, *, key: jax.Array) -> None:
        self.weight = jax.random.normal(key, (size, size))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight


def test_the_result_holds_the_newest_of_each():
    trainer = _experiment.get_config(_experiment.Args(num_steps=75, log_every=50))
    result = trainer.train()
    names = {
        f"{split}/{name}" for split in ("train", "test") for name in ("loss", "losses/ce", "weighted/ce", "accuracy")
    }
    assert set(result.metrics) == names
    assert [(row.step, row.split) for row in result.history] == [
        (50, "train"),
        (70, "test"),
        (75, "train"),
        (75, "test"),
    ]
    for row in result.history[-2:]:
        assert {f"{row.split}/{name}": value for name, value in row.metrics.items()}.items() <= result.metrics.items()
    assert isinstance(result.state, TrainState)
    assert result.model is result.state.model
    assert int(result.state.step) == 75


def test_batches_go_on_at_the_step_of_the_state():
    trainer = small()
    state = trainer.init()
    seen = []
    for batch, _ in zip(trainer.batches(state), range(9), strict=False):
        seen.append(batch)
        state, _ = ek.train.step(trainer, state, batch)
    later = small().train().state
    for number, batch in zip(range(9, 12), trainer.batches(state), strict=False):
        seen.append(batch)
        state, _ = ek.train.step(trainer, state, batch)
        assert int(state.step) == number + 1
    for path, leaf in named_leaves(eqx.filter((later.model, later.opt_state), eqx.is_array)).items():
        np.testing.assert_array_equal(leaf, named_leaves((state.model, state.opt_state))[path])
    for first, again in zip(seen, trainer.batches(trainer.init()), strict=False):
        np.testing.assert_array_equal(first.data["x"], again.data["x"])


def test_the_spec_is_that_of_the_batches():
    trainer = small()
    assert trainer.spec() == ek.data.element_spec(next(trainer.batches(trainer.init())))


def test_init_computes_no_step_and_gives_equal_structures():
    state, other = small().init(), small().init()
    assert int(state.step) == 0
    assert jax.tree.structure(state) == jax.tree.structure(other)
    assert not jnp.array_equal(state.model.weight, ek.override(small(), {"seed": 1}).init().model.weight)


def test_the_metrics_of_an_interval_are_exact_over_it():
    result = small(num_steps=12, log_every=5).train()
    trainer = small()
    state, losses = trainer.init(), []
    for batch, _ in zip(trainer.batches(state), range(12), strict=False):
        state, aux = ek.train.step(trainer, state, batch)
        losses.append(float(aux.loss))
    means = [np.mean(losses[:5]), np.mean(losses[5:10]), np.mean(losses[10:])]
    np.testing.assert_allclose([row.metrics["loss"] for row in result.history], means, rtol=1e-5)


# --- side effects -----------------------------------------------------------------------------------------------------


def test_no_work_directory_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = _experiment.get_config(_experiment.Args(num_steps=20))
    trainer = dataclasses.replace(trainer, writers=(ek.train.TensorBoard(), ek.train.Console(), ek.train.JsonLines()))
    trainer.train()
    assert list(tmp_path.iterdir()) == []


def test_trainers_of_one_structure_share_one_program(compilations):
    small().train()
    compilations.clear()
    other = ek.override(small(), {"optimizer.learning_rate": 0.3, "num_steps": 7, "seed": 3, "log_every": 2})
    again = small()
    first, second = other.train(), again.train()
    assert compilations.names == []
    assert not jnp.array_equal(first.model.weight, second.model.weight)
    np.testing.assert_array_equal(second.model.weight, small().train().model.weight)


@pytest.mark.parametrize("num_steps", [1, 5, 6])
def test_exactly_so_many_updates(num_steps, kept):
    result = small(num_steps=num_steps, writers=(Keep(),)).train()
    assert int(result.state.step) == num_steps
    assert kept.of("tick") == list(range(1, num_steps + 1))
    drawn = []

    def read() -> Any:
        for number in range(100):
            drawn.append(number)
            yield {"x": np.full((4, 2), number, np.float32)}

    small(num_steps=num_steps, train_data=read).train()
    assert len(drawn) <= num_steps + 1  # the first once more, for its shape


def test_data_that_ends_early_names_both_numbers(kept):
    def read() -> Any:
        for number in range(7):
            yield {"x": np.full((4, 2), number, np.float32)}

    with pytest.raises(DataError, match="ended after 7 batches, but num_steps is 12"):
        small(train_data=read, writers=(Keep(),)).train()
    assert [row.step for row in kept.of("write")] == [5]  # what was computed is not lost
    assert kept.said[-1] == ("close", None)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_ending_in_the_middle_closes_every_writer(error):
    OPEN["first"], OPEN["second"], OPEN["third"] = Kept(), Kept(("tick", 8), error), Kept()
    with pytest.raises(error):
        small(writers=(Keep("first"), Keep("second"), Keep("third"))).train()
    for writer in OPEN.values():
        assert writer.of("close") == [None]


@pytest.mark.usefixtures("kept")
def test_a_failing_writer_keeps_no_row_from_the_others():
    OPEN["first"], OPEN["second"] = Kept(("write", 1)), Kept()
    with pytest.raises(OSError, match="write"):
        small(writers=(Keep("first"), Keep("second"))).train()
    assert len(OPEN["second"].of("write")) == 1
    assert [writer.of("close") for writer in OPEN.values()] == [[None], [None]]


def test_writers_are_told_of_the_run(kept, tmp_path):
    trainer = small(writers=(Keep(),))
    trainer.train()
    trainer.train(tmp_path / "run")
    ek.override(trainer, {"num_steps": 15}).train(tmp_path / "run")
    without, fresh, resumed = kept.of("open")
    assert (without.workdir, without.start_step, without.num_steps) == (None, 0, 12)
    assert (fresh.workdir, fresh.start_step, fresh.num_steps) == (tmp_path / "run", 0, 12)
    assert (resumed.workdir, resumed.start_step, resumed.num_steps) == (tmp_path / "run", 12, 15)
    assert json.loads(resumed.config)["num_steps"] == 15


def test_rows_are_flushed_before_a_checkpoint(kept, tmp_path):
    small(writers=(Keep(),), checkpoints=ek.train.Checkpoints(every=5)).train(tmp_path / "run")
    order = [(what, value.step if what == "write" else value) for what, value in kept.said if what != "open"]
    assert order.index(("write", 5)) == order.index(("flush", None)) - 1
    assert order.index(("tick", 5)) < order.index(("write", 5)) < order.index(("tick", 6))


def test_a_live_model_stays_the_callers():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(3))
    before = np.array(model.weight)
    result = small(model=None).train(model=model)
    np.testing.assert_array_equal(model.weight, before)
    assert not np.array_equal(result.model.weight, before)
    with pytest.raises(EquikdError):
        small().train(model=eqx.nn.Linear(3, 2, key=jax.random.key(3)))


def test_a_result_repeats_under_one_seed():
    first, second = small(seed=4).train(), small(seed=4).train()
    np.testing.assert_array_equal(first.model.weight, second.model.weight)
    assert first.metrics == second.metrics


def test_num_steps_may_be_referred_to():
    cosine = ek.optim.Cosine(0.1, decay_steps=ek.ref("num_steps"))
    trainer = small(optimizer=ek.lazy(optax.sgd)(cosine), num_steps=6)
    assert int(trainer.train().state.step) == 6
    loadable = dataclasses.replace(trainer, train_data=ek.data.InMemory(ek.lazy(_experiment.load)(8, seed=0)))
    assert from_json(to_json(loadable)) == loadable


def test_errors_are_of_one_family():
    with pytest.raises(ConfigError):
        ek.Trainer(optimizer=optax.adam(1e-3), train_data=None, num_steps=3)


def test_evals_of_a_state_of_a_loop_of_ones_own(snapshot):
    test = _small.evaluated()["test"]
    trainer = _small.small(evals={"test": test, "again": test}, num_steps=4)
    result = trainer.train()
    found = trainer.evaluate(result.state)
    assert found == {name: value for name, value in result.metrics.items() if not name.startswith("train/")}
    assert {name.partition("/")[0] for name in trainer.evaluate(trainer.init(), "test")} == {"test"}
    with pytest.raises(ConfigError) as error:
        trainer.evaluate(result.state, "tset")
    snapshot("no_such_eval", str(error.value))
