"""A small experiment for tests: six numbers to three classes, and a zoo of models for it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import equikd as ek

FEATURES, CLASSES, WIDTH, ROWS, BATCH = 6, 3, 8, 96, 16


def arrays(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    label = draw.integers(0, CLASSES, rows).astype(np.int32)
    return {"x": (draw.normal(size=(rows, FEATURES)) + label[:, None]).astype(np.float32), "label": label}


class Counted(eqx.Module):
    """Two layers with what a subclass puts between them; `traces` counts the calls, which are traces all."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear

    traces = [0]  # noqa: RUF012  # one counter for all

    def ends(self, key: jax.Array) -> None:
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(FEATURES, WIDTH, key=first)
        self.last = eqx.nn.Linear(WIDTH, CLASSES, key=last)


class Plain(Counted):
    def __init__(self, *, key: jax.Array) -> None:
        self.ends(key)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.traces[0] += 1
        return self.last(jax.nn.relu(self.first(x)))


class Dropping(Counted):
    dropout: eqx.nn.Dropout

    def __init__(self, rate: float, *, key: jax.Array) -> None:
        self.ends(key)
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        self.traces[0] += 1
        return self.last(self.dropout(jax.nn.relu(self.first(x)), key=key))


class WithLambda(Counted):
    """Each build has another lambda, and two trees with different ones have different structures."""

    rate: Any
    activation: Callable[..., Any] = eqx.field(static=True)

    def __init__(self, rate: float = 0.5, *, key: jax.Array) -> None:
        self.ends(key)
        self.rate = rate
        self.activation = lambda x: jnp.tanh(x) + 0.0

    def __call__(self, x: jax.Array) -> jax.Array:
        self.traces[0] += 1
        return self.last(self.activation(self.first(x)) * self.rate)


class BatchNormed(Counted):
    norm: eqx.nn.BatchNorm

    def __init__(self, momentum: float = 0.9, eps: float = 1e-5, *, key: jax.Array) -> None:
        self.ends(key)
        self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="batch", momentum=momentum, eps=eps, mode="batch")

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        self.traces[0] += 1
        features, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(features)), state


class LayerNormed(Counted):
    norm: eqx.nn.LayerNorm

    def __init__(self, eps: float = 1e-5, *, key: jax.Array) -> None:
        self.ends(key)
        self.norm = eqx.nn.LayerNorm(WIDTH, eps=eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.traces[0] += 1
        return self.last(jax.nn.relu(self.norm(self.first(x))))


class StaticRate(Counted):
    dropout_rate: float = eqx.field(static=True)

    def __init__(self, dropout_rate: float, *, key: jax.Array) -> None:
        self.ends(key)
        self.dropout_rate = dropout_rate

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        self.traces[0] += 1
        features = jax.nn.relu(self.first(x))
        if key is not None and self.dropout_rate > 0:
            keep = 1 - self.dropout_rate
            features = jnp.where(jax.random.bernoulli(key, keep, features.shape), features / keep, 0)
        return self.last(features)


@ek.config.config
class Scaling:
    """A config that a module holds."""

    scale: float = 2.0
    power: int = 1


class HoldsConfig(Counted):
    scaling: Scaling

    def __init__(self, scaling: Scaling, *, key: jax.Array) -> None:
        self.ends(key)
        self.scaling = scaling

    def __call__(self, x: jax.Array) -> jax.Array:
        self.traces[0] += 1
        return self.last(jax.nn.relu(self.first(x)) ** self.scaling.power) * self.scaling.scale


class Derived(Counted):
    """Keeps not the rate, but a number computed from it."""

    keep: Any

    def __init__(self, rate: float, *, key: jax.Array) -> None:
        self.ends(key)
        self.keep = 1 - rate

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        self.traces[0] += 1
        features = jax.nn.relu(self.first(x))
        if key is not None:
            features = jnp.where(jax.random.bernoulli(key, self.keep, features.shape), features / self.keep, 0)
        return self.last(features)


def small(model: Any = None, **fields: Any) -> ek.Trainer:
    """A trainer; `fields` in place of its own."""
    made: dict[str, Any] = {
        "model": ek.lazy(Dropping)(rate=0.25) if model is None else model,
        "inputs": {"x": "batch.x"},
        "losses": {"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label")},
        "metrics": {"accuracy": ek.metrics.Accuracy(preds="preds", labels="batch.label")},
        "optimizer": ek.lazy(optax.adam)(learning_rate=1e-2),
        "train_data": ek.data.InMemory(arrays(), batch_size=BATCH),
        "num_steps": 12,
        "log_every": 5,
        "writers": (),
    }
    return ek.Trainer(**made | fields)


def quick(model: Any = None, **fields: Any) -> ek.Trainer:
    """`small`, with a model that has no dropout: its step compiles in half the time."""
    return small(ek.lazy(Plain)() if model is None else model, **fields)


def evaluated(every: int | None = 4, batch_size: int = 20) -> dict[str, Any]:
    """An eval whose last batch is ragged."""
    return {"test": ek.evals.Eval(data=ek.data.InMemory(arrays(50, seed=1), batch_size=batch_size), every=every)}


def leaves(tree: Any) -> list[np.ndarray]:
    """The arrays of a tree, on the host; PRNG keys as their data."""
    arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in arrays]
    return [np.asarray(jax.random.key_data(x) if is_key else x) for x, is_key in zip(arrays, keys, strict=True)]


def assert_same(one: Any, other: Any) -> None:
    """Two trees have equal arrays, to the bit."""
    for ours, theirs in zip(leaves(one), leaves(other), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def differs(one: Any, other: Any) -> bool:
    """Whether any array of two trees differs."""
    return any((ours != theirs).any() for ours, theirs in zip(leaves(one), leaves(other), strict=True))
