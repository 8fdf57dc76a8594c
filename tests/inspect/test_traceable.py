"""`ek.inspect.traceable`: every float of an experiment is traced, or it is said why not."""

import equinox as eqx
import numpy as np
import optax
import pytest

import equikd as ek


class Guarded(eqx.Module):
    layer: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    rate: float

    def __init__(self, rate: float, eps: float, scale: float, *, key):
        if rate < 0:
            raise ValueError("negative")
        self.layer = eqx.nn.Linear(2, 2, key=key)
        self.layer = eqx.tree_at(lambda layer: layer.weight, self.layer, self.layer.weight * scale)
        self.norm = eqx.nn.LayerNorm(2, eps=eps)
        self.rate = rate

    def __call__(self, x):
        return self.norm(self.layer(x)) * self.rate


def load():
    return {"x": np.ones((8, 2), np.float32)}


def make(**changes):
    trainer = ek.Trainer(
        model=ek.lazy(Guarded)(rate=0.5, eps=1e-5, scale=1.0),
        inputs={"x": "batch.x"},
        losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.x", weight=ek.ref("shared.weight"))},
        optimizer=ek.lazy(optax.sgd)(
            ek.lazy(optax.exponential_decay)(init_value=0.1, transition_steps=10, decay_rate=0.9)
        ),
        train_data=ek.data.InMemory(ek.lazy(load)(), batch_size=4),
        num_steps=2,
        shared={"weight": 2.0},
    )
    return ek.override(trainer, changes)


def test_each_float_has_its_verdict(compilations):
    verdicts = ek.inspect.traceable(make())
    reasons = {path: None if why is None else why.reason for path, why in verdicts.items()}
    assert reasons == {
        "model.rate": "control flow",
        "model.eps": "static field",
        "model.scale": None,
        "optimizer.learning_rate.init_value": None,
        "optimizer.learning_rate.decay_rate": "control flow",
        "shared.weight": None,
    }
    assert "test_traceable.py" in verdicts["model.rate"].where
    assert "_schedule.py" in verdicts["optimizer.learning_rate.decay_rate"].where
    assert "LayerNorm.eps" in verdicts["model.eps"].where
    assert not [name for name in compilations.names if "flat_step" in name]


def test_what_it_names_is_what_has_to_be_pinned():
    verdicts = ek.inspect.traceable(make())
    floats = ek.config.flatten(make())
    pins = {
        path: ek.pin(floats[path]) for path, why in verdicts.items() if why is not None and why.reason != "static field"
    }
    trainer = ek.override(make(), pins)
    trainer.init()
    assert set(ek.inspect.traceable(trainer).values()) == {None, verdicts["model.eps"]}


def test_the_table(snapshot):
    text = repr(ek.inspect.traceable(make()))
    snapshot("table", "\n".join(line.partition(", /")[0] for line in text.splitlines()))


def test_a_node_alone():
    verdicts = ek.inspect.traceable(ek.lazy(optax.linear_schedule)(1.0, 0.0, 10))
    assert set(verdicts) == {"init_value", "end_value"}
    assert verdicts["init_value"] is None


def branching(rate, other=1.0):
    return rate if rate > 0 else other


def formatted(rate, other=1.0):
    return f"{rate:.3f}", other


def keyed(rate, other=1.0):
    return {rate: other}


def broken(rate):
    return np.zeros((rate,))


def test_plain_containers_of_nodes():
    verdicts = ek.inspect.traceable({"x": ek.lazy(branching)(0.5, other=0.25), "y": 0.5, "name": "run", "n": 3})
    assert {path: why and why.reason for path, why in verdicts.items()} == {
        "x.rate": "control flow",
        "x.other": None,
        "y": None,
    }


@pytest.mark.parametrize("function", [formatted, keyed])
def test_python_that_fails_in_its_own_words(function):
    verdicts = ek.inspect.traceable(ek.lazy(function)(0.5, other=0.25))
    assert verdicts["rate"].reason == "control flow"
    assert f"test_traceable.py:{function.__code__.co_firstlineno + 1}" in verdicts["rate"].where
    assert verdicts["other"] is None


def test_what_fails_with_python_floats_too_is_an_error():
    with pytest.raises(TypeError, match="integer"):
        ek.inspect.traceable(ek.lazy(broken)(0.5))
