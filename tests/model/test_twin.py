"""The twin: which leaves are trained, which follow the config, and what can do neither.

Public faults: a dropout rate as an array leaf gets a gradient or weight decay (equinox 318, 772); one array at two
paths becomes two parameters (jax 9635).
"""

import functools
import math
import re
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import ConfigError
from equikd.model import Twin
from equikd.train._in_step import FIELDS, InStep
from equikd.tree import get, named_leaves

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def trainer(model: Any, **options: Any) -> ek.Trainer:
    given = {
        "inputs": {"x": "batch.x"},
        "optimizer": ek.lazy(optax.adamw)(0.1, weight_decay=0.1),
        "losses": {"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        "train_data": ek.data.InMemory({"x": X}, batch_size=8),
        "num_steps": 2,
        "writers": (),
    }
    return ek.Trainer(model=model, **{**given, **options})


def twin_of(model: Any, **options: Any) -> Twin:
    return ek.model.twin(trainer(model, **options).in_step)


def kinds(model: Any, **options: Any) -> dict[str, str]:
    """Leaf -> `parameter`, `hyperparameter` or `constant`."""
    twin = twin_of(model, **options)
    names = {(True, False): "parameter", (False, True): "hyperparameter", (False, False): "constant"}
    pairs = zip(twin.trainable, twin.hyperparameter, strict=True)
    return dict(zip(twin.paths, [names[pair] for pair in pairs], strict=True))


class Plain(eqx.Module):
    """Its subclasses differ in what they hold; the output is the input."""

    def __call__(self, x, *, key=None):
        return x


# What a leaf is.


class Derived(Plain):
    q: float

    def __init__(self, p):
        self.q = 1 - p


class Temperature(Plain):
    t: jax.Array

    def __init__(self, init, make):
        self.t = make(init)


class Scaled(Plain):
    w: jax.Array
    b: jax.Array

    def __init__(self, scale, *, key):
        self.w = scale * jax.random.normal(key, (3,))
        self.b = jnp.zeros(3)


def log_of(value):
    return jnp.log(jnp.asarray(value))


def full(value):
    return jnp.full((3,), value)


@pytest.mark.parametrize(
    ("model", "truth"),
    [
        (ek.lazy(eqx.nn.Dropout)(p=0.1), {"p": "hyperparameter", "inference": "constant"}),
        (ek.lazy(Derived)(p=0.1), {"q": "hyperparameter"}),
        (ek.lazy(Temperature)(init=0.5, make=jnp.array), {"t": "parameter"}),
        (ek.lazy(Temperature)(init=0.5, make=jnp.asarray), {"t": "parameter"}),
        (ek.lazy(Temperature)(init=0.5, make=log_of), {"t": "parameter"}),
        (ek.lazy(Scaled)(scale=0.5), {"w": "parameter", "b": "parameter"}),
        (ek.lazy(Temperature)(init=0.5, make=full), {"t": "parameter"}),
        (ek.lazy(eqx.nn.PReLU)(init_alpha=0.25), {"negative_slope": "parameter"}),
        (ek.lazy(eqx.nn.Linear)(3, 3), {"weight": "parameter", "bias": "parameter"}),
    ],
)
def test_the_nine_cases_that_tell_the_ways_of_deciding_apart(model, truth):
    assert kinds(model) == truth


class Mixed(Plain):
    """Whatever else a module may hold in its leaves."""

    number: int
    constant: float
    flag: bool
    name: str
    nothing: None
    table: np.ndarray
    doubles: np.ndarray
    indices: jax.Array
    scalar: Any
    keep: Any
    both: complex
    z: jax.Array
    rng: jax.Array
    act: Any

    def __init__(self, p, *, key):
        self.number, self.constant, self.flag, self.name, self.nothing = 3, 0.5, True, "name", None
        self.table, self.doubles, self.indices = np.ones(3, np.float32), np.ones(3), jnp.arange(3)
        self.scalar, self.keep = np.float64(0.5), p > 0.5
        self.both = complex(0, 1) * p
        self.z, self.rng, self.act = jnp.ones(3, complex), key, jax.nn.relu

    def __call__(self, x):
        y = sum(x * self.table for _ in range(self.number)) + self.doubles + self.indices
        return self.act(y) * self.scalar + jnp.abs(self.z * self.both) + jnp.where(self.keep, 1, 0)


def test_numbers_are_constants_arrays_of_floats_are_trained_all_else_stays():
    assert kinds(ek.lazy(Mixed)(p=0.1)) == {
        "number": "constant",
        "constant": "constant",
        "flag": "constant",
        "name": "constant",
        "table": "parameter",
        "doubles": "parameter",
        "indices": "constant",
        "scalar": "constant",  # a numpy scalar is a number here, as in a config
        "keep": "hyperparameter",  # a bool that is computed from a traced float
        "both": "hyperparameter",
        "z": "parameter",
        "rng": "constant",
        "act": "constant",
    }


def test_mixed_leaves_train_and_only_parameters_move():
    made = trainer(ek.lazy(Mixed)(p=0.9))
    before, after = made.init().model, made.train().model
    assert type(after.number) is int
    assert type(after.scalar) is float
    assert after.name == "name"
    assert after.doubles.dtype == np.float32
    for name in ("table", "doubles", "z"):
        assert not np.array_equal(getattr(before, name), getattr(after, name))
    assert np.array_equal(after.indices, np.arange(3))
    assert jnp.array_equal(jax.random.key_data(before.rng), jax.random.key_data(after.rng))
    assert bool(after.keep)
    assert after.both == np.complex64(0.9j)


@pytest.mark.parametrize("model", [eqx.nn.Identity, lambda: jax.nn.relu], ids=["module", "function"])
def test_a_model_without_parameters_trains(model):
    result = trainer(ek.lazy(model)(), optimizer=ek.lazy(optax.sgd)(0.1)).train()
    assert jax.tree.leaves(result.state.params()) == []
    assert result.metrics["train/loss"] >= 0


# Hyperparameters follow the config.


class Kept(eqx.Module):
    """Scales by `keep = 1 - p`, with a parameter beside it."""

    keep: float
    w: jax.Array

    def __init__(self, p):
        self.keep, self.w = 1 - p, jnp.ones(3)

    def __call__(self, x):
        return self.keep * self.w * x


def test_a_float_that_is_derived_from_another_follows_it_and_is_never_trained(compilations):
    made = trainer(ek.lazy(Kept)(p=0.25), losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")})
    state, batch = made.init(), {"x": X[:8]}
    state, _ = ek.train.step(made, state, batch)
    changed = ek.override(made, {"model.p": 0.5})
    compilations.clear()
    after, aux = ek.train.step(changed, state, batch)
    assert compilations.names == []
    assert float(after.model.keep) == 0.5
    assert not np.array_equal(after.model.w, state.model.w)
    expected = np.mean((0.5 * np.asarray(state.model.w) * X[:8] - X[:8]) ** 2)
    assert float(aux.loss) == pytest.approx(expected, rel=1e-6)
    assert [leaf.shape for leaf in jax.tree.leaves(state.opt_state)].count((3,)) == 2  # adam's moments of w alone


@ek.config.config
class Rates:
    """A config that a module holds."""

    rate: float = 0.5
    scale: float = 2.0
    count: int = 2
    inner: "Inner | None" = None


@ek.config.config
class Inner:
    """A config in a config."""

    deep: float = 3.0


class Holder(eqx.Module):
    rates: Rates
    static: Rates = eqx.field(static=True)
    w: jax.Array

    def __init__(self, rates, static):
        self.rates, self.static, self.w = rates, static, jnp.ones(3)

    def __call__(self, x):
        deep = 1 if self.rates.inner is None else self.rates.inner.deep
        return self.w * x * self.rates.scale * deep * self.static.count


def test_a_config_in_a_module_is_never_trained():
    model = ek.lazy(Holder)(rates=Rates(inner=Inner()), static=Rates(count=1))
    assert kinds(model) == {
        "rates.rate": "hyperparameter",
        "rates.scale": "hyperparameter",
        "rates.inner.deep": "hyperparameter",
        "w": "parameter",
    }
    made = trainer(model)
    result = made.train()
    assert result.model.rates == made.init().model.rates
    assert result.model.static == Rates(count=1)
    changed = ek.override(made, {"model.rates.inner.deep": 0.0})
    assert np.array_equal(changed.train().predict({"x": X}), np.zeros_like(X))


def test_a_config_in_a_static_field_is_hashed_by_value():
    first, second = (trainer(ek.lazy(Holder)(rates=Rates(), static=Rates(rate=r))) for r in (0.25, 0.75))
    assert set(first.in_step.model.static.rate.__slots__) == {"value"}  # a pin: the class says it is static
    trees = [jax.tree.structure(made.init()) for made in (first, second, trainer(first.model))]
    assert trees[0] != trees[1]
    assert trees[0] == trees[2]


def test_values_that_are_referred_to_are_hyperparameters_like_written_ones():
    made = trainer(ek.lazy(Kept)(p=ek.ref("shared.p")), shared={"p": 0.25})
    assert kinds(made.model, shared={"p": 0.25}) == {"keep": "hyperparameter", "w": "parameter"}
    changed = ek.override(made, {"shared.p": 0.5})
    state, batch = made.init(), {"x": X[:8]}
    assert float(ek.train.step(changed, state, batch)[0].model.keep) == 0.5
    weights = ek.lazy(Kept)(p=ek.ref("losses.mse.weight"))
    assert kinds(weights) == {"keep": "hyperparameter", "w": "parameter"}


def test_a_pinned_float_is_a_constant():
    made = trainer(ek.lazy(Kept)(p=ek.pin(0.25)))
    assert kinds(made.model) == {"keep": "constant", "w": "parameter"}
    assert type(made.train().model.keep) is float
    assert jax.tree.structure(made.in_step) != jax.tree.structure(ek.override(made, {"model.p": ek.pin(0.5)}).in_step)


def test_an_int_for_a_float_argument_is_traced():
    assert kinds(ek.lazy(eqx.nn.Dropout)(0))["p"] == "hyperparameter"


def test_floats_that_trace_leaves_out_are_constants():
    assert kinds(ek.lazy(Kept)(p=0.25), trace=("optimizer.**",)) == {"keep": "constant", "w": "parameter"}


# Floats that a class declares static.


class StaticRate(eqx.Module):
    rate: float = eqx.field(static=True)
    w: jax.Array

    def __init__(self, rate):
        if not 0 <= rate <= 1:  # Python may look at it: it is never traced
            raise ValueError("rate must be in [0, 1]")
        self.rate, self.w = rate, jnp.ones(3)

    def __call__(self, x):
        return self.rate * self.w * x


class ConvertedRate(eqx.Module):
    rate: float = eqx.field(static=True, converter=float)

    def __check_init__(self):
        if self.rate < 0:
            raise ValueError("rate must not be negative")

    def __call__(self, x):
        return self.rate * x


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (ek.lazy(StaticRate)(rate=0.5), {"model.rate": "StaticRate.rate"}),
        (ek.lazy(ConvertedRate)(rate=0.5), {"model.rate": "ConvertedRate.rate"}),
        (ek.lazy(eqx.nn.LayerNorm)(3, eps=1e-3), {"model.eps": "LayerNorm.eps"}),
        (ek.lazy(eqx.nn.RMSNorm)(3, eps=1e-3), {"model.eps": "RMSNorm.eps"}),
        (ek.lazy(eqx.nn.GroupNorm)(1, 3, eps=1e-3), {"model.eps": "GroupNorm.eps"}),
        (
            ek.lazy(eqx.nn.BatchNorm)(3, "batch", eps=1e-3, momentum=0.9, mode="batch"),
            {"model.eps": "BatchNorm.eps", "model.momentum": "BatchNorm.momentum"},
        ),
        (
            ek.lazy(eqx.nn.BatchNorm)(3, "batch", momentum=0.9, mode="ema"),
            {"model.momentum": "BatchNorm.momentum"},
        ),
        (
            ek.lazy(eqx.nn.SpectralNorm)(ek.lazy(eqx.nn.Linear)(3, 3), "weight", eps=1e-3),
            {"model.eps": "SpectralNorm.eps"},
        ),
        (ek.lazy(eqx.nn.RotaryPositionalEmbedding)(4, theta=100.0), {"model.theta": "RotaryPositionalEmbedding.theta"}),
        (
            ek.lazy(eqx.nn.Sequential)((ek.lazy(eqx.nn.LayerNorm)(3, eps=1e-3), ek.lazy(eqx.nn.Dropout)(0.1))),
            {"model.layers[0].eps": "LayerNorm.eps"},
        ),
    ],
)
def test_floats_in_static_fields_are_found_and_pinned(model, found):
    made = trainer(model)
    assert ek.model.static_floats(InStep(**{name: getattr(made, name) for name in FIELDS})) == found
    pinned = [path for path in found if get(made.in_step, path) == ek.pin(get(made, path))]
    assert pinned == list(found)


def test_a_static_float_is_static_wherever_it_comes_from():
    made = trainer(ek.lazy(StaticRate)(rate=ek.ref("shared.rate")), shared={"rate": 0.5})
    assert made.in_step.referred == {"shared.rate": ek.pin(0.5)}
    assert made.init().model.rate == 0.5
    changed = ek.override(made, {"shared.rate": 0.25})
    assert changed.init().model.rate == 0.25
    of_a_loss = trainer(ek.lazy(StaticRate)(rate=ek.ref("losses.mse.weight")))
    assert of_a_loss.in_step.losses["mse"].weight == ek.pin(1.0)
    assert of_a_loss.train().model.rate == 1.0


def test_a_changed_static_float_compiles_once_and_acts(compilations):
    made = trainer(ek.lazy(StaticRate)(rate=0.5))
    batch = {"x": X[:8]}
    results = []
    for rate, expected in ((0.5, None), (0.25, 1), (0.5, 0), (0.25, 0)):
        changed = ek.override(made, {"model.rate": rate})
        state = changed.init()
        compilations.clear()
        results.append(float(ek.train.step(changed, state, batch)[1].loss))
        if expected is not None:
            assert len(compilations.names) == expected
    assert results[0] == results[2] != results[1] == results[3]


class Twice(eqx.Module):
    static: float = eqx.field(static=True)
    leaf: float

    def __init__(self, p):
        self.static = self.leaf = p

    def __call__(self, x):
        return x * self.leaf


def test_a_float_in_a_static_field_and_in_a_leaf_is_static():
    assert kinds(ek.lazy(Twice)(p=0.5)) == {"leaf": "constant"}


def test_values_that_happen_to_be_equal_are_told_apart():
    model = ek.lazy(eqx.nn.Sequential)((ek.lazy(StaticRate)(rate=0.5), ek.lazy(eqx.nn.Dropout)(0.5)))
    made = trainer(model).in_step.model
    assert made.layers[0].rate == ek.pin(0.5)
    assert made.layers[1].p == 0.5


# What can neither be traced nor trained.


class Branching(Plain):
    p: float
    q: float

    def __init__(self, p, q=0.5):
        self.p, self.q = (p, q) if p > 0 else (q, q)


class Logarithm(Plain):
    p: float

    def __init__(self, p):
        self.p = math.log(p)


class Numpy(Plain):
    p: float

    def __init__(self, p):
        self.p = np.sqrt(p)


class Converted(Plain):
    p: float = eqx.field(converter=float)


class CheckedInit(Plain):
    p: float

    def __check_init__(self):
        if not 0 <= self.p < 1:
            raise ValueError("p must be in [0, 1)")


NEEDS_VALUE = [
    ("branch", Branching, jax.errors.TracerBoolConversionError),
    ("logarithm", Logarithm, jax.errors.ConcretizationTypeError),
    ("numpy", Numpy, jax.errors.TracerArrayConversionError),
    ("converter", Converted, jax.errors.ConcretizationTypeError),
    ("check_init", CheckedInit, jax.errors.TracerBoolConversionError),
]


@pytest.mark.parametrize(("name", "module", "kind"), NEEDS_VALUE)
def test_python_that_needs_a_value_is_an_error_that_names_the_pin(name, module, kind, snapshot):
    made = trainer(ek.lazy(eqx.nn.Sequential)((ek.lazy(module)(p=0.25),)))
    with pytest.raises(kind) as error:
        made.init()
    assert any("model.layers[0] = " in note for note in error.value.__notes__)
    snapshot(
        f"needs_value_{name}",
        next(note for note in error.value.__notes__ if note.startswith("Python needs the value of a traced")),
    )
    pinned = ek.override(made, {"model.layers[0].p": ek.pin(0.25)})
    assert len(kinds(pinned.model)) == len(named_leaves(pinned.init().model))


def test_only_the_floats_that_are_to_blame_are_named():
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        trainer(ek.lazy(Branching)(p=0.25, q=0.75), shared={}).init()
    note = error.value.__notes__[-1] if "JAX" not in error.value.__notes__[-1] else error.value.__notes__[-2]
    assert "{'model.p': ek.pin(0.25)}" in note
    assert "model.q" not in note


def test_a_blamed_float_that_is_referred_to_is_named_where_it_stands():
    made = trainer(ek.lazy(Branching)(p=ek.ref("shared.p")), shared={"p": 0.25})
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        made.init()
    assert any("ek.override(trainer, {'shared.p': ek.pin(0.25)})" in note for note in error.value.__notes__)
    assert kinds(made.model, shared={"p": ek.pin(0.25)}) == {"p": "constant", "q": "constant"}


class ClosureInField(Plain):
    f: Any = eqx.field(static=True)

    def __init__(self, p):
        self.f = lambda x: p * x


class ClosureInLeaf(Plain):
    f: Any

    def __init__(self, p):
        self.f = lambda x, factor=p: factor * x


class Partial(Plain):
    f: Any

    def __init__(self, p):
        self.f = functools.partial(jax.nn.leaky_relu, negative_slope=p)


class ClosesOverSelf(Plain):
    p: float
    f: Any = eqx.field(static=True)

    def __init__(self, p):
        self.p = p
        self.f = lambda x: self.p * x


class OptaxInField(Plain):
    transform: Any = eqx.field(static=True)

    def __init__(self, p):
        self.transform = optax.scale(p)


class StaticDerived(Plain):
    keep: float = eqx.field(static=True)

    def __init__(self, p):
        self.keep = 1 - p


class Structured(Plain):
    parts: tuple

    def __init__(self, p):
        self.parts = (eqx.nn.Dropout(p),) if isinstance(p, float) else ()


class Named(Plain):
    name: str = eqx.field(static=True)

    def __init__(self, p):
        self.name = f"rate {p}"


class Kind(Plain):
    p: Any

    def __init__(self, p):
        self.p = 1.0 if isinstance(p, float) else 2.0


class Text(Plain):
    p: Any

    def __init__(self, p):
        self.p = "a float" if isinstance(p, float) else p


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("closure_in_field", ClosureInField),
        ("closure_in_leaf", ClosureInLeaf),
        ("partial", Partial),
        ("closes_over_self", ClosesOverSelf),
        ("optax_in_field", OptaxInField),
        ("static_derived", StaticDerived),
        ("structure", Structured),
        ("static_name", Named),
        ("constant", Kind),
        ("text", Text),
    ],
)
def test_what_depends_on_a_traced_float_and_is_no_leaf_asks_for_a_pin(name, module, snapshot):
    made = trainer(ek.lazy(module)(p=0.25))
    with pytest.raises(ConfigError) as error:
        made.init()
    snapshot(f"depends_{name}", str(error.value))
    ek.override(made, {"model.p": ek.pin(0.25)}).init()


class Scale:
    def __init__(self, p):
        self.p = p

    def __call__(self, x):
        return self.p * x

    def method(self, x):
        return self.p * x


class Slotted:
    __slots__ = ("__p", "unset")

    def __init__(self, p):
        self.__p = [p]


class ObjectInField(Plain):
    scale: Any = eqx.field(static=True)

    def __init__(self, p):
        self.scale = Scale(p)


class ObjectInLeaf(Plain):
    scale: Any

    def __init__(self, p):
        self.scale = Slotted(p)


class MethodInLeaf(Plain):
    scale: Any

    def __init__(self, p):
        self.scale = Scale(p).method


class NestedObjects(Plain):
    scale: Any = eqx.field(static=True)

    def __init__(self, p):
        inner = Scale(p)
        inner.back = Scale(inner)
        self.scale = (frozenset([inner.back]),)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("object_in_field", ObjectInField),
        ("object_in_leaf", ObjectInLeaf),
        ("method_in_leaf", MethodInLeaf),
        ("nested_objects", NestedObjects),
    ],
)
def test_a_float_in_an_object_of_an_ordinary_class_asks_for_a_pin(name, module, snapshot):
    made = trainer(ek.lazy(module)(p=0.25))
    with pytest.raises(ConfigError) as error:
        made.init()
    snapshot(f"depends_{name}", str(error.value))
    ek.override(made, {"model.p": ek.pin(0.25)}).init()


def test_objects_of_ordinary_classes_may_hold_constants():
    class Linked(Plain):
        scale: Any = eqx.field(static=True)
        p: float

        def __init__(self, p):
            self.p = p
            self.scale = Scale(np.ones(3, np.float32))
            for _ in range(5000):  # deeper than Python recurses
                self.scale = Scale(self.scale)

    assert kinds(ek.lazy(Linked)(p=0.25)) == {"p": "hyperparameter"}


def test_an_object_that_holds_an_array_made_with_the_model_is_refused(snapshot):
    class Holds(Plain):
        scale: Any

        def __init__(self, *, key):
            self.scale = Scale(jax.random.normal(key, (2,)))

    with pytest.raises(ConfigError) as error:
        trainer(ek.lazy(Holds)()).init()
    snapshot("array_in_object", str(error.value))


class Several(Plain):
    f: Any
    keep: float = eqx.field(static=True)

    def __init__(self, p, q, r):
        self.f, self.keep = (lambda x: p * x + r), (1 - q) * r


def test_all_that_depends_on_traced_floats_is_one_report_with_the_right_floats(snapshot):
    with pytest.raises(ConfigError) as error:
        trainer(ek.lazy(Several)(p=0.25, q=0.5, r=0.75)).init()
    snapshot("depends_several", str(error.value))


def test_a_function_may_close_over_plain_values_and_a_static_lambda_is_no_second_structure(compilations):
    class Lambda(eqx.Module):
        f: Any = eqx.field(static=True)
        w: jax.Array

        def __init__(self, p):
            table = np.ones(3, np.float32)
            self.f, self.w = (lambda x: x * table), jnp.full(3, p)

        def __call__(self, x):
            return self.f(x) * self.w

    made = trainer(ek.lazy(Lambda)(p=0.5))
    first, second = made.init(), trainer(made.model).init()
    assert jax.tree.structure(first) == jax.tree.structure(second)
    result = made.train()
    assert not np.array_equal(result.model.w, first.model.w)
    compilations.clear()
    ek.override(made, {"model.p": 0.25, "seed": 1}).train()
    assert not any("step" in name for name in compilations.names)


# Misplaced arrays.


class ArrayInField(Plain):
    a: Any = eqx.field(static=True)

    def __init__(self, make):
        self.a = make()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("jax", lambda: jnp.ones(3)),
        ("numpy", lambda: np.ones(3)),
        ("in_a_tuple", lambda: (1, {"k": jnp.ones(3)})),
        ("in_a_module", lambda: eqx.nn.Linear(2, 2, key=jax.random.key(0))),
        ("list", lambda: [1, 2]),
    ],
)
def test_an_array_in_a_static_field_is_refused(name, make, snapshot):
    with pytest.raises(ConfigError) as error:
        trainer(ek.lazy(eqx.nn.Sequential)((ek.lazy(ArrayInField)(make=make),))).init()
    snapshot(f"static_array_{name}", str(error.value))


def test_an_array_made_with_the_model_that_a_function_closes_over_is_refused(snapshot):
    class Frozen(Plain):
        f: Any

        def __init__(self, *, key):
            w = jax.random.normal(key, (3,))
            self.f = lambda x: w * x

    with pytest.raises(ConfigError) as error:
        trainer(ek.lazy(Frozen)()).init()
    snapshot("closure_array", str(error.value))


class Tied(Plain):
    first: Any
    second: Any

    def __init__(self, make):
        self.first = {"w": make()}
        self.second = (self.first["w"],)


@pytest.mark.parametrize("make", [lambda: jnp.ones(3), lambda: np.ones(3)], ids=["jax", "numpy"])
def test_one_array_at_two_paths_is_refused(make, snapshot):
    with pytest.raises(ConfigError) as error:
        trainer(ek.lazy(Tied)(make=make)).init()
    snapshot("one_array_at_two_paths", str(error.value))
    with pytest.raises(ConfigError, match=r"first\.w and at second\[0\]"):
        trainer(None).init(model=Tied(make))


def test_no_warning_comes_out_of_any_of_this():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for module in (StaticRate, Kept, Twice):
            trainer(ek.lazy(module)(0.5)).init()
        with pytest.raises(ConfigError):
            trainer(ek.lazy(StaticDerived)(p=0.5)).init()
    assert [str(one.message) for one in seen] == []


def test_the_twin_of_a_structure_is_made_once():
    calls = []

    def make(p):
        calls.append(p)
        return Kept(p)

    first = trainer(ek.lazy(make)(p=0.25))
    twin = ek.model.twin(first.in_step)
    count = len(calls)
    assert ek.model.twin(ek.override(first, {"model.p": 0.5, "seed": 3, "num_steps": 9}).in_step) is twin
    assert len(calls) == count


def test_what_differs_from_build_to_build_by_itself_is_not_blamed_on_floats(snapshot):
    numbers = iter(range(1000))

    class Numbered(Plain):
        p: float
        name: str = eqx.field(static=True)
        half: float

        def __init__(self, p):
            self.p, self.name, self.half = p, f"layer {next(numbers)}", next(numbers) / 2

    state = trainer(ek.lazy(Numbered)(p=0.25)).init()
    assert jax.tree.structure(state) == jax.tree.structure(trainer(ek.lazy(Numbered)(p=0.5)).init())

    class Growing(Plain):
        p: float
        parts: tuple

        def __init__(self, p):
            self.p, self.parts = p, (1.0,) * next(numbers)

    with pytest.raises(ConfigError) as error:
        trainer(ek.lazy(Growing)(p=0.25)).init()
    snapshot("structure_by_chance", re.sub(r"\(\d+ more\)|parts\[\d+\], ", "", str(error.value)))


class Orthogonal(Plain):
    w: np.ndarray
    p: float

    def __init__(self, p, *, key):
        self.p, self.w = p, np.linalg.qr(np.asarray(jax.random.normal(key, (3, 3))))[0]


def test_a_construction_that_needs_values_of_arrays_says_what_to_do_instead(snapshot):
    made = trainer(ek.lazy(Orthogonal)(p=0.25))
    with pytest.raises(jax.errors.TracerArrayConversionError) as error:
        made.init()
    snapshot("needs_array", next(note for note in error.value.__notes__ if note.startswith("the model is built")))
    mine = Orthogonal(0.25, key=jax.random.key(0))
    assert ek.override(made, {"model": None}).init(model=mine).params().w.shape == (3, 3)


class Positional(Plain):
    rates: tuple
    w: jax.Array

    def __init__(self, width, *rates):
        self.rates, self.w = tuple(rate * 2 for rate in rates), jnp.ones(width)

    def __call__(self, x, *, key=None):
        return x * self.w * self.rates[0]


def test_floats_by_position_are_hyperparameters():
    made = trainer(ek.lazy(Positional)(3, 0.25, 0.5))
    assert kinds(made.model) == {"rates[0]": "hyperparameter", "rates[1]": "hyperparameter", "w": "parameter"}
    changed = ek.override(made, {"model[1]": 0.75})
    state, _ = ek.train.step(changed, made.init(), {"x": X[:8]})
    assert [float(rate) for rate in state.model.rates] == [1.5, 1.0]


def test_doubles_stay_doubles_under_x64():
    class Table(Plain):
        table: np.ndarray
        p: float

        def __init__(self, p):
            self.p, self.table = p, np.ones(3)

    with jax.enable_x64(True):
        made = trainer(ek.lazy(Table)(p=0.1), train_data=ek.data.InMemory({"x": np.float64(X)}, batch_size=8))
        state = made.init()
        assert state.model.table.dtype == state.model.p.dtype == np.float64
        assert float(state.model.p) == 0.1
    state = trainer(made.model).init()
    assert state.model.table.dtype == state.model.p.dtype == np.float32
