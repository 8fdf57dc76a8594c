"""Calling a model: where its arguments come from, what is mapped, who gets a key, what comes out."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equikd as ek
from equikd.errors import WiringError
from equikd.model import call
from equikd.wiring import Context

B = 4
X = np.arange(B * 3, dtype=np.float32).reshape(B, 3)


def context(**batch: Any) -> Context:
    return Context(batch={"x": jnp.asarray(X), **batch}, mask=jnp.ones(B, bool))


def preds_of(model: Any, inputs: dict[str, str] | None = None, where: Context | None = None, **options: Any) -> Any:
    inputs = {"x": "batch.x"} if inputs is None else inputs
    return call(model, context() if where is None else where, inputs=inputs, **options)[0]


def failure(model: Any, inputs: dict[str, str], **options: Any) -> str:
    with pytest.raises(WiringError) as error:
        preds_of(model, inputs, **options)
    return str(error.value)


# Inputs.


class Wired(eqx.Module):
    """Carries its key paths itself."""

    x: ek.KeyPath = eqx.field(static=True)
    scale: ek.KeyPath | None = eqx.field(static=True, default=None)
    other: ek.KeyPath = eqx.field(static=True, default="no.argument.of.this.name")

    def __call__(self, x, scale=2.0):
        return x * scale


def test_the_trainer_maps_inputs_or_the_model_carries_key_paths():
    assert np.array_equal(preds_of(lambda x: x * 2), X * 2)
    assert np.array_equal(preds_of(Wired("batch.x"), {}), X * 2)
    scaled = Wired("batch.x", "batch.scale")
    assert np.array_equal(preds_of(scaled, {}, context(scale=jnp.full(B, 3.0))), X * 3)
    assert np.array_equal(preds_of(Wired("batch.x"), {"scale": "step"}, context().replace(step=jnp.float32(5))), X * 5)


def test_a_model_in_a_trainer_carries_its_key_paths_through_the_config():
    trainer = ek.Trainer(
        model=ek.lazy(Wired)(x="batch.x", scale="batch.scale"),
        losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        optimizer=None,
        train_data=ek.data.InMemory({"x": X, "scale": np.full(B, 3, np.float32)}, batch_size=2),
        num_steps=1,
    )
    model = ek.resolve(trainer.model)
    assert np.array_equal(preds_of(model, trainer.inputs, context(scale=jnp.full(B, 3.0))), X * 3)


def test_items_attributes_indices_and_slices_of_the_batch():
    assert np.array_equal(preds_of(lambda x: x, {"x": "batch.x[:, 1:]"}), X[:, 1:])
    assert np.array_equal(preds_of(lambda x: x, {"x": "batch.pair[1]"}, context(pair=(X, X + 1))), X + 1)
    assert np.array_equal(preds_of(lambda x: x["x"], {"x": "batch"}), X)
    assert np.array_equal(preds_of(lambda m: m, {"m": "mask"}), np.ones(B, bool))


def test_inputs_that_are_wrong_are_one_report(snapshot):
    class Model(eqx.Module):
        image: ek.KeyPath = eqx.field(static=True, default="batch.image")

        def __call__(self, image, label, *, temperature, state=None, key=None):
            return image

    text = failure(Model(), {"image": "batch.x", "labels": "batch.x"}, unmapped=("imag",))
    snapshot("wrong_inputs", text)


def test_an_unknown_argument_of_a_function(snapshot):
    def classify(pixels, /, scale=1.0, *rest):
        return pixels * scale

    snapshot("unknown_argument", failure(classify, {"pixel": "batch.x", "rest": "batch.x"}))
    assert np.array_equal(preds_of(classify, {"pixels": "batch.x"}), X)


def test_key_paths_that_lead_nowhere_are_one_report_with_where_they_stand(snapshot):
    text = failure(Wired("batch.y"), {"scale": "batc.x"})
    snapshot("key_paths_nowhere", text)


def test_a_required_state_without_a_state(snapshot):
    snapshot("no_state", failure(lambda x, state: (x, state), {"x": "batch.x"}))


@pytest.mark.parametrize("model", [3, (jnp.ones(3),), max], ids=["int", "tuple", "builtin"])
def test_what_cannot_be_called(model, snapshot, request):
    snapshot(f"not_callable_{request.node.callspec.id}", failure(model, {"x": "batch.x"}))


def test_a_model_that_takes_any_keyword_takes_any_input():
    assert np.array_equal(preds_of(lambda **inputs: inputs["a"] + inputs["b"], {"a": "batch.x", "b": "batch.x"}), X * 2)


# What is mapped.


def test_what_comes_from_the_batch_is_mapped_all_else_is_the_same_for_each_example():
    shapes = {}

    def model(x, ts, extra):
        shapes.update(x=x.shape, ts=ts.shape, extra=extra.shape)
        return x

    inputs = {"x": "batch.x", "ts": "batch.ts", "extra": "extra.table"}
    where = context(ts=jnp.ones((B, 7))).replace(extra={"table": jnp.ones((B, 5))})
    preds_of(model, inputs, where)
    assert shapes == {"x": (3,), "ts": (7,), "extra": (B, 5)}
    preds_of(model, inputs, where, unmapped=("ts",))
    assert shapes["ts"] == (B, 7)


def test_a_batched_model_sees_whole_batches_and_one_key():
    seen = {}

    def model(x, key):
        seen.update(x=x.shape, key=key)
        return x

    key = jax.random.key(3)
    assert preds_of(model, per_example=False, key=key).shape == (B, 3)
    assert seen["x"] == (B, 3)
    assert jnp.array_equal(jax.random.key_data(seen["key"]), jax.random.key_data(key))


def test_collectives_name_the_batch():
    centred = preds_of(lambda x: x - jax.lax.pmean(x, "batch"))
    assert np.allclose(centred, X - X.mean(0))


def test_a_model_without_inputs_is_called_once_an_example():
    noise = preds_of(lambda key: jax.random.normal(key, (2,)), {}, key=jax.random.key(0))
    assert noise.shape == (B, 2)
    assert len(np.unique(noise)) == 2 * B


# Outputs.


def test_outputs_that_are_no_arrays_pass_through():
    def model(x):
        return {
            "name": "text",
            "none": None,
            "function": jax.nn.relu,
            "number": 3,
            "pair": (x, x.sum()),
            "same": jnp.ones(2),
        }

    out = preds_of(model)
    assert (out["name"], out["none"], out["function"], out["number"]) == ("text", None, jax.nn.relu, 3)
    assert np.array_equal(out["pair"][0], X)
    assert np.array_equal(out["pair"][1], X.sum(1))
    assert np.array_equal(out["same"], np.ones((B, 2)))


def test_an_output_may_be_a_module():
    class Output(eqx.Module):
        logits: jax.Array
        name: str = eqx.field(static=True)

    out = preds_of(lambda x: Output(x, "name"))
    assert np.array_equal(out.logits, X)
    assert out.name == "name"


# Keys.


def test_each_example_gets_its_own_key():
    key = jax.random.key(7)
    data = preds_of(lambda x, key: jax.random.key_data(key), key=key)
    assert np.array_equal(data, jax.random.key_data(jax.random.split(key, B)))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_that_are_made_already_go_to_their_examples(make):
    keys = jax.random.split(make(7), B)
    data = preds_of(lambda x, key: jax.random.key_data(key), key=keys)
    assert np.array_equal(data, jax.random.key_data(keys))
    assert np.array_equal(preds_of(lambda x, key: jax.random.key_data(key), key=make(7)), data)


@pytest.mark.parametrize(
    "model",
    [lambda x, key: x if key is None else x + 1, lambda x, *, key=None: x if key is None else x + 1],
    ids=["required", "optional"],
)
def test_without_a_key_an_argument_key_is_none(model):
    assert np.array_equal(preds_of(model), X)
    assert np.array_equal(preds_of(model, per_example=False), X)
    assert np.array_equal(preds_of(model, key=jax.random.key(0)), X + 1)


def test_an_input_called_key_or_state_is_an_input():
    def model(x, key, state):
        return x + key + state

    inputs = {"x": "batch.x", "key": "batch.x", "state": "batch.x"}
    assert np.array_equal(preds_of(model, inputs, key=jax.random.key(0)), X * 3)
    state = eqx.nn.State(eqx.nn.StateIndex(jnp.zeros(())))
    out, after = call(model, context(), inputs=inputs, model_state=state)
    assert np.array_equal(out, X * 3)
    assert after is state


# Inference.


def test_inference_mode_switches_modules_and_an_argument_of_that_name():
    dropout = eqx.nn.Dropout(0.5)
    assert np.array_equal(preds_of(dropout, {"x": "batch.x"}, inference=True), X)
    assert not np.array_equal(preds_of(dropout, {"x": "batch.x"}, key=jax.random.key(0)), X)
    flags = []
    for model in (lambda x, inference: flags.append(inference), lambda x, inference=False: flags.append(inference)):
        preds_of(model)
        preds_of(model, inference=True)
    assert flags == [False, True, False, True]


def test_a_module_that_is_set_to_inference_by_hand_stays_there_in_training():
    dropout = eqx.nn.Dropout(0.5, inference=True)
    assert np.array_equal(preds_of(dropout, {"x": "batch.x"}, key=jax.random.key(0)), X)


# State.


class Counter(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, x, state):
        total = state.get(self.index) + jax.lax.pmean(x.sum(), "batch")
        return x, state.set(self.index, total)


def test_a_state_is_threaded_and_the_old_one_stays_valid():
    model, state = eqx.nn.make_with_state(Counter)()
    _, once = call(model, context(), inputs={"x": "batch.x"}, model_state=state)
    _, twice = call(model, context(), inputs={"x": "batch.x"}, model_state=once)
    mean = X.sum() / B
    assert [float(s.get(model.index)) for s in (state, once, twice)] == pytest.approx([0, mean, 2 * mean])


def test_a_state_that_is_not_returned_is_an_error(snapshot):
    _, state = eqx.nn.make_with_state(Counter)()

    def forgets(x, state):
        return x

    for per_example in (True, False):
        text = failure(forgets, {"x": "batch.x"}, model_state=state, per_example=per_example)
        snapshot("state_not_returned", text)


def test_a_model_with_a_state_that_its_call_does_not_take_keeps_it():
    _, state = eqx.nn.make_with_state(Counter)()
    assert call(lambda x: x, context(), inputs={"x": "batch.x"}, model_state=state)[1] is state


def test_an_unfilled_argument_is_told_with_the_keys_of_the_batch(snapshot):
    snapshot("unfilled", failure(lambda x, scale: x, {"x": "batch.x"}, where=context(a=jnp.ones(B), b=jnp.ones(B))))
