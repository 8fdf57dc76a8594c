"""The oracle: training loops written by hand with equinox and optax, from nothing but the documents of the trainer.

It imports nothing of `equikd.train`, and takes each hyperparameter as the constant `float(np.float32(v))` that a traced
leaf holds. What it takes on trust is documented: the keys of model and run, the key of a step, the order of the data.
"""

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

Values = dict[str, float]


class Outcome(NamedTuple):
    """What a run gives: the loss of each step, the model after it, the optimizer's state, and the test loss."""

    losses: np.ndarray
    model: Any
    opt_state: Any
    test_loss: float


def constants(values: Values) -> Values:
    """The numbers that leaves of these values hold."""
    return {name: float(np.float32(value)) for name, value in values.items()}


def keys(seed: int) -> tuple[jax.Array, jax.Array]:
    """Key of the node at `model`, and key of the run."""
    model_key, run_key = jax.random.split(jax.random.key(jnp.uint32(seed)))
    return jax.random.fold_in(model_key, np.uint32(zlib.crc32(b""))), run_key


def batches(data: Any, size: int, seed: int) -> Iterator[Any]:
    """Shuffled anew each epoch; what does not fill a batch is left out."""
    rows = len(jax.tree.leaves(data)[0])
    epoch = 0
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(rows)
        for start in range(0, rows - size + 1, size):
            yield jax.tree.map(lambda x: x[order[start : start + size]], data)  # noqa: B023  # used at once
        epoch += 1


def run(
    model: Any,
    optimizer: optax.GradientTransformation,
    loss: Callable[[Any, Any, Any, Any, Any], Any],
    data: Iterator[Any],
    key: jax.Array,
    steps: int,
    *,
    exact: bool,
) -> tuple[np.ndarray, Any, Any]:
    """`steps` updates of `loss(model, batch, mask, step, key)`; unless `exact`, compiled in half the time."""

    @functools.partial(jax.jit, compiler_options=None if exact else {"xla_backend_optimization_level": 0})
    def update(params: Any, opt_state: Any, batch: Any, mask: Any, step: Any) -> Any:
        def of(params: Any) -> Any:
            return loss(eqx.combine(params, rest), batch, mask, step, jax.random.fold_in(key, step))

        value, grads = jax.value_and_grad(of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params, rest = eqx.partition(model, eqx.is_inexact_array)
    opt_state, losses = optimizer.init(params), []
    for step in range(steps):
        batch = next(data)
        mask = np.ones(len(jax.tree.leaves(batch)[0]), bool)
        params, opt_state, value = update(params, opt_state, batch, mask, jnp.int32(step))
        losses.append(value)
    return np.array(losses), eqx.combine(params, rest), opt_state


def mean(values: Any, mask: Any) -> Any:
    """The mean over the rows that the mask keeps; to the bit, `.mean()` is another number."""
    return jnp.where(mask, values, 0).sum() / mask.sum()


def smoothed(logits: Any, labels: Any, smoothing: float) -> Any:
    """Cross entropy against (1 - s) one-hot + s / classes."""
    if smoothing == 0:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing))


def digits(
    make_model: Callable[..., Any], values: Values, *, train: Any, test: Any, batch_size: int, steps: int, exact: bool
) -> Outcome:
    """The digits experiment: AdamW on a smoothed cross entropy, with dropout.

    Args:
        make_model: `(dropout, key) -> model`.
        values: dropout, weight, label_smoothing and the arguments of `optax.adamw`.
        train: `image` and `label`.
        test: likewise.
        batch_size: rows of a training batch.
        steps: updates.
        exact: to the bit.
    """
    v = constants(values)
    dropout, weight, smoothing = (v.pop(name) for name in ("dropout", "weight", "label_smoothing"))
    model_key, run_key = keys(0)

    def loss(model: Any, batch: Any, mask: Any, step: Any, key: Any) -> Any:
        logits = jax.vmap(lambda x, k: model(x, key=k))(batch["image"], jax.random.split(key, batch_size))
        return weight * mean(smoothed(logits, batch["label"], smoothing), mask)

    model = make_model(dropout=dropout, key=model_key)
    data = batches(train, batch_size, 0)
    losses, model, opt_state = run(model, optax.adamw(**v), loss, data, run_key, steps, exact=exact)
    logits = jax.vmap(eqx.nn.inference_mode(model))(test["image"])
    return Outcome(losses, model, opt_state, weight * float(smoothed(logits, test["label"], smoothing).mean()))


def warmup_cosine(step: Any, init: float, peak: float, end: float, exponent: float, warmup: int, steps: int) -> Any:
    """A line up to the peak, then half a cosine down to the end."""
    step = step.astype(jnp.float32)
    up = init + (peak - init) * jnp.minimum(step / warmup, 1)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(step - warmup, 0, steps - warmup) / (steps - warmup)))
    return jnp.where(step < warmup, up, (peak - end) * cosine**exponent + end)


def scheduled(make_model: Callable[..., Any], values: Values, *, data: Any, batch_size: int, steps: int) -> Outcome:
    """Two losses, one under a schedule; clipping, Adam, momentum, decay and a warmed-up rate, put together by hand.

    The optimizer is a plain function of the gradients, so that nothing of optax's composition is taken on trust either.
    """
    v = constants(values)
    model_key, run_key = keys(0)

    def loss(model: Any, batch: Any, mask: Any, step: Any, key: Any) -> Any:
        out = jax.vmap(lambda x, k: model(x, key=k))(batch["x"], jax.random.split(key, batch_size))
        fallen = jnp.clip((step - v["fall.begin"]) / steps, 0, 1)
        fall = v["fall.init"] + (v["fall.end"] - v["fall.init"]) * fallen
        error = ((out["code"] - batch["code"]) ** 2).mean(axis=-1)
        cross = mean(smoothed(out["logits"], batch["label"], v["label_smoothing"]), mask)
        return v["weight"] * cross + fall * mean(error, mask)

    def init(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.int32(0), zeros, zeros, zeros

    def update(grads: Any, state: Any, params: Any) -> Any:
        count, first, second, velocity = state
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1, v["max_norm"] / norm), grads)
        first = jax.tree.map(lambda m, g: v["b1"] * m + (1 - v["b1"]) * g, first, grads)
        second = jax.tree.map(lambda s, g: v["b2"] * s + (1 - v["b2"]) * g**2, second, grads)
        unbias = [1 - v[name] ** (count + 1) for name in ("b1", "b2")]
        adam = jax.tree.map(
            lambda m, s: (m / unbias[0]) / (jnp.sqrt(s / unbias[1] + v["eps_root"]) + v["eps"]), first, second
        )
        velocity = jax.tree.map(lambda t, a: a + v["momentum"] * t, velocity, adam)
        decayed = jax.tree.map(lambda t, p: t + v["weight_decay"] * p, velocity, params)
        rate = warmup_cosine(count, v["init"], v["peak"], v["end"], v["exponent"], int(v["warmup"]), steps)
        return jax.tree.map(lambda u: -rate * u, decayed), (count + 1, first, second, velocity)

    model = make_model(dropout=v["dropout"], key=model_key)
    optimizer = optax.GradientTransformation(init, update)
    losses, model, opt_state = run(model, optimizer, loss, batches(data, batch_size, 0), run_key, steps, exact=False)
    return Outcome(losses, model, opt_state, float("nan"))
