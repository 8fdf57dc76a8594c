"""Dtypes and weak types of the state are a fixed point from init on, whatever they are."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from tests.train._small import Counted, Plain, arrays, leaves, quick


class Cast(eqx.Module):
    """A model whose parameters are of a dtype."""

    inner: Plain
    dtype: Any = eqx.field(static=True)

    def __init__(self, dtype: str, *, key: jax.Array) -> None:
        self.dtype = jnp.dtype(dtype)
        self.inner = jax.tree.map(lambda leaf: leaf.astype(self.dtype), Plain(key=key))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x.astype(self.dtype))


OPTIMIZERS = {
    "adam": ek.lazy(optax.adam)(learning_rate=1e-2),
    "adamw with all floats": ek.with_defaults(ek.lazy(optax.adamw)(learning_rate=1e-2)),
    "momentum": ek.lazy(optax.sgd)(learning_rate=1e-2, momentum=0.9),
    "schedule": ek.lazy(optax.adamw)(ek.optim.WarmupCosine(0.0, 1e-2, warmup_steps=2, decay_steps=12)),
    "chain": ek.lazy(optax.chain)(ek.lazy(optax.clip_by_global_norm)(1.0), ek.lazy(optax.nadamw)(1e-2)),
    "groups, scales and averages": ek.optim.Ema(
        {
            "inner.first.**": ek.optim.ScaleRates(ek.lazy(optax.adam)(1e-2), {"**.bias": 0.5}),
            "**": ek.optim.Lookahead(ek.lazy(optax.adamw)(1e-2, mask=ek.optim.decay(except_="**.bias")), every=2),
        },
        warmup=True,
    ),
    "moments in bf16": ek.lazy(optax.adam)(learning_rate=1e-2, mu_dtype="bfloat16"),
}


def types(tree: Any) -> list[Any]:
    """Shape, dtype and weakness of each array."""
    return [jax.typeof(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        *(("bfloat16", name) for name in OPTIMIZERS),
        ("float16", "momentum"),
        ("float32", "schedule"),
        ("float32", "adam"),
    ],
)
def test_no_dtype_drifts_and_nothing_compiles_again(dtype: str, optimizer: str, compilations: Any) -> None:
    trainer = quick(ek.lazy(Cast)(dtype), optimizer=OPTIMIZERS[optimizer], num_steps=4, log_every=2)
    first = trainer.init()
    compilations.clear()
    result = trainer.train()
    assert compilations.names.count("jit(flat_step)") == 1
    assert types(result.state) == types(first)
    assert not any(kind.weak_type for kind in types(first))
    assert {leaf.dtype for leaf in leaves(result.state.params())} == {jnp.dtype(dtype)}
    assert np.isfinite(result.metrics["train/loss"])
    state, batch = first, next(trainer.batches(first))
    for _ in range(3):
        state, _ = ek.train.step(trainer, state, batch)
        assert types(state) == types(first)
    state, _ = ek.train.step(trainer, result.state, batch)
    assert types(state) == types(first)
    assert compilations.names.count("jit(flat_step)") == 2  # the loop takes rows that lie on the device


def test_moments_have_the_dtype_that_the_optimizer_gives_them() -> None:
    def dtypes(trainer: ek.Trainer) -> list[set[Any]]:
        moments = [optax.tree_utils.tree_get(trainer.train().state.opt_state, name) for name in ("mu", "nu")]
        return [{leaf.dtype for leaf in leaves(moment)} for moment in moments]

    half, single = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert dtypes(quick(ek.lazy(Cast)("bfloat16"))) == [{half}, {half}]
    assert dtypes(quick(optimizer=OPTIMIZERS["moments in bf16"])) == [{half}, {single}]


def test_hyperparameters_keep_their_precision_beside_bf16_parameters() -> None:
    """In bf16, 0.999 is 1: an optimizer that got b2 as a bf16 would divide by 1 - b2 = 0."""
    trainer = quick(
        ek.lazy(Cast)("bfloat16"), optimizer=ek.with_defaults(ek.lazy(optax.adamw)(learning_rate=1e-2)), num_steps=5
    )
    values = {name: getattr(trainer.optimizer, name) for name in ("learning_rate", "b1", "b2", "eps", "weight_decay")}
    optimizer = optax.adamw(**{name: float(np.float32(value)) for name, value in values.items()})
    state = trainer.init()
    params, rest = eqx.partition(state.model, eqx.is_inexact_array)
    opt_state = optimizer.init(params)

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = jax.vmap(eqx.combine(params, rest))(batch["x"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for _, batch in zip(range(5), trainer.batches(state), strict=False):
        params, opt_state, value = update(params, opt_state, batch.data)
        state, aux = ek.train.step(trainer, state, batch)
        assert np.isfinite(aux.loss)
        np.testing.assert_allclose(aux.loss, value, rtol=2e-2)
    for ours, theirs in zip(leaves(state.params()), leaves(params), strict=True):
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=0.05, atol=0.02)


def test_metrics_of_bf16_predictions_are_summed_in_float32() -> None:
    _, aux = _one_step(quick(ek.lazy(Cast)("bfloat16")))
    assert aux.losses["ce"].total.dtype == jnp.float32
    assert aux.metrics["accuracy"].total.dtype == jnp.float32
    assert aux.metrics["accuracy"].count.dtype == jnp.int32
    assert aux.loss.dtype == jnp.float32


def _one_step(trainer: ek.Trainer) -> Any:
    state = trainer.init()
    return ek.train.step(trainer, state, next(trainer.batches(state)))


class Weak(Counted):
    """Parameters as `jnp.asarray(1.0)` makes them: weakly typed."""

    scale: jax.Array
    shift: jax.Array

    def __init__(self, *, key: jax.Array) -> None:
        self.ends(key)
        self.scale = jnp.asarray(1.0)
        self.shift = jnp.full((), 0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x))) * self.scale + self.shift


def test_weakly_typed_parameters_are_made_strong_at_init(compilations: Any) -> None:
    assert jax.typeof(Weak(key=jax.random.key(0)).scale).weak_type
    trainer = quick(ek.lazy(Weak)())
    first = trainer.init()
    compilations.clear()
    result = trainer.train()
    live = trainer.train(model=Weak(key=jax.random.key(0)))
    assert compilations.names.count("jit(flat_step)") == 1
    assert not any(kind.weak_type for kind in types(first))
    assert types(first) == types(result.state) == types(live.state)
    assert float(result.model.scale) != 1.0


def test_numbers_in_extra_are_arrays_from_the_start(compilations: Any) -> None:
    def step(config: Any, state: Any, batch: Any) -> Any:
        state, aux = ek.train.default_step(config, state, batch)
        extra = {"count": state.extra["count"] + 1, "sum": state.extra["sum"] + 0.5, "weak": state.extra["weak"] * 2}
        return eqx.tree_at(lambda s: s.extra, state, extra), aux

    extra = lambda model: {"count": 0, "sum": 0.0, "weak": jnp.asarray(1.0)}
    trainer = quick(step=step, init_extra=extra, num_steps=4, log_every=2)
    first = trainer.init()
    compilations.clear()
    result = trainer.train()
    assert compilations.names.count("jit(flat_step)") == 1
    assert types(result.state) == types(first)
    assert jax.tree.map(float, result.state.extra) == {"count": 4.0, "sum": 2.0, "weak": 16.0}


def test_data_in_float64_and_int64_is_trained_on_in_float32(compilations: Any) -> None:
    wide = {name: array.astype("f8" if array.dtype.kind == "f" else "i8") for name, array in arrays().items()}
    one = quick().train()
    compilations.clear()
    other = quick(train_data=ek.data.InMemory(wide, batch_size=16)).train()
    assert compilations.names == []
    assert one.metrics == other.metrics


@pytest.mark.slow
def test_under_x64_all_is_float64() -> None:
    with jax.enable_x64(True):
        trainer = quick(num_steps=3)
        first = trainer.init()
        result = trainer.train()
        assert {leaf.dtype for leaf in leaves(result.state.params())} == {np.dtype("float64")}
        assert types(first) == types(result.state)
        assert {leaf.dtype for leaf in jax.tree.leaves(trainer.in_step)} == {np.dtype("float64")}
    again = quick(num_steps=3).train()
    assert {leaf.dtype for leaf in leaves(again.state.params())} == {np.dtype("float32")}
    np.testing.assert_allclose(result.metrics["train/accuracy"], again.metrics["train/accuracy"], atol=0.3)
