"""The least that a step in JAX can cost: a donated `jax.jit` on the flat leaves of parameters and optimizer.

JAX has no less to do per call than to look at each leaf that goes in and comes out. Nobody writes it for pleasure: the
model is taken apart once, put together inside the trace, and exists as a module nowhere else.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks._models import loss_of, make_model
from benchmarks._task import RATE, Task
from benchmarks.peers._peer import Peer, Training


def flat_step(task: Task, *, with_loss: bool) -> tuple[list[jax.Array], Callable[..., Any]]:
    """Flat leaves of parameters and optimizer, and the step on them, not jitted.

    Returns:
        The leaves; and the step, `(leaves, images, labels)` to `(leaves, loss)`. Without the loss, which is then not
        computed either, it gives None in its place.
    """
    params, static = eqx.partition(make_model(task), eqx.is_array)
    optimizer = optax.adam(RATE)
    leaves, structure = jax.tree.flatten((params, optimizer.init(params)))

    def step(leaves: Any, images: Any, labels: Any) -> Any:
        params, opt_state = jax.tree.unflatten(structure, leaves)
        loss, grads = jax.value_and_grad(lambda p: loss_of(eqx.combine(p, static), images, labels))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        leaves = jax.tree.leaves((optax.apply_updates(params, updates), opt_state))
        return leaves, (loss if with_loss else None)

    return leaves, step


def start(task: Task) -> Training:
    """Steps that return the loss, for a loop that logs it."""
    initial, step = flat_step(task, with_loss=True)
    step = jax.jit(step, donate_argnums=0)

    def train(batches: Iterable[Any]) -> Iterator[Any]:
        leaves = jax.tree.map(jnp.copy, initial)
        for images, labels in batches:
            leaves, loss = step(leaves, images, labels)
            yield loss

    return train


def start_without_loss(task: Task) -> Training:
    """Steps that return nothing but the leaves: the baseline of the steps."""
    initial, step = flat_step(task, with_loss=False)
    step = jax.jit(step, donate_argnums=0)

    def train(batches: Iterable[Any]) -> Iterator[Any]:
        leaves = jax.tree.map(jnp.copy, initial)
        for images, labels in batches:
            leaves, _ = step(leaves, images, labels)
            yield leaves

    return train


def start_scanned(task: Task, length: int) -> Training:
    """`length` steps in one dispatch, each on the batch given: what is left when Python is gone."""
    initial, step = flat_step(task, with_loss=False)

    def steps(leaves: Any, images: Any, labels: Any) -> Any:
        return jax.lax.scan(lambda leaves, _: step(leaves, images, labels), leaves, length=length)

    steps = jax.jit(steps, donate_argnums=0)

    def train(batches: Iterable[Any]) -> Iterator[Any]:
        leaves = jax.tree.map(jnp.copy, initial)
        for images, labels in batches:
            leaves, _ = steps(leaves, images, labels)
            yield leaves

    return train


PEER = Peer(start)
WITHOUT_LOSS = Peer(start_without_loss)
