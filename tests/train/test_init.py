"""The first state: whose model it is, whose keys it has, what of it is trained.

Public faults: a frozen layer or a buffer still decays under adamw (equinox 866); a pattern that matches nothing freezes
everything or nothing.
"""

import zlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import ConfigError
from equikd.train._init import initial_state
from equikd.tree import named_leaves
from tests.train._small import (
    CLASSES,
    FEATURES,
    WIDTH,
    BatchNormed,
    Dropping,
    LayerNormed,
    Plain,
    arrays,
    assert_same,
    evaluated,
    leaves,
    small,
)

L = ek.lazy


def model_key(seed: int) -> jax.Array:
    """The key of a model, as documented."""
    return jax.random.split(jax.random.key(jnp.uint32(seed)))[0]


def layered(*sizes: int, **fields: Any) -> ek.Trainer:
    pairs = zip((FEATURES, *sizes), (*sizes, CLASSES), strict=True)
    layers = tuple(L(eqx.nn.Linear)(a, b) for a, b in pairs)
    return small(L(eqx.nn.Sequential)(layers), **{"inputs": {"x": "batch.x"}, **fields})


# Keys.


@pytest.mark.parametrize("model", [L(Dropping)(rate=0.25), L(BatchNormed)(), L(LayerNormed)(eps=1e-3)])
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_the_model_is_what_resolve_gives_with_the_documented_key(model, seed):
    state = small(model, seed=seed).init()
    built, _ = eqx.nn.make_with_state(lambda: ek.resolve(model, key=model_key(seed)))()
    ours = named_leaves(state.model)
    assert ours.keys() == named_leaves(built).keys()
    for path, leaf in named_leaves(built).items():
        assert np.array_equal(ours[path], np.float32(leaf) if type(leaf) is float else leaf)


def test_a_node_has_its_key_from_its_path():
    state = layered(4, 5).init()
    key = jax.random.fold_in(model_key(0), np.uint32(zlib.crc32(b"layers[1]")))
    assert_same(state.model.layers[1], eqx.nn.Linear(4, 5, key=key))


def test_a_new_layer_does_not_reseed_the_others():
    two, three = layered(4).init().model, layered(4, CLASSES).init().model
    assert_same(two.layers[:2], three.layers[:2])


def test_seeds_differ_and_repeat():
    one, again, other = (layered(4, seed=seed).init() for seed in (1, 1, 2))
    assert_same(one, again)
    assert not np.array_equal(one.model.layers[0].weight, other.model.layers[0].weight)
    assert not np.array_equal(*(jax.random.key_data(state.key) for state in (one, other)))


def test_the_seed_recompiles_nothing(compilations):
    trainer = small(num_steps=2)
    trainer.train()
    compilations.clear()
    ek.override(trainer, {"seed": 5}).train()
    assert compilations.names == []


# A fixed point.


class Doubles(Plain):
    """Numbers as one writes them in numpy and Python."""

    table: np.ndarray
    weak: jax.Array
    count: int
    rate: Any

    def __init__(self, rate: float, *, key: jax.Array) -> None:
        self.ends(key)
        self.table, self.weak, self.count, self.rate = np.ones(WIDTH), jnp.asarray(0.5), 2, rate

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(sum(self.first(x) for _ in range(self.count)) * self.table * self.weak * self.rate)


@pytest.mark.parametrize(
    "optimizer",
    [
        L(optax.adamw)(0.1),
        L(optax.sgd)(0.1, momentum=0.9),
        L(optax.adafactor)(0.1),
        L(optax.contrib.schedule_free_adamw)(0.1, warmup_steps=2),
    ],
    ids=["adamw", "momentum", "adafactor", "schedule_free"],
)
def test_the_first_state_is_the_fixed_point_of_the_step(optimizer):
    trainer = small(L(Doubles)(rate=0.5), optimizer=optimizer)
    state = trainer.init()
    after, _ = ek.train.step(trainer, state, next(trainer.batches(state)))

    def kinds(tree: Any) -> Any:
        return jax.tree.map(jax.typeof, eqx.filter(tree, eqx.is_array))

    assert kinds(state) == kinds(after)
    assert not any(getattr(kind, "weak_type", False) for kind in jax.tree.leaves(kinds(state)))
    assert state.model.table.dtype == np.float32
    assert type(state.model.count) is int
    assert int(state.step) == 0
    assert int(after.step) == 1


# What is trained.


@pytest.mark.parametrize(
    ("trainable", "paths"),
    [
        (None, ["first.weight", "first.bias", "last.weight", "last.bias"]),
        ("last.*", ["last.weight", "last.bias"]),
        (("last.*", "first.bias"), ["first.bias", "last.weight", "last.bias"]),
        ("**.bias", ["first.bias", "last.bias"]),
        ((), []),
        (lambda path, leaf: leaf.ndim == 2, ["first.weight", "last.weight"]),
        (lambda path, leaf: True, ["first.weight", "first.bias", "last.weight", "last.bias"]),
    ],
    ids=["all", "glob", "globs", "anywhere", "nothing", "predicate", "predicate_all"],
)
def test_trainable_narrows_what_is_trained(trainable, paths):
    trainer = small(trainable=trainable, optimizer=L(optax.adamw)(0.1, weight_decay=0.5), num_steps=3)
    before = trainer.init()
    after = trainer.train().state
    assert list(named_leaves(before.params())) == paths
    moved = [
        p for p, leaf in named_leaves(before.model).items() if not np.array_equal(leaf, named_leaves(after.model)[p])
    ]
    assert moved == paths  # all others, decay or not, to the bit
    moments = [path for path in named_leaves(after.opt_state) if ".mu." in path]
    assert len(moments) == len(paths)


class Buffered(Plain):
    buffer: jax.Array

    def __init__(self, *, key: jax.Array) -> None:
        self.ends(key)
        self.buffer = jnp.ones(FEATURES)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.first(x * jax.lax.stop_gradient(self.buffer)))


def test_a_buffer_behind_stop_gradient_is_left_alone_where_trainable_says_so():
    trainer = small(L(Buffered)(), trainable=("first.*", "last.*"), optimizer=L(optax.adamw)(0.1, weight_decay=0.5))
    result = trainer.train()
    assert np.array_equal(result.model.buffer, np.ones(FEATURES))
    assert not any("buffer" in path for path in named_leaves(result.state.opt_state))


def test_a_predicate_cannot_make_hyperparameters_trainable():
    state = small(L(Dropping)(rate=0.25), trainable=lambda path, leaf: True).init()
    assert "dropout.p" not in named_leaves(state.params())


class Complex(Plain):
    z: jax.Array

    def __init__(self, *, key: jax.Array) -> None:
        self.ends(key)
        self.z = jnp.asarray([1 + 1j] * WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.real(self.z * self.first(x)))


def test_complex_parameters_are_trained_and_keep_their_dtype():
    result = small(L(Complex)(), num_steps=3).train()
    assert "z" in named_leaves(result.state.params())
    assert result.model.z.dtype == np.complex64
    assert not np.any(np.real(result.model.z) == 1)


# Extra.


def test_extra_is_any_pytree_and_strong():
    def make(model: Any) -> Any:
        return {"ema": model.first.weight, "count": 0, "rate": 0.5, "name": "text"}

    extra = small(init_extra=make).init().extra
    assert (extra["count"].dtype, extra["rate"].dtype, extra["name"]) == (jnp.int32, jnp.float32, "text")
    assert small(init_extra={"a": 1.0}).init().extra["a"].weak_type is False


# Live models.


def live(seed: int = 3, rate: float = 0.75) -> Any:
    return Dropping(rate=rate, key=jax.random.key(seed))


def test_a_live_model_gives_its_arrays_and_the_config_the_hyperparameters():
    trainer = small(L(Dropping)(rate=0.25), num_steps=2)
    mine = live()
    state = trainer.init(model=mine)
    assert_same(state.params(), eqx.filter((mine.first, mine.last), eqx.is_array))
    assert float(state.model.dropout.p) == 0.25
    assert jax.tree.structure(state) == jax.tree.structure(trainer.init())
    result = trainer.train(model=mine)
    assert float(result.model.dropout.p) == 0.25
    assert np.all(np.isfinite(mine.first.weight))
    assert mine.dropout.p == 0.75
    changed = ek.override(trainer, {"model.rate": 0.5}).init(model=mine)
    assert float(changed.model.dropout.p) == 0.5


def test_a_live_model_may_hold_derived_numbers_and_configs():
    class Derived(Plain):
        keep: float

        def __init__(self, rate: float, *, key: jax.Array) -> None:
            self.ends(key)
            self.keep = 1 - rate

    trainer = small(L(Derived)(rate=0.25))
    assert float(trainer.init(model=Derived(0.5, key=jax.random.key(0))).model.keep) == 0.75


def test_without_a_description_the_numbers_of_a_live_model_are_static(compilations):
    trainer = ek.override(small(num_steps=2), {"model": None})
    state = trainer.init(model=live())
    assert type(state.model.dropout.p) is float
    assert state.hyperparameter == (False,) * len(state.hyperparameter)
    result = trainer.train(model=live())
    assert list(named_leaves(result.state.params())) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    compilations.clear()
    trainer.train(model=live(seed=4))
    assert compilations.names == []
    trainer.train(model=live(rate=0.5))
    assert any("step" in name for name in compilations.names)


def test_a_live_model_brings_its_own_state():
    trainer = small(L(BatchNormed)(), num_steps=3, evals=evaluated())
    whole = BatchNormed(key=jax.random.key(3))
    model, model_state = eqx.nn.make_with_state(lambda: whole)()
    first, second = trainer.init(model=whole), trainer.init(model=model, model_state=model_state)
    assert_same(first, second)
    trained = trainer.train(model=whole)
    on = trainer.init(model=trained.model, model_state=trained.state.model_state)
    assert_same(on.model_state, trained.state.model_state)
    assert_same(on.params(), trained.state.params())
    without = ek.override(trainer, {"model": None})
    assert_same(without.init(model=whole), first)


def test_a_live_model_whose_state_has_been_taken_out_needs_it(snapshot):
    model, _ = eqx.nn.make_with_state(BatchNormed)(key=jax.random.key(0))
    for trainer in (small(L(BatchNormed)()), ek.override(small(L(BatchNormed)()), {"model": None})):
        with pytest.raises(ConfigError) as error:
            trainer.init(model=model)
        snapshot("live_without_state", str(error.value))


def test_a_state_of_another_model_is_refused(snapshot):
    model, _ = eqx.nn.make_with_state(BatchNormed)(key=jax.random.key(0))
    _, other = eqx.nn.make_with_state(lambda: eqx.nn.BatchNorm(5, "batch", mode="batch"))()
    with pytest.raises(ConfigError) as error:
        small(L(BatchNormed)()).init(model=model, model_state=other)
    snapshot("state_of_another_model", str(error.value))


class Headed(Plain):
    heads: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(self, heads: int, eps: float, *, key: jax.Array) -> None:
        self.ends(key)
        self.heads, self.eps = heads, eps


def test_a_live_model_with_another_static_field_is_refused(snapshot):
    trainer = small(L(Headed)(heads=2, eps=1e-5))
    trainer.init(model=Headed(2, 1e-5, key=jax.random.key(0)))  # the float32 of the config, the float of Python
    with pytest.raises(ConfigError) as error:
        trainer.init(model=Headed(4, 1e-3, key=jax.random.key(0)))
    snapshot("live_static_fields", str(error.value))


def test_a_live_model_of_another_dtype_is_refused():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, live())
    with pytest.raises(ConfigError, match=r"first\.weight is of another kind\n.*bfloat16\[8, 6\]\n.*float32\[8, 6\]"):
        small().init(model=half)
    assert ek.override(small(), {"model": None}).init(model=half).model.first.weight.dtype == jnp.bfloat16


def test_arrays_of_a_live_model_stay_the_callers():
    mine = live()
    kept = [np.array(leaf) for leaf in leaves(mine)]
    small(num_steps=3).train(model=mine)
    assert all(np.array_equal(a, b) for a, b in zip(kept, leaves(mine), strict=True))
    assert arrays()["x"].shape[1] == FEATURES


@pytest.mark.slow
def test_the_first_state_maps_over_seeds():
    trainer = small()
    states = jax.vmap(lambda seed: initial_state(trainer.in_step, seed).params())(jnp.arange(3, dtype=jnp.uint32))
    for seed in range(3):
        one = ek.override(trainer, {"seed": seed}).init().params()
        for ours, theirs in zip(leaves(states), leaves(one), strict=True):
            np.testing.assert_allclose(ours[seed], theirs, rtol=1e-6, atol=1e-7)
