"""Models of all kinds, through the trainer: they train, with no second compile, and warn of nothing.

Each goes three steps and one eval; what is asserted beside that is what could go wrong with that kind.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.tree import named_leaves

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(24, 4)).astype(np.float32),
    "image": RNG.normal(size=(24, 1, 4, 4)).astype(np.float32),
    "sequence": RNG.normal(size=(24, 3, 4)).astype(np.float32),
    "y": RNG.normal(size=(24, 4)).astype(np.float32),
}


def trainer(model: Any, x: str = "x", **options: Any) -> ek.Trainer:
    data = ek.data.InMemory({"x": DATA[x], "y": DATA["y"]}, batch_size=8)
    given = {
        "inputs": {"x": "batch.x"},
        "optimizer": ek.lazy(optax.adam)(0.01),
        "losses": {"mse": ek.losses.SquaredError(preds="preds", targets="batch.y")},
        "train_data": data,
        "evals": {"all": ek.evals.Eval(data=data)},
        "num_steps": 3,
        "writers": (),
    }
    return ek.Trainer(model=model, **{**given, **options})


def trained(model: Any, x: str = "x", **options: Any) -> tuple[ek.train.TrainState, Any]:
    """The first state, and the result of three steps; every parameter has moved."""
    made = trainer(model, x, **options)
    before, result = made.init(), made.train()
    assert all(np.isfinite(value) for value in result.metrics.values())
    after = named_leaves(result.state.params())
    still = [path for path, leaf in named_leaves(before.params()).items() if np.array_equal(leaf, after[path])]
    assert still == []
    assert jax.tree.structure(before) == jax.tree.structure(result.state)
    assert [leaf.dtype for leaf in jax.tree.leaves(eqx.filter(before, eqx.is_array))] == [
        leaf.dtype for leaf in jax.tree.leaves(eqx.filter(result.state, eqx.is_array))
    ]
    return before, result


L = ek.lazy


def test_mlp():
    trained(L(eqx.nn.MLP)(4, 4, 8, 2))


def test_sequential_with_names_of_functions():
    model = L(eqx.nn.Sequential)((L(eqx.nn.Linear)(4, 4), L(eqx.nn.Lambda)(jax.nn.relu), L(eqx.nn.Dropout)(0.5)))
    before, result = trained(model)
    assert float(result.model.layers[2].p) == 0.5
    assert before.hyperparameter.count(True) == 1


def conv(channels: int, dropout: float, slope: float, *, key: jax.Array) -> eqx.Module:
    first, second = jax.random.split(key)
    prelu = eqx.nn.PReLU(slope)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, channels, 3, padding=1, key=first),
            eqx.nn.Lambda(prelu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.GroupNorm(2, channels),
            eqx.nn.Dropout(dropout),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(4 * channels, 4, key=second),
        ]
    )


@pytest.mark.slow
def test_convolutions_from_a_function_that_makes_the_model():
    before, _ = trained(L(conv)(channels=4, dropout=0.25, slope=0.1), "image")
    names = dict(zip(named_leaves(before.model), before.trainable, strict=True))
    assert names["layers[1].fn.negative_slope"]
    assert not names["layers[4].p"]


class Attention(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    rope: eqx.nn.RotaryPositionalEmbedding
    norm: eqx.nn.LayerNorm
    rms: eqx.nn.RMSNorm

    def __init__(self, dropout: float, theta: float, eps: float, *, key):
        # Biases of keys have no gradient: softmax does not see them.
        self.attention = eqx.nn.MultiheadAttention(2, 4, dropout_p=dropout, key=key)
        self.rope = eqx.nn.RotaryPositionalEmbedding(2, theta)
        self.norm, self.rms = eqx.nn.LayerNorm(4, eps=eps), eqx.nn.RMSNorm(4, eps=eps)

    def __call__(self, x, *, key=None):
        def heads(q, k, v):
            return jax.vmap(self.rope, 1, 1)(q), jax.vmap(self.rope, 1, 1)(k), v

        x = jax.vmap(self.norm)(x)
        x = x + self.attention(x, x, x, key=key, process_heads=heads)
        return jax.vmap(self.rms)(x).sum(0)


@pytest.mark.slow
def test_attention_with_rotary_embedding_and_norms():
    before, result = trained(L(Attention)(dropout=0.1, theta=100.0, eps=1e-3), "sequence")
    assert [type(v) for v in (result.model.rope.theta, result.model.norm.eps)] == [float, float]
    assert "attention.dropout.p" in named_leaves(before.model)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    start: jax.Array
    output: eqx.nn.Linear

    def __init__(self, width: int, *, key):
        first, second = jax.random.split(key)
        self.cell, self.output = eqx.nn.GRUCell(4, width, key=first), eqx.nn.Linear(width, 4, key=second)
        self.start = jnp.zeros(width)

    def __call__(self, x):
        last, _ = jax.lax.scan(lambda h, step: (self.cell(step, h), None), self.start, x)
        return self.output(last)


@pytest.mark.slow
def test_a_recurrent_model_in_a_scan():
    trained(L(Recurrent)(width=5), "sequence")


class Ensemble(eqx.Module):
    members: eqx.nn.MLP
    weight: float

    def __init__(self, count: int, weight: float, *, key):
        self.members = eqx.filter_vmap(lambda k: eqx.nn.MLP(4, 4, 8, 1, key=k))(jax.random.split(key, count))
        self.weight = weight

    def __call__(self, x):
        outputs = eqx.filter_vmap(lambda member, x: member(x), in_axes=(eqx.if_array(0), None))(self.members, x)
        return self.weight * outputs.sum(0)


@pytest.mark.slow
def test_an_ensemble_by_filter_vmap():
    before, _ = trained(L(Ensemble)(count=3, weight=0.5))
    assert before.model.members.layers[0].weight.shape == (3, 8, 4)


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, *, key):
        first, second = jax.random.split(key)
        encode, decode = eqx.nn.Linear(4, 6, key=first), eqx.nn.Linear(6, 4, key=second)
        self.shared = eqx.nn.Shared((encode, decode), lambda pair: pair[1].weight, lambda pair: pair[0].weight.T)

    def __call__(self, x):
        encode, decode = self.shared()
        return decode(jax.nn.tanh(encode(x)))


def test_parameters_shared_by_eqx_nn_shared_are_one():
    before, result = trained(L(Tied)())
    assert sorted(leaf.shape for leaf in jax.tree.leaves(before.params())) == [(4,), (6,), (6, 4)]
    encode, decode = result.model.shared()
    assert np.array_equal(decode.weight, encode.weight.T)


class Normalised(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, momentum: float, eps: float, dropout: float, mode: str, *, key):
        self.linear = eqx.nn.Linear(4, 4, use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", momentum=momentum, eps=eps, mode=mode)
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.linear(x), state)
        return self.dropout(x, key=key), state


def batch_norm(**options: Any) -> Any:
    return L(Normalised)(**{"momentum": 0.5, "eps": 1e-3, "dropout": 0.1, "mode": "batch", **options})


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_running_statistics_move_in_training_and_not_in_evals(mode):
    made = trainer(batch_norm(mode=mode, dropout=0.0))
    before, result = made.init(), made.train()
    names = named_leaves(before.model_state)
    assert names
    assert not any(path in dict(zip(named_leaves(before.model), before.trainable, strict=True)) for path in names)
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (before.model_state, result.state.model_state)), strict=True)
    ]
    assert all(moved)
    # Another run without evals ends in the same statistics, and predicting changes none.
    alone = ek.override(made, {"evals": {}}).train()
    same = jax.tree.map(np.array_equal, alone.state.model_state, result.state.model_state)
    assert all(jax.tree.leaves(same))
    first = result.predict({"x": DATA["x"], "y": DATA["y"]})
    alone_row = result.predict({"x": DATA["x"][:1], "y": DATA["y"][:1]})
    assert np.allclose(first[:1], alone_row, rtol=1e-5, atol=1e-6)


def test_batch_norm_follows_a_loop_by_hand():
    made = trainer(batch_norm(dropout=0.0), optimizer=L(optax.sgd)(0.1), evals={})
    state = made.init()
    model, model_state = state.model, jax.tree.map(lambda x: x, state.model_state)

    @eqx.filter_jit
    def by_hand(model, model_state, x, y):
        def loss(model, model_state):
            preds, model_state = jax.vmap(
                lambda x, s: model(x, s, key=jax.random.key(0)),
                axis_name="batch",
                in_axes=(0, None),
                out_axes=(0, None),
            )(x, model_state)
            return jnp.mean((preds - y) ** 2), model_state

        (value, model_state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, model_state)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -np.float32(0.1) * g, grads)), model_state, value

    for batch, _ in zip(made.batches(state), range(3), strict=False):
        model, model_state, value = by_hand(model, model_state, batch.data["x"], batch.data["y"])
        state, aux = ek.train.step(made, state, batch)
        assert float(aux.loss) == pytest.approx(float(value), rel=1e-5)
    for a, b in zip(jax.tree.leaves(model_state), jax.tree.leaves(state.model_state), strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert np.allclose(model.linear.weight, state.model.linear.weight, rtol=1e-4, atol=1e-6)


def test_a_run_with_a_state_goes_on_where_it_stopped(tmp_path):
    whole = trainer(batch_norm(), num_steps=4).train(tmp_path / "whole")
    trainer(batch_norm(), num_steps=2).train(tmp_path / "parts")
    parts = trainer(batch_norm(), num_steps=4).train(tmp_path / "parts")
    for part in ("model", "model_state", "opt_state"):
        pair = (eqx.filter(getattr(result.state, part), eqx.is_array) for result in (whole, parts))
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *pair)))


class Spectral(eqx.Module):
    norm: eqx.nn.SpectralNorm

    def __init__(self, eps: float, *, key):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.SpectralNorm(eqx.nn.Linear(4, 4, key=first), "weight", eps=eps, key=second)

    def __call__(self, x, state):
        return self.norm(x, state)


def test_spectral_norm():
    before, result = trained(L(Spectral)(eps=1e-6))
    pairs = zip(jax.tree.leaves(before.model_state), jax.tree.leaves(result.state.model_state), strict=True)
    assert not all(np.array_equal(a, b) for a, b in pairs)


def test_a_sequential_with_and_without_state():
    plain = (L(eqx.nn.Linear)(4, 4), L(eqx.nn.Lambda)(jax.nn.tanh))
    trained(L(eqx.nn.Sequential)(plain))
    stateful = (*plain, L(eqx.nn.BatchNorm)(4, "batch", mode="batch"))
    _, result = trained(L(eqx.nn.Sequential)(stateful))
    assert jax.tree.leaves(result.state.model_state)


def test_weight_norm_and_adaptive_pooling_and_identity():
    def make(*, key):
        return eqx.nn.Sequential(
            [
                eqx.nn.WeightNorm(eqx.nn.Linear(4, 8, key=key)),
                eqx.nn.Lambda(lambda x: x[None]),
                eqx.nn.AdaptiveAvgPool1d(4),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Identity(),
            ]
        )

    trained(L(make)())


class Embedded(eqx.Module):
    table: eqx.nn.Embedding
    positions: np.ndarray

    def __init__(self, *, key):
        self.table, self.positions = eqx.nn.Embedding(4, 4, key=key), np.arange(4)

    def __call__(self, x):
        return jax.vmap(self.table)(self.positions).sum(0) * x


def test_integer_tables_are_buffers():
    before, result = trained(L(Embedded)())
    assert [leaf.shape for leaf in jax.tree.leaves(before.params())] == [(4, 4)]
    assert result.model.positions.dtype == np.int32


def test_mixed_precision_parameters_keep_their_dtypes(compilations):
    class Half(eqx.Module):
        a: jax.Array
        b: jax.Array
        p: float

        def __init__(self, p):
            self.a, self.b, self.p = jnp.ones(4, jnp.bfloat16), jnp.ones(4), p

        def __call__(self, x):
            return (self.p * x.astype(jnp.bfloat16) * self.a).astype(jnp.float32) + self.b

    made = trainer(L(Half)(p=0.5), evals={})
    compilations.clear()
    result = made.train()
    assert sum("step" in name for name in compilations.names) == 1
    assert (result.model.a.dtype, result.model.b.dtype) == (jnp.bfloat16, jnp.float32)


def test_a_model_that_takes_whole_batches():
    class Batched(eqx.Module):
        linear: eqx.nn.Linear

        def __init__(self, *, key):
            self.linear = eqx.nn.Linear(4, 4, key=key)

        def __call__(self, x, *, key=None):
            assert x.ndim == 2
            return jax.vmap(self.linear)(x)

    trained(L(Batched)(), per_example=False)


def test_outputs_that_are_no_arrays_reach_losses_and_predictions():
    class Named(eqx.Module):
        linear: eqx.nn.Linear

        def __init__(self, *, key):
            self.linear = eqx.nn.Linear(4, 4, key=key)

        def __call__(self, x):
            return {"y": (self.linear(x),), "name": "linear", "none": None, "act": jax.nn.relu}

    losses = {"mse": ek.losses.SquaredError(preds="preds.y[0]", targets="batch.y")}
    _, result = trained(L(Named)(), losses=losses)
    out = result.predict({"x": DATA["x"], "y": DATA["y"]})
    assert (out["name"], out["none"], out["act"], out["y"][0].shape) == ("linear", None, jax.nn.relu, (24, 4))


def test_a_class_checked_by_typechecked_takes_traced_floats():
    @ek.typechecked
    class Checked(eqx.Module):
        p: float
        w: jax.Array

        def __init__(self, p: float):
            self.p, self.w = p, jnp.ones(4)

        def __call__(self, x: ek.typing.Float[ek.typing.Array, " d"]) -> ek.typing.Float[ek.typing.Array, " d"]:
            return x * self.w * self.p

    trained(L(Checked)(p=0.5))
