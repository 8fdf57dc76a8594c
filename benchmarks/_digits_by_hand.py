"""The digits example up to its first step as one would write it by hand: the peer of `benchmarks.imports`.

The same data, model, optimizer, loss and accuracy, in the order in which a script does things; it prints the time when
the first step has been computed.
"""

import time
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

BATCH, WIDTH = 128, 128


class Classifier(eqx.Module):
    """A multilayer perceptron with dropout."""

    hidden: list[eqx.nn.Linear]
    output: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, *, key: jax.Array) -> None:
        first, second, last = jax.random.split(key, 3)
        self.hidden = [eqx.nn.Linear(64, WIDTH, key=first), eqx.nn.Linear(WIDTH, WIDTH, key=second)]
        self.output = eqx.nn.Linear(WIDTH, 10, key=last)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        """Class scores of one image."""
        x = x.reshape(-1)
        for layer, layer_key in zip(self.hidden, jax.random.split(key, 2), strict=True):
            x = self.dropout(jax.nn.relu(layer(x)), key=layer_key)
        return self.output(x)


def main() -> None:
    """Load, build, and make one step."""
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))[:1437]
    images, labels = (digits.images[order] / 16).astype(np.float32), digits.target[order].astype(np.int32)
    params, static = eqx.partition(Classifier(key=jax.random.key(0)), eqx.is_inexact_array)
    optimizer = optax.adamw(3e-3, weight_decay=1e-4)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = jax.vmap(eqx.combine(params, static))(x, jax.random.split(key, BATCH))
            entropy = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return entropy.mean(), (logits.argmax(axis=-1) == y).mean()

        (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, accuracy

    picks = np.random.default_rng((0, 0)).permutation(len(images))[:BATCH]
    jax.block_until_ready(step(params, opt_state, images[picks], labels[picks], jax.random.key(1)))
    print(time.time())


if __name__ == "__main__":
    main()
