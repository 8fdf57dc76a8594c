"""The examples are real: they reach what they say, in the time that they say."""

import inspect
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equikd as ek
from equikd.config import from_json, roles, to_json, validate
from equikd.errors import ConfigError
from equikd.examples.digits import Classifier, Digits, get_config, load


@pytest.fixture(scope="module")
def trained():
    """The digits example as `equikd train equikd.examples.digits` trains it, and the seconds that it took."""
    start = time.monotonic()
    result = ek.override(get_config(), {"writers": ()}).train()
    return result, time.monotonic() - start


def test_digits_are_learnt_within_a_minute(trained):
    result, seconds = trained
    assert result.metrics["test/accuracy"] >= 0.97
    assert seconds < 60


def test_digits_predict_the_test_split(trained):
    result, _ = trained
    test = load("test")
    logits = result.predict({"image": test["image"]})
    assert logits.shape == (360, 10)
    assert (logits.argmax(1) == test["label"]).mean() == pytest.approx(result.metrics["test/accuracy"], abs=1e-6)


def test_the_splits_are_fixed_disjoint_and_whole():
    train, test = load("train"), load("test")
    assert (len(train["label"]), len(test["label"])) == (1437, 360)
    rows = np.concatenate([train["image"], test["image"]]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    everything = (load_digits().data / 16).astype(np.float32)
    np.testing.assert_array_equal(np.sort(rows.view("f4"), 0), np.sort(everything, 0))
    for split, again in ((train, load("train")), (test, load("test"))):
        for name, column in split.items():
            np.testing.assert_array_equal(column, again[name])
    assert train["image"].dtype == np.float32
    assert train["label"].dtype == np.int32
    assert (train["image"].min(), train["image"].max()) == (0, 1)
    with pytest.raises(KeyError):
        load("validation")


def test_each_setting_reaches_the_trainer():
    settings = Digits(learning_rate=0.5, weight_decay=0.25, dropout=0.125, width=3, depth=4, batch_size=5, num_steps=6)
    trainer = get_config(settings)
    assert (trainer.optimizer.learning_rate, trainer.optimizer.weight_decay) == (0.5, 0.25)
    assert (trainer.model.dropout, trainer.model.width, trainer.model.depth) == (0.125, 3, 4)
    assert (trainer.train_data.batch_size, trainer.num_steps) == (5, 6)
    assert trainer.inputs == {"x": "batch.image"}
    assert from_json(to_json(trainer)) == trainer
    assert len(inspect.signature(get_config).parameters) == 1
    assert {name: role for name, (role, *_) in roles(Digits).items()}["learning_rate"] == "leaf"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("width", 0),
        ("depth", 0),
        ("batch_size", 0),
        ("num_steps", 0),
    ],
)
def test_settings_that_cannot_train_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        validate(Digits(**{name: value}))


def test_the_model_takes_one_image():
    model = Classifier(pixels=64, classes=10, width=8, depth=3, dropout=0.5, key=jax.random.key(0))
    image = jnp.ones((8, 8))
    first, second = (model(image, key=jax.random.key(seed)) for seed in (1, 2))
    assert first.shape == (10,)
    assert not jnp.array_equal(first, second)  # dropout
    assert len(model.hidden) == 3


def test_a_larger_rate_is_another_run_of_the_same_program(compilations):
    trainer = ek.override(get_config(Digits(num_steps=20)), {"writers": (), "evals": {}})
    first = trainer.train()
    compilations.clear()
    second = ek.override(trainer, {"optimizer.learning_rate": 1e-2, "model.dropout": 0.3}).train()
    assert compilations.names == []
    assert first.metrics["train/loss"] != second.metrics["train/loss"]
