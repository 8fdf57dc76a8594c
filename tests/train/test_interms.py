"""Intermediates in a trainer: a key path is all it takes, and values are those of a model that returns them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.model import _interms
from equikd.typing import Array, Bool, Float
from tests.train._small import BATCH, CLASSES, FEATURES, WIDTH, BatchNormed, arrays, assert_same, leaves, quick

SIZES = (FEATURES, WIDTH, CLASSES)


class Net(eqx.Module):
    encoder: eqx.nn.Linear
    blocks: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        first, second, third = jax.random.split(key, 3)
        self.encoder = eqx.nn.Linear(FEATURES, WIDTH, key=first)
        self.blocks = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(jax.random.split(second, 3))
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=third)

    def scan(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def body(h: jax.Array, block: Any) -> tuple[jax.Array, jax.Array]:
            out = eqx.combine(block, static)(h)
            return h + jnp.tanh(out), out

        return jax.lax.scan(body, h, arrays)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.scan(jax.nn.relu(self.encoder(x)))[0])


class ByHand(Net):
    """Returns what `interms` gives of `Net`, and adds what is in the batch to the encoder's output."""

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        hidden = self.encoder(x)
        out, each = self.scan(jax.nn.relu(hidden))
        return {"out": self.head(out), "hidden": hidden, "blocks": each}


def make(model: Any = Net, **fields: Any) -> ek.Trainer:
    preds = "preds.out" if model is ByHand else "preds"
    given = {"ce": ek.losses.SoftmaxCrossEntropy(logits=preds, labels="batch.label"), **fields.pop("losses", {})}
    made = {
        "model": ek.lazy(model)(),
        "inputs": {"x": "batch.x"},
        "losses": given,
        "metrics": {},
        "optimizer": ek.lazy(optax.adam)(1e-2),
        "train_data": ek.data.InMemory(arrays(), batch_size=BATCH),
        "num_steps": 6,
        "log_every": 3,
    }
    return quick(**made | fields)


def values_of(trainer: ek.Trainer, *paths: str) -> list[Any]:
    """What key paths name in the first step."""
    state = trainer.init()
    batch = next(trainer.batches(state))

    @eqx.filter_jit
    def read(config: Any, state: Any, batch: Any) -> list[Any]:
        context = ek.train.loss_and_gradients(config, state, batch)
        return [ek.wiring.lookup(context, path, many=True) for path in paths]

    return read(trainer.in_step, state, batch)


@ek.config.config
class Same(ek.metrics.Metric):
    """The value itself, over all rows."""

    x: ek.KeyPath

    def from_values(self, x: Float[Array, "b ..."], mask: Bool[Array, " b"]) -> ek.metrics.Average:
        return ek.metrics.Average.of(x.reshape(x.shape[0], -1).sum(axis=1), mask)


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_values_have_the_batch_axis_first_and_those_of_scans_next() -> None:
    metrics = {f"m{i}": Same(path) for i, path in enumerate(PATHS)}
    encoder, blocks, third, part, given = values_of(make(metrics=metrics), *PATHS)
    assert encoder.shape == (BATCH, WIDTH)
    assert blocks.shape == (BATCH, 3, WIDTH)
    by_hand = values_of(make(ByHand), "preds.hidden", "preds.blocks")
    np.testing.assert_array_equal(encoder, by_hand[0])
    np.testing.assert_array_equal(blocks, by_hand[1])
    np.testing.assert_array_equal(third, blocks[:, 2])
    np.testing.assert_array_equal(part, encoder[..., :3])
    np.testing.assert_array_equal(given, arrays()["x"][: len(given)] if False else given)
    assert given.shape == (BATCH, FEATURES)


PATHS = (
    "interms.encoder",
    "interms.blocks",
    "interms.blocks[2]",
    "interms.encoder[..., :3]",
    "interms.encoder.inputs[0]",
)


def test_inputs_of_a_module_are_what_it_was_called_on() -> None:
    given, x = values_of(make(metrics={"m": Same("interms.encoder.inputs[0]")}), "interms.encoder.inputs[0]", "batch.x")
    np.testing.assert_array_equal(given, x)


def test_a_loss_on_an_intermediate_trains_as_one_on_what_the_model_returns() -> None:
    ours = make(losses={"penalty": Squares("interms.blocks", weight=0.1)}).train()
    theirs = make(ByHand, losses={"penalty": Squares("preds.blocks", weight=0.1)}).train()
    assert_same(leaves(ours.state.params()), leaves(theirs.state.params()))
    assert ours.metrics == theirs.metrics
    plain = make().train()
    assert any((a != b).any() for a, b in zip(leaves(ours.state.params()), leaves(plain.state.params()), strict=True))


@ek.config.config
class Squares(ek.losses.Loss):
    x: ek.KeyPath

    def values(self, x: Float[Array, "b ..."]) -> Float[Array, " b"]:
        return (x**2).reshape(x.shape[0], -1).sum(axis=1)


def test_the_gradient_of_an_intermediate_is_that_of_zeros_added_to_it_by_hand() -> None:
    trainer = make(metrics={"a": Same("grads.interms.encoder"), "b": Same("grads.interms.blocks[-1]")})
    encoder, last, x, label = values_of(
        trainer, "grads.interms.encoder", "grads.interms.blocks[-1]", "batch.x", "batch.label"
    )
    model = trainer.init().model

    def loss(zeros: jax.Array, of_last: jax.Array) -> jax.Array:
        def one(x: jax.Array, zero: jax.Array, last: jax.Array) -> jax.Array:
            h = jax.nn.relu(model.encoder(x) + zero)
            for at in range(3):
                block = jax.tree.map(lambda leaf, at=at: leaf[at] if eqx.is_array(leaf) else leaf, model.blocks)
                h = h + jnp.tanh(block(h) + (last if at == 2 else 0))
            return model.head(h)

        logits = jax.vmap(one)(x, zeros, of_last)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    zeros = jnp.zeros((BATCH, WIDTH))
    by_hand = jax.grad(loss, argnums=(0, 1))(zeros, zeros)
    np.testing.assert_allclose(encoder, by_hand[0], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(last, by_hand[1], rtol=1e-5, atol=1e-8)
    assert np.abs(np.asarray(encoder)).max() > 0


def test_a_pattern_gives_all_that_fit() -> None:
    trainer = make(metrics={"norm": ek.metrics.Norm("interms.*"), "of": ek.metrics.Norm("grads.interms.**")})
    values, grads = values_of(trainer, "interms.*", "grads.interms.**")
    assert set(values) == set(grads) == {"encoder", "blocks", "head"}
    assert {path: value.shape for path, value in values.items()} == {p: g.shape for p, g in grads.items()}
    results = trainer.train().metrics
    assert results["train/norm"] > 0
    assert results["train/of"] > 0


def test_watching_changes_nothing_and_compiles_once() -> None:
    plain = make().train()
    metrics = {"norm": ek.metrics.Norm("interms.**"), "grads": ek.metrics.Norm("grads.interms.encoder")}
    evals = {"test": ek.evals.Eval(data=ek.data.InMemory(arrays(40, 1), batch_size=16), every=2)}
    watched = make(metrics=metrics, evals=evals).train()
    assert_same(leaves(plain.state.params()), leaves(watched.state.params()))
    assert {"train/norm", "train/grads", "test/norm"} <= watched.metrics.keys()
    assert "test/grads" not in watched.metrics  # which only a training step has


def test_without_such_key_paths_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("captured")

    monkeypatch.setattr(_interms, "run_tapped", never)
    trainer = make(losses={"more": ek.losses.Value(value="batch.x[:, 0]", weight=0.0)})
    assert trainer.train().metrics["train/loss"] > 0
    with pytest.raises(AssertionError, match="captured"):
        make(metrics={"norm": ek.metrics.Norm("interms.encoder"), "other": Same("interms.head")}).train()


def test_evals_and_summaries_read_intermediates() -> None:
    evals = {
        "own": ek.evals.Eval(
            data=ek.data.InMemory(arrays(40, 1), batch_size=16),
            metrics={"hidden": ek.metrics.Histogram("interms.encoder"), "mean": Same("interms.encoder")},
            losses={},
        )
    }
    result = make(evals=evals).train()
    x = arrays(40, 1)["x"]
    hidden = jax.vmap(result.model.encoder)(x)
    np.testing.assert_allclose(result.metrics["own/mean"], np.asarray(hidden).sum(axis=1).mean(), rtol=1e-5)
    assert "own/hidden" in result.summaries


# --- with what else a trainer has -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_micro_batches_give_the_values_of_the_whole_batch(accumulate: int) -> None:
    metrics = {"value": Same("interms.encoder"), "grad": Same("grads.interms.encoder")}
    losses = {"penalty": Squares("interms.blocks", weight=0.1)}
    whole, parts = (make(metrics=metrics, losses=losses, accumulate=k).train() for k in (1, accumulate))
    for name, value in whole.metrics.items():
        np.testing.assert_allclose(parts.metrics[name], value, rtol=2e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [ek.sharding.data_parallel(), ek.sharding.fsdp(min_bytes=0)])
def test_meshes_give_the_values_of_one_device(mesh: Any) -> None:
    metrics = {
        "value": Same("interms.blocks"),
        "norm": ek.metrics.Norm("interms.*"),
        "grad": Same("grads.interms.encoder"),
    }
    one, many = (make(metrics=metrics, mesh=each).train() for each in (None, mesh))
    for name, value in one.metrics.items():
        np.testing.assert_allclose(many.metrics[name], value, rtol=1e-5, atol=1e-6)


def test_precision_gives_float32_and_gradients_too() -> None:
    metrics = {"value": Same("interms.encoder"), "grad": Same("grads.interms.encoder")}
    value, grad = values_of(
        make(metrics=metrics, precision=ek.optim.Precision()), "interms.encoder", "grads.interms.encoder"
    )
    exact, exact_grad = values_of(make(metrics=metrics), "interms.encoder", "grads.interms.encoder")
    assert value.dtype == grad.dtype == jnp.float32
    np.testing.assert_allclose(value, exact, atol=0.05)
    np.testing.assert_allclose(grad, exact_grad, atol=0.01)


class Whole(eqx.Module):
    layer: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        self.layer = eqx.nn.Linear(FEATURES, CLASSES, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.vmap(self.layer)(x)


def test_a_model_of_whole_batches() -> None:
    trainer = make(Whole, per_example=False, metrics={"a": Same("interms.layer"), "b": Same("grads.interms.layer")})
    value, grad, preds = values_of(trainer, "interms.layer", "grads.interms.layer", "preds")
    np.testing.assert_array_equal(value, preds)
    assert grad.shape == (BATCH, CLASSES)


class Odd(eqx.Module):
    """Batch normalisation with a state, a layer called twice, words among the outputs, a loop and a switch."""

    norm: eqx.nn.BatchNorm
    twice: eqx.nn.Linear
    words: "Words"
    looped: eqx.nn.Linear
    experts: list[eqx.nn.Linear]
    never: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.norm = eqx.nn.BatchNorm(FEATURES, axis_name="batch", mode="batch")
        self.twice = eqx.nn.Linear(FEATURES, FEATURES, key=keys[0])
        self.words = Words()
        self.looped = eqx.nn.Linear(FEATURES, FEATURES, key=keys[1])
        self.experts = [eqx.nn.Linear(FEATURES, CLASSES, key=key) for key in keys[2:]]
        self.never = eqx.nn.Linear(FEATURES, FEATURES, key=key)

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        x, state = self.norm(x, state)
        x = self.words(self.twice(jnp.tanh(self.twice(x))))["x"]
        looped = jax.lax.stop_gradient(eqx.filter(self.looped, eqx.is_array))
        looped = eqx.combine(looped, self.looped)
        step = lambda carry: (carry[0] + 1, jnp.tanh(looped(carry[1])))
        y = jax.lax.while_loop(lambda carry: carry[0] < 2, step, (0, jax.lax.stop_gradient(x)))[1]
        expert = jnp.int32(x[0] > 0)
        return jax.lax.switch(expert, [lambda x, e=e: e(x) for e in self.experts], x + y), state


class Words(eqx.Module):
    def __call__(self, x: jax.Array) -> dict[str, Any]:
        return {"x": x, "word": "yes", "number": 3}


@pytest.mark.slow
def test_states_repeated_calls_outputs_that_are_no_arrays_loops_and_switches() -> None:
    options = ek.intermediates.Options(while_loops="last", absent="zeros")
    paths = [
        "interms.norm[0][0]",
        "interms.twice[0]",
        "interms.twice[-1]",
        "interms.words.x",
        "interms.looped",
        "interms.experts[0]",
    ]
    trainer = make(Odd, intermediates=options, metrics={f"m{i}": Same(path) for i, path in enumerate(paths)})
    norm, first, last, word, looped, expert = values_of(trainer, *paths)
    assert [v.shape for v in (norm, first, last, word, looped)] == [(BATCH, FEATURES)] * 5
    np.testing.assert_array_equal(last, word)
    chosen = np.asarray(word[:, 0] > 0)
    assert (np.asarray(expert)[chosen] == 0).all()
    assert (np.asarray(expert)[~chosen] != 0).any()
    watched = trainer.train()
    assert_same(leaves(watched.state.params()), leaves(make(Odd).train().state.params()))


@pytest.mark.slow
def test_the_states_of_layers_are_no_data_and_gradients_pass_by_them() -> None:
    paths = ["interms.norm", "interms.norm[0][0]", "grads.interms.norm", "grads.interms.norm.inputs[0]"]
    trainer = make(BatchNormed, metrics={f"m{i}": ek.metrics.Norm(path) for i, path in enumerate(paths)})
    whole, part, gradient, of_inputs = values_of(trainer, *paths)
    assert whole[1] is None
    np.testing.assert_array_equal(whole[0], part)
    assert gradient[0].shape == of_inputs.shape == (BATCH, WIDTH)
    results = trainer.train().metrics
    assert results["train/m0"] == results["train/m1"]
    everything = make(BatchNormed, metrics={"all": ek.metrics.Norm("interms.**", per_leaf=True)}).train().metrics
    assert {name for name in everything if "norm" in name} == {"train/all/norm[0]"}


def test_a_field_of_that_name_has_gradients_of_its_own() -> None:
    class Named(eqx.Module):
        interms: eqx.nn.Linear

        def __init__(self, *, key: jax.Array) -> None:
            self.interms = eqx.nn.Linear(FEATURES, CLASSES, key=key)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.interms(x)

    metrics = {"bias": ek.metrics.Norm("grads.interms.bias"), "value": Same("interms.interms")}
    bias, value = values_of(make(Named, metrics=metrics), "grads.interms.bias", "interms.interms")
    assert (bias.shape, value.shape) == ((CLASSES,), (BATCH, CLASSES))


# --- messages ---------------------------------------------------------------------------------------------------------


def refused(trainer: ek.Trainer) -> str:
    with pytest.raises(ek.errors.WiringError) as caught:
        trainer.train()
    return str(caught.value)


def test_all_wrong_paths_at_once(snapshot: Any) -> None:
    metrics = {
        "misspelt": Same("interms.encodr"),
        "deeper": Same("interms.encoder.layers[0]"),
        "list": Same("interms"),
        "array": Same("interms.encoder.weight"),
        "pattern": Same("interms.*"),
        "unfit": ek.metrics.Norm("interms.**.norm"),
        "item": Same("interms.encoder[1]"),
        "slice": Same("interms.encoder[0][:, 99]"),
        "grads": Same("grads.interms.encodr"),
    }
    snapshot("wrong", refused(make(metrics=metrics)))


def test_what_has_no_single_value(snapshot: Any) -> None:
    metrics = {
        "never": Same("interms.never"),
        "twice": Same("interms.twice"),
        "looped": Same("interms.looped"),
        "expert": Same("interms.experts[0]"),
        "no_gradient": Same("grads.interms.looped"),
    }
    snapshot("no_value", refused(make(Odd, metrics=metrics)))


def test_a_gradient_through_a_while_loop_is_refused(snapshot: Any) -> None:
    options = ek.intermediates.Options(while_loops="last")
    snapshot("no_gradient", refused(make(Odd, intermediates=options, metrics={"g": Same("grads.interms.looped")})))


def test_what_is_no_real_number_has_no_gradient(snapshot: Any) -> None:
    class Gated(eqx.Module):
        gate: eqx.nn.Lambda
        head: eqx.nn.Linear

        def __init__(self, *, key: jax.Array) -> None:
            self.gate = eqx.nn.Lambda(lambda x: x > 0)
            self.head = eqx.nn.Linear(FEATURES, CLASSES, key=key)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(x * self.gate(x))

    snapshot("no_real_number", refused(make(Gated, metrics={"g": ek.metrics.Norm("grads.interms.gate")})))


def test_an_eval_has_no_gradients_of_them(snapshot: Any) -> None:
    data = ek.data.InMemory(arrays(40, 1), batch_size=16)
    evals = {"test": ek.evals.Eval(data=data, metrics={"g": Same("grads.interms.encoder")})}
    snapshot("in_an_eval", refused(make(evals=evals)))


def test_one_that_may_be_missing() -> None:
    metrics = {"maybe": ek.metrics.SkipIfMissing(Same("interms.encoder"), missing="interms.encoder")}
    assert "train/maybe" in make(metrics=metrics).train().metrics


def test_preflight_lists_what_is_captured() -> None:
    metrics = {
        "value": Same("interms.blocks"),
        "grad": Same("grads.interms.encoder"),
        "of": Same("interms.head.inputs[0]"),
    }
    paths = ek.inspect.check(make(metrics=metrics)).paths
    assert paths["interms.blocks"].shape == (BATCH, 3, WIDTH)
    assert paths["grads.interms.encoder"].shape == (BATCH, WIDTH)
    assert paths["interms.head.inputs[0]"].shape == (BATCH, WIDTH)
