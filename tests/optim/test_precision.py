"""Precision: what computes in bfloat16, and what stays in float32."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.config import from_json, to_json
from equikd.errors import ConfigError, EquikdError
from equikd.model._call import Predictions
from tests.train._small import BatchNormed, Counted, LayerNormed, Plain, arrays, assert_same, evaluated, leaves, quick

L = ek.lazy
HALF = ek.optim.Precision()


class Watching(Counted):
    """Notes the dtypes that it computes in."""

    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    table: jax.Array

    seen = {}  # noqa: RUF012  # one for all

    def __init__(self, rate: float = 0.25, *, key: jax.Array) -> None:
        self.ends(key)
        self.norm = eqx.nn.LayerNorm(8)
        self.dropout = eqx.nn.Dropout(rate)
        self.table = jnp.arange(3)

    def __call__(self, x: jax.Array, scale: jax.Array, *, key: Any = None) -> Any:
        hidden = self.norm(self.first(x))
        out = self.last(self.dropout(jax.nn.relu(hidden), key=key)) * scale
        values = {"x": x, "scale": scale, "weight": self.first.weight, "norm": self.norm.weight, "hidden": hidden}
        values |= {"rate": self.dropout.p, "table": self.table, "out": out}
        self.seen.update({name: jnp.result_type(value).name for name, value in values.items()})
        self.seen["key"] = None if key is None else key.dtype
        return {"logits": out, "best": jnp.argmax(out), "name": "watching"}


@pytest.fixture(scope="module")
def watched() -> ek.Trainer:
    return quick(
        L(Watching)(rate=0.25),
        inputs={"x": "batch.x", "scale": "batch.label"},
        losses={"ce": ek.losses.SoftmaxCrossEntropy(logits="preds.logits", labels="batch.label")},
        metrics={
            "accuracy": ek.metrics.Accuracy(preds="preds.logits", labels="batch.label"),
            "norm": ek.metrics.Norm("grads"),
        },
        precision=HALF,
        num_steps=3,
        evals=evaluated(),
    )


EXPECTED = {
    "x": "bfloat16",
    "scale": "int32",
    "weight": "bfloat16",
    "norm": "float32",
    "hidden": "bfloat16",
    "rate": "float32",  # weak: it promotes like a Python float
    "table": "int32",
    "out": "bfloat16",
}


def test_the_model_computes_in_bfloat16_and_all_else_is_float32(watched: ek.Trainer, compilations: Any) -> None:
    first = watched.init()
    compilations.clear()
    result = watched.train()
    assert compilations.names.count("jit(flat_step)") == 1
    assert {name: Watching.seen[name] for name in EXPECTED} == EXPECTED
    for state in (first, result.state):
        assert {leaf.dtype for leaf in leaves((state.params(), state.opt_state))} <= {np.dtype("f4"), np.dtype("i4")}
    preds = result.predict({"x": arrays()["x"][:4], "label": arrays()["label"][:4]})
    assert (preds["logits"].dtype, preds["best"].dtype, preds["name"]) == (np.dtype("f4"), np.dtype("i4"), "watching")
    assert Watching.seen["out"] == "bfloat16"
    assert Watching.seen["key"] is None
    found = ek.inspect.check(watched)
    dtypes = {path: shape.dtype.name for path, shape in found.paths.items()}
    for path in ("preds.logits", "grads.first.weight", "updates.first.weight", "params.norm.weight", "batch.x"):
        assert dtypes[path] == "float32"
    assert found.evals["test"]["preds.logits"].dtype == np.float32
    assert result.metrics["train/norm"] > 0


def test_a_new_rate_and_a_new_dropout_compile_nothing(watched: ek.Trainer, compilations: Any) -> None:
    watched.train()
    compilations.clear()
    ek.override(watched, {"optimizer.learning_rate": 1e-3, "model.rate": 0.5}).train()
    assert compilations.names == []


def text_of(precision: Any) -> str:
    trainer = quick(L(LayerNormed)(), precision=precision)
    state, spec = trainer.init(), trainer.spec()
    leaves, structure = jax.tree.flatten(eqx.filter(trainer.in_step, eqx.is_array))
    static = eqx.filter(trainer.in_step, eqx.is_array, inverse=True)

    def step(leaves: Any, state: Any, spec: Any) -> Any:
        new, aux = ek.train.default_step(eqx.combine(structure.unflatten(leaves), static), state, spec)
        return eqx.filter((new, aux), eqx.is_array)

    arrays, rest = eqx.partition(state, eqx.is_array)
    return (
        jax.jit(lambda *args: step(args[0], eqx.combine(args[1], rest), args[2])).lower(leaves, arrays, spec).as_text()
    )


def test_without_a_policy_the_program_is_the_same_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    without = text_of(None)
    assert without == text_of(ek.optim.Precision(compute="float32", keep=()))
    assert "bf16" not in without
    assert "bf16" in text_of(HALF)

    def call(config: Any, model: Any, context: Any, **rest: Any) -> Any:
        wiring = {name: getattr(config, name) for name in ("inputs", "per_example", "unmapped")}
        return Predictions(*ek.model.call(model, context, **wiring, **rest))

    monkeypatch.setattr("equikd.train._step.predictions", call)
    assert without == text_of(None)


@pytest.mark.parametrize("mode", ["batch", pytest.param("ema", marks=pytest.mark.slow)])
def test_batch_normalisation_takes_its_statistics_in_float32(mode: str) -> None:
    seen = set()

    class Normed(BatchNormed):
        def __init__(self, *, key: jax.Array) -> None:
            super().__init__(key=key)
            self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode=mode)

        def __call__(self, x: jax.Array, state: Any) -> Any:
            out, state = super().__call__(x, state)
            seen.add((out.dtype.name, self.norm.weight.dtype.name))  # what one reads of a kept layer is there
            return out, state

    trainer = quick(L(Normed)(), precision=HALF, num_steps=2, metrics={})
    half = trainer.train()
    assert seen == {("bfloat16", "float32")}
    whole = ek.override(trainer, {"precision": None}).train()
    for ours, theirs in zip(leaves(half.state.model_state), leaves(whole.state.model_state), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=0.05, atol=0.02)
    batch = {"x": arrays()["x"][:8]}
    np.testing.assert_allclose(half.predict(batch), whole.predict(batch), rtol=0.1, atol=0.1)


def test_what_follows_a_norm_computes_in_bfloat16() -> None:
    model = HALF.model(eqx.nn.make_with_state(BatchNormed)(key=jax.random.key(0))[0])
    assert model.last.weight.dtype == jnp.bfloat16
    normed = HALF.model([eqx.nn.LayerNorm(3), eqx.nn.RMSNorm(3), eqx.nn.GroupNorm(1, 3)])
    for one in normed:
        assert one(jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16
        assert one.weight.dtype == jnp.float32


def test_a_kept_layer_is_what_it_was_to_those_who_ask() -> None:
    layers = [eqx.nn.Linear(3, 4, key=jax.random.key(0)), eqx.nn.BatchNorm(4, "batch", mode="ema"), eqx.nn.LayerNorm(4)]
    model, state = eqx.nn.make_with_state(eqx.nn.Sequential)([*layers, eqx.nn.Lambda(jax.nn.relu)])
    half = HALF.model(model)
    x = jnp.ones((2, 3), jnp.bfloat16)
    out, after = jax.vmap(half, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    assert out.dtype == jnp.bfloat16
    assert [leaf.dtype for leaf in leaves(after)] == [leaf.dtype for leaf in leaves(state)]
    assert isinstance(half[1], eqx.nn.BatchNorm)
    assert eqx.nn.inference_mode(half)[1].inference
    assert [type(layer).__name__ for layer in half.layers] == ["Linear", "BatchNorm", "LayerNorm", "Lambda"]


class Strict(eqx.Module, strict=True):
    """A norm whose class is final, to Equinox."""

    weight: jax.Array

    def __init__(self) -> None:
        self.weight = jnp.ones(3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight * x / jnp.sqrt(jnp.mean(x**2))


NAMED = []


class Named(eqx.Module):
    """A norm whose subclasses have a name in a table."""

    weight: jax.Array

    def __init_subclass__(cls, label: str, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        NAMED.append(label)

    def __init__(self) -> None:
        self.weight = jnp.ones(3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight * x / jnp.sqrt(jnp.mean(x**2))


class Known(Named, label="known"):
    """One of them."""


@pytest.mark.parametrize("cls", [Strict, Named, Known])
def test_a_class_that_asks_for_more_of_its_subclasses_is_kept_too(cls: Any) -> None:
    norm = ek.optim.Precision(keep=cls).model([cls()])[0]
    assert isinstance(norm, cls)
    assert (norm.weight.dtype, norm(jnp.ones(3, jnp.bfloat16)).dtype) == (jnp.float32, jnp.bfloat16)
    assert type(norm).__qualname__ == cls.__qualname__
    assert NAMED == ["known"]


class Closed(type(eqx.Module)):
    """Of classes that allow no subclass."""

    def __new__(cls, name: str, bases: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(base, Closed) for base in bases):
            raise TypeError("this class is closed")
        return super().__new__(cls, name, bases, *args, **kwargs)


class ClosedNorm(eqx.nn.LayerNorm, metaclass=Closed):
    """A norm that cannot be made to compute in float32 from outside."""


class WithClosedNorm(LayerNormed):
    def __init__(self, *, key: jax.Array) -> None:
        super().__init__(key=key)
        self.norm = ClosedNorm(8)


def test_a_class_that_cannot_be_kept_is_named_with_what_to_write(snapshot: Any) -> None:
    with pytest.raises(EquikdError) as error:
        quick(L(WithClosedNorm)(), precision=HALF).init()
    snapshot("closed", str(error.value))
    quick(L(WithClosedNorm)(), precision=ek.optim.Precision(keep="**.norm.**")).init()


class TwoNorms(eqx.Module):
    one: eqx.nn.LayerNorm
    other: eqx.nn.LayerNorm

    def __init__(self, *, key: jax.Array) -> None:
        self.one, self.other = eqx.nn.LayerNorm(3), eqx.nn.LayerNorm(3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.other(self.one(x))


@pytest.mark.parametrize("part", ["module", "weight"])
def test_shared_norms_are_kept(part: str) -> None:
    where, get = (lambda m: m.other, lambda m: m.one) if part == "module" else (_other_weight, _one_weight)
    shared = eqx.nn.Shared(TwoNorms(key=jax.random.key(0)), where, get)
    x = jnp.array([1.0, 2.0, 6.0], jnp.bfloat16)
    whole = HALF.model({"shared": shared})["shared"]()
    for norm in (whole.one, whole.other):
        assert (norm.weight.dtype, norm(x).dtype) == (jnp.float32, jnp.bfloat16)
    assert whole.other.weight is whole.one.weight
    np.testing.assert_array_equal(whole(x), HALF.model({"model": shared()})["model"](x))


_other_weight, _one_weight = lambda m: m.other.weight, lambda m: m.one.weight


def test_norms_of_an_ensemble_are_kept() -> None:
    models = eqx.filter_jit(eqx.filter_vmap(lambda key: LayerNormed(key=key)))(jax.random.split(jax.random.key(0), 2))
    x = jnp.arange(6, dtype=jnp.bfloat16)
    half = HALF.model(models)
    out = eqx.filter_jit(eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None)))(half, x)
    assert (out.dtype, out.shape) == (jnp.bfloat16, (2, 3))
    assert (half.norm.weight.dtype, half.norm.weight.shape) == (jnp.float32, (2, 8))
    last = HALF.model(jax.tree.map(lambda leaf: leaf[1] if eqx.is_array(leaf) else leaf, models))
    np.testing.assert_allclose(out[1].astype("f4"), eqx.filter_jit(last)(x).astype("f4"), rtol=0.02, atol=0.02)


def test_what_is_kept_is_named_by_pattern() -> None:
    model = Plain(key=jax.random.key(0))
    kept = ek.optim.Precision(keep=("last.**", lambda path, leaf: path == "first.bias")).model(model)
    assert [leaf.dtype.name for leaf in leaves(kept)] == ["bfloat16", "float32", "float32", "float32"]
    other = ek.optim.Precision(keep="last.**").model(model.first)  # what an eval's transform made: a part, say
    assert {leaf.dtype.name for leaf in leaves(other)} == {"bfloat16"}
    by_class = ek.optim.Precision(keep=eqx.nn.Linear).model(model)
    assert by_class.first(jnp.ones(6, jnp.bfloat16)).dtype == jnp.bfloat16
    assert_same(by_class, model)
    with pytest.raises(ConfigError, match=r"(?s)precision: keep: 'lst.*' matches no parameter.*last.bias"):
        quick(precision=ek.optim.Precision(keep="lst.*")).init()


def test_accumulation_and_averages_under_a_policy_are_those_of_the_whole_batch() -> None:
    fields = {"precision": HALF, "num_steps": 2, "optimizer": ek.optim.Ema(L(optax.sgd)(0.1), decay=0.5)}
    whole, parts = quick(**fields).train(), quick(**fields, accumulate=2).train()
    assert {leaf.dtype for leaf in leaves(parts.averaged_model)} == {np.dtype("float32")}
    for one, other in zip(leaves(whole.averaged_model), leaves(parts.averaged_model), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=2e-3)


def test_other_dtypes_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"precision: compute must be.*got 'float16': small gradients are 0.*loss is"):
        quick(precision=ek.optim.Precision(compute="float16")).init()
    with pytest.raises(ConfigError, match=r"precision: output must be bfloat16 or float32, got 'f8'"):
        quick(precision=ek.optim.Precision(output="f8")).init()
    with pytest.raises(ConfigError, match=r"Trainer.precision: wrong kind of value"):
        quick(precision="bfloat16")


def test_a_policy_is_plain_data() -> None:
    precision = ek.optim.Precision(keep=("last.**", eqx.nn.LayerNorm))
    assert from_json(to_json(precision)) == precision != HALF
    assert from_json(to_json(HALF)) == HALF
    assert jax.tree.leaves(HALF) == []


def test_the_precision_of_matrix_products_holds_in_both_passes_and_in_evals() -> None:
    plain = program_of(ek.optim.Precision(compute="float32", keep=()))
    highest = program_of(ek.optim.Precision(compute="float32", keep=(), matmul="highest"))
    assert "HIGHEST" not in plain
    assert highest.count("HIGHEST") == 2 * highest.count("dot_general[") >= 10  # of both operands


def program_of(precision: Any) -> str:
    trainer = quick(ek.lazy(eqx.nn.MLP)(6, 3, 8, 1), precision=precision, guard=None)
    state = trainer.init()
    arrays, static = eqx.partition((trainer.in_step, state, next(trainer.batches(state))), eqx.is_array)
    run = lambda arrays: eqx.filter(ek.train.default_step(*eqx.combine(arrays, static)), eqx.is_array)
    return str(jax.make_jaxpr(run)(arrays))


def test_an_unknown_precision_of_products_is_refused() -> None:
    with pytest.raises(ek.errors.ConfigError, match="matmul must be one of default, high"):
        ek.config.validate(ek.optim.Precision(matmul="medium"))
