"""The twin: which leaves are trained, which follow the config, and what cannot be either.

Cases: 14 (a dropout rate as an array leaf), 16 (one array at two paths).
"""

import functools
import math
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import TypeCheckError

import equikd as ek
from equikd.errors import ConfigError
from equikd.tree import named_leaves

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)


def trainer(model: Any, **options: Any) -> ek.Trainer:
    given = {
        "inputs": {"x": "batch.x"},
        "optimizer": ek.lazy(optax.adamw)(0.1, weight_decay=0.1),
        "losses": {"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        "train_data": ek.data.InMemory({"x": X}, batch_size=16),
        "num_steps": 3,
        "writers": (),
    }
    return ek.Trainer(model=model, **{**given, **options})


def verdicts(model: Any) -> dict[str, str]:
    """Leaf -> what it is: `parameter`, `hyperparameter` or `constant`."""
    state = trainer(model).init()
    kinds = [
        "parameter" if trainable else "hyperparameter" if hyper else "constant"
        for trainable, hyper in zip(state.trainable, state.hyperparameter, strict=True)
    ]
    return dict(zip(named_leaves(state.model), kinds, strict=True))


class Module(eqx.Module):
    """Adds the output of `apply` to nothing: a base for small cases."""

    def __call__(self, x: Any) -> Any:
        return x


# --- the nine cases that tell the ways of deciding apart


class Derived(Module):
    q: float

    def __init__(self, p):
        self.q = 1 - p


class Temperature(Module):
    t: jax.Array

    def __init__(self, init):
        self.t = jnp.array(init)


class TemperatureAsArray(Module):
    t: jax.Array

    def __init__(self, init):
        self.t = jnp.asarray(init)


class LogTemperature(Module):
    t: jax.Array

    def __init__(self, init):
        self.t = jnp.log(jnp.asarray(init))


class Scaled(Module):
    w: jax.Array
    b: jax.Array

    def __init__(self, scale, *, key):
        self.w = scale * jax.random.normal(key, (3,))
        self.b = jnp.zeros(3)


class Full(Module):
    b: jax.Array

    def __init__(self, init):
        self.b = jnp.full((3,), init)


@pytest.mark.parametrize(
    ("model", "path", "kind"),
    [
        (ek.lazy(eqx.nn.Dropout)(p=0.1), "p", "hyperparameter"),
        (ek.lazy(Derived)(p=0.1), "q", "hyperparameter"),
        (ek.lazy(Temperature)(init=0.5), "t", "parameter"),
        (ek.lazy(TemperatureAsArray)(init=0.5), "t", "parameter"),
        (ek.lazy(LogTemperature)(init=0.5), "t", "parameter"),
        (ek.lazy(Scaled)(scale=0.5), "w", "parameter"),
        (ek.lazy(Scaled)(scale=0.5), "b", "parameter"),
        (ek.lazy(Full)(init=0.5), "b", "parameter"),
        (ek.lazy(eqx.nn.PReLU)(init_alpha=0.25), "negative_slope", "parameter"),
        (ek.lazy(eqx.nn.Linear)(3, 3), "weight", "parameter"),
        (ek.lazy(eqx.nn.Linear)(3, 3), "bias", "parameter"),
    ],
)
def test_what_a_leaf_is(model, path, kind):
    assert ek.resolve(model, key=jax.random.key(0)) is not None
    twin = ek.model.twin(trainer(model, inputs={"x": "batch.x"}).in_step)
    index = twin.paths.index(path)
    assert twin.trainable[index] == (kind == "parameter")
    assert twin.hyperparameter[index] == (kind == "hyperparameter")
