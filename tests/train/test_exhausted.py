"""An out-of-memory error of XLA says how big the batch is, what is largest, and what to do."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from tests.train._small import BATCH, leaves, quick


class Hungry(eqx.Module):
    weight: jax.Array

    def __init__(self, *, key: jax.Array) -> None:
        self.weight = jax.random.normal(key, (6,))

    def __call__(self, x: jax.Array) -> jax.Array:
        far = jnp.broadcast_to((x * self.weight)[:2], (30_000_000, 2))
        return jnp.tanh(far @ far.T).max() * jnp.ones(3)  # 3.6 PB, which no machine has


def test_an_out_of_memory_error_names_batch_leaves_and_ways_out(snapshot: Any) -> None:
    trainer = quick(ek.lazy(Hungry)(), inputs={"x": "batch.x"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory") as caught:
        trainer.train()
    (note,) = [note for note in caught.value.__notes__ if "ran out of memory" in note]
    assert f"batches of {BATCH} rows" in note
    snapshot("advice", note)


def test_other_errors_of_the_device_gain_no_note() -> None:
    from equikd.train._exhausted import memory_explained

    with pytest.raises(jax.errors.JaxRuntimeError) as caught, memory_explained(None):  # pyright: ignore[reportArgumentType]
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
    assert not getattr(caught.value, "__notes__", [])


def test_the_advice_to_accumulate_works() -> None:
    """It changes the memory of a step and nothing else."""
    whole = quick(optimizer=ek.lazy(optax.sgd)(0.1), num_steps=1).train()
    halves = ek.override(whole.trainer, {"accumulate": 2}).train()
    for ours, theirs in zip(leaves(halves.state), leaves(whole.state), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
