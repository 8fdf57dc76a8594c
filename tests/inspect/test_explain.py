"""Why a call compiles: pairs of calls that differ in one way each, and the explanation that names that way alone."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.inspect import explain, trace_counts, watch

X = np.ones((8, 3), np.float32)


def linear(size: int = 3, **fields: Any) -> Any:
    return eqx.nn.Linear(size, 2, key=jax.random.key(0), **fields)


def mlp(**fields: Any) -> Any:
    return eqx.nn.MLP(**{"in_size": 2, "out_size": 2, "width_size": 4, "depth": 1, "key": jax.random.key(0), **fields})


@ek.config.config
class Inner:
    rate: float = 0.1
    count: int = 2


@ek.config.config
class Other:
    rate: float = 0.1


@ek.config.config
class Settings:
    rate: float = 0.1
    width: int = 8
    kind: Literal["a", "b"] = "a"
    limit: float | None = None
    warm: float | None = ek.config.field(dynamic=True, default=None)
    inner: Any = Inner()
    function: Callable[..., Any] = jnp.tanh


class Scale(eqx.Module):
    weight: Any
    bias: Any = None


class Point(NamedTuple):
    x: Any
    y: Any


def adamw(**fields: Any) -> Any:
    return ek.lazy(optax.adamw)(**{"learning_rate": 0.1, **fields})


def state_of(optimizer: Any) -> Any:
    return optimizer.init(jnp.ones(3))


def devices() -> list[Any]:
    return jax.devices()


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "ragged": lambda: ({"x": X}, {"x": X[:5]}),
    "rank": lambda: ({"x": X}, {"x": X[0]}),
    "scalar_shape": lambda: (({"x": jnp.zeros(())},), ({"x": jnp.zeros(1)},)),
    "dtype": lambda: ({"x": X}, {"x": X.astype(np.int32)}),
    "half": lambda: ({"x": jnp.asarray(X)}, {"x": jnp.asarray(X, jnp.bfloat16)}),
    "mask_dtype": lambda: ({"mask": np.ones(8, bool)}, {"mask": np.ones(8, np.int32)}),
    "weak": lambda: ({"rate": jnp.float32(1)}, {"rate": jnp.asarray(1.0)}),
    "weak_int": lambda: ({"step": jnp.int32(1)}, {"step": jnp.asarray(1)}),
    "key_gone": lambda: ({"x": X, "id": np.arange(8)}, {"x": X}),
    "key_new": lambda: ({"x": X}, {"x": X, "id": np.arange(8)}),
    "longer": lambda: ({"xs": [X, X]}, {"xs": [X, X, X]}),
    "tuple_to_list": lambda: ({"xs": (X, X)}, {"xs": [X, X]}),
    "to_none": lambda: ({"x": X, "mask": np.ones(8)}, {"x": X, "mask": None}),
    "from_none": lambda: ({"mask": None}, {"mask": np.ones(8)}),
    "deep": lambda: ({"a": [{"b": (X, X)}]}, {"a": [{"b": (X, X[:4])}]}),
    "odd_key": lambda: ({"a b": X}, {"a b": X[:4]}),
    "string": lambda: ({"mode": "train"}, {"mode": "eval"}),
    "flag": lambda: ((X, True), (X, False)),
    "one_and_true": lambda: ((X, 1), (X, True)),
    "number": lambda: ({"n": 3}, {"n": 4}),
    "python_float": lambda: ({"rate": 0.1}, {"rate": 0.2}),
    "minus_zero": lambda: ({"rate": 0.0}, {"rate": -0.0}),
    "int_to_float": lambda: ({"n": 1}, {"n": 1.0}),
    "number_to_array": lambda: ({"n": 1.0}, {"n": jnp.float32(1)}),
    "lambda": lambda: ({"f": lambda x: x}, {"f": lambda x: x}),
    "other_function": lambda: ({"f": jnp.tanh}, {"f": jnp.sin}),
    "partial": lambda: ({"f": functools.partial(jnp.sum, axis=0)}, {"f": functools.partial(jnp.sum, axis=0)}),
    "module_width": lambda: ({"layer": Scale(jnp.ones(3))}, {"layer": Scale(jnp.ones(4))}),
    "module_field": lambda: (eqx.nn.Dropout(0.5), eqx.nn.Dropout(0.5, inference=True)),
    "module_static": lambda: (mlp(), mlp(activation=jnp.sin)),
    "module_class": lambda: ({"layer": linear()}, {"layer": mlp()}),
    "without_bias": lambda: ({"layer": Scale(jnp.ones(3), jnp.ones(3))}, {"layer": Scale(jnp.ones(3))}),
    "config_int": lambda: (Settings(), Settings(width=16)),
    "config_literal": lambda: (Settings(), Settings(kind="b")),
    "config_function": lambda: (Settings(), Settings(function=jnp.sin)),
    "config_none_static": lambda: (Settings(), Settings(limit=1.0)),
    "config_none_dynamic": lambda: (Settings(), Settings(warm=1.0)),
    "config_inner": lambda: (Settings(), Settings(inner=Inner(count=3))),
    "config_other_class": lambda: (Settings(), Settings(inner=Other())),
    "node_function": lambda: ({"optimizer": adamw()}, {"optimizer": ek.lazy(optax.sgd)(0.1)}),
    "node_argument": lambda: ({"optimizer": adamw()}, {"optimizer": adamw(weight_decay=0.1)}),
    "node_static": lambda: ({"optimizer": adamw(nesterov=False)}, {"optimizer": adamw(nesterov=True)}),
    "pinned": lambda: ({"optimizer": adamw(b1=ek.pin(0.9))}, {"optimizer": adamw(b1=ek.pin(0.8))}),
    "named_tuple": lambda: ({"p": Point(X, X)}, {"p": Point(X, X[:4])}),
    "optimizer_state": lambda: ({"s": state_of(optax.adam(0.1))}, {"s": state_of(optax.sgd(0.1, momentum=0.9))}),
    "one_argument_more": lambda: ((X,), (X, X)),
    "one_keyword_less": lambda: ({"x": X, "train": True}, {"x": X}),
    "key": lambda: ({"key": jax.random.key(0)}, {"key": jax.random.key(0, impl="rbg")}),
    "old_key": lambda: ({"key": jax.random.key(0)}, {"key": jax.random.PRNGKey(0)}),
    "device": lambda: ({"x": jax.device_put(X, devices()[0])}, {"x": jax.device_put(X, devices()[1])}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_that_differs_in_one_way(name: str, snapshot: Any) -> None:
    before, after = PAIRS[name]()
    found = explain(before, after)
    assert found
    snapshot(name, str(found))
    assert len(found) == 1
    assert not explain(before, before)
    again, _ = PAIRS[name]()
    if name not in ("lambda", "partial"):  # which are made anew
        assert not explain(before, again)


# JAX takes 1 for True and for 1.0, and 0.0 for -0.0, and reuses the program of the other. For another device it
# compiles again what it has traced.
NOT_TRACED = ("minus_zero", "one_and_true", "int_to_float", "device")


@pytest.mark.parametrize("name", [name for name in PAIRS if name not in NOT_TRACED])
def test_what_is_explained_is_traced_again(name: str) -> None:
    traces = []

    @eqx.filter_jit
    def call(argument: Any) -> jax.Array:
        traces.append(argument)
        return jnp.zeros(())

    before, after = PAIRS[name]()
    for argument in (before, after, before, after):
        call(argument)
    assert len(traces) == 2 + (2 if name in ("lambda", "partial") and len(traces) == 4 else 0)


SAME: dict[str, tuple[Any, Any]] = {
    "values": ({"x": X}, {"x": 2 * X}),
    "numpy and jax": ({"x": X}, {"x": jnp.asarray(X)}),
    "floats of a config": (Settings(rate=0.1, warm=1.0), Settings(rate=0.2, warm=2.0)),
    "floats of a node": (adamw(learning_rate=0.1), adamw(learning_rate=0.3)),
    "order of keys": ({"a": X, "b": X}, {"b": X, "a": X}),
    "nan": ({"rate": float("nan")}, {"rate": float("nan")}),
    "None": ({"x": None}, {"x": None}),
    "float64 without x64": ({"x": X}, {"x": X.astype(np.float64)}),
    "an equal optimizer, built again": (adamw(), adamw()),
}


@pytest.mark.parametrize("name", SAME)
def test_what_compiles_nothing_is_no_difference(name: str) -> None:
    found = explain(*SAME[name])
    assert not found
    assert str(found) == "no difference: the second call compiles nothing"


def test_several_differences_at_once() -> None:
    found = explain((Settings(), {"x": X}), (Settings(width=16, kind="b"), {"x": X[:4]}))
    assert {difference.path for difference in found} == {"[0].width", "[0].kind", "[1].x"}


def test_trainers() -> None:
    from tests.train._small import quick

    a, b = quick(), ek.override(quick(), {"per_example": False})
    assert [difference.path for difference in explain(a.in_step, b.in_step)] == ["per_example"]


# --- watch ------------------------------------------------------------------------------------------------------------


def test_a_watched_function_tells_by_the_nearest_call(caplog: pytest.LogCaptureFixture) -> None:
    @eqx.filter_jit
    def total(x: Any, mode: str) -> Any:
        return x.sum() if mode == "sum" else x.mean()

    watched = watch(total)
    with caplog.at_level(logging.WARNING, "equikd"):
        assert float(watched(jnp.ones(3), "sum")) == 3
        watched(jnp.zeros(3), "sum")
        assert not caplog.records
        watched(jnp.ones(4), "sum")
        watched(jnp.ones(4), "mean")  # one difference to the call before, two to the first one
    assert [[d.kind for d in one] for one in watched.explanations] == [["shape"], ["static value"]]
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == [
        f"{total.__qualname__} compiles again"
    ] * 2
    watched(jnp.ones(3), "sum")
    watched(jnp.ones(4), mode="mean")
    assert len(watched.explanations) in (2, 3)


def test_a_watched_function_keeps_no_array_and_passes_errors_on() -> None:
    import gc
    import weakref

    watched = watch(jax.jit(lambda x: x + 1))
    x = jnp.ones(3)
    held = weakref.ref(x)
    watched(x)
    del x
    gc.collect()
    assert held() is None
    with pytest.raises(TypeError):
        watched()


def test_traces_are_counted_by_name() -> None:
    def a_name_of_its_own(x: Any) -> Any:
        return x

    before = trace_counts().get("a_name_of_its_own", 0)
    call = jax.jit(a_name_of_its_own)
    for argument in (1.0, 2.0, 3, jnp.ones(2)):
        call(argument)
    assert trace_counts()["a_name_of_its_own"] - before == 3
