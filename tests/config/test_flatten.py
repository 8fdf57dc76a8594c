"""Configs and nodes as pytrees: strong leaves made once, anything passes through, and no float recompiles."""

import enum
import random
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from equikd.config import config, field, flatten, host, lazy, override, pin, ref, resolve
from equikd.errors import ConfigError
from equikd.tree import named_leaves


class Act(enum.Enum):
    relu = "relu"


@config
class Opt:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = field(dynamic=True, default=None)
    nesterov: bool = False
    mixed: tuple[float, int] = (0.5, 3)


@config
class Cfg:
    opt: Opt = Opt()
    aux: Opt | None = None
    optimizer: Any = lazy(optax.adamw)(1e-3, weight_decay=0.1)
    chain: Any = lazy(optax.chain)(lazy(optax.clip)(0.5), lazy(optax.sgd)(0.1))
    losses: dict[str, float] = field(default_factory=lambda: {"l2": 0.1, "ce": 1.0})
    heads: dict[str, Opt] = field(default_factory=dict)
    schedule: float | Callable[[int], float] = 0.25
    width: int = 8
    act: Act = Act.relu
    seed: int = field(dynamic=True, unsigned=True, default=7)
    steps: int = field(dynamic=True, default=-1)
    fixed: float = field(static=True, default=0.5)
    optional: float | None = 0.5
    pinned: float = pin(0.5)
    again: float = ref("opt.learning_rate")


PATHS = (
    "opt.learning_rate opt.betas[0] opt.betas[1] opt.mixed[0] optimizer.learning_rate optimizer.weight_decay "
    "chain[0].max_delta chain[1].learning_rate losses.ce losses.l2 schedule seed steps"
).split()
FLOATS = [path for path in PATHS if path not in ("seed", "steps")]


def test_leaves_are_strong_0d_arrays_under_the_names_of_the_config():
    leaves = named_leaves(Cfg())
    assert list(leaves) == PATHS
    for path, leaf in leaves.items():
        wanted = {"seed": "uint32", "steps": "int32"}.get(path, "float32")
        assert isinstance(leaf, jax.Array)
        assert (leaf.dtype.name, leaf.shape, jax.typeof(leaf).weak_type) == (wanted, (), False)
        assert leaf == flatten(Cfg())[path] or path == "schedule"
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(Cfg())[0]]
    assert names[:2] == [".opt.learning_rate", ".opt.betas[0]"]
    assert ".chain[0].max_delta" in names


def test_one_transfer_an_instance_and_only_once(monkeypatch):
    count = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *args: count.append(len(x)) or put(x, *args))
    opt, node = Opt(clip=1.0), lazy(optax.adamw)(1e-3, b1=0.8)
    first, again = jax.tree.leaves(opt), jax.tree.leaves(opt)
    assert count == [5]
    assert all(a is b for a, b in zip(first, again, strict=True))
    jax.tree.leaves(node), jax.tree.leaves(node)
    assert count == [5, 2]
    jax.tree.structure(Cfg(opt=opt, optimizer=node, chain=None))
    assert count == [5, 2, 5]


def test_a_flatten_inside_a_trace_caches_no_tracer():
    cfg = Cfg()

    @jax.jit
    def f(x):
        leaves = jax.tree.leaves(cfg)
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        return x * leaves[0]

    with jax.checking_leaks():
        f(1.0)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(cfg))
    assert jax.jit(lambda c: c.opt.learning_rate)(cfg) == np.float32(1e-3)


def test_the_dtype_follows_x64():
    cfg = Cfg(opt=Opt(learning_rate=0.1))
    assert jax.tree.leaves(cfg)[0].dtype == jnp.float32
    with jax.enable_x64(True):
        leaves = named_leaves(cfg)
        assert {leaf.dtype.name for leaf in leaves.values()} == {"float64", "int32", "uint32"}
        assert float(leaves["opt.learning_rate"]) == 0.1
    assert jax.tree.leaves(cfg)[0].dtype == jnp.float32


@pytest.mark.parametrize("thing", [None, 0, "text", (1, 2), jax.ShapeDtypeStruct((), jnp.float32), object()])
def test_anything_passes_through_unflatten(thing):
    cfg = Cfg(aux=Opt(clip=1.0))
    leaves, structure = jax.tree.flatten(cfg)
    made = jax.tree.unflatten(structure, [thing] * len(leaves))
    assert made.opt.learning_rate == thing
    assert made.opt.mixed == (thing, 3)
    assert made.optimizer.weight_decay == thing
    assert made.chain[0].max_delta == thing
    assert made.losses["ce"] == thing
    assert (made.width, made.act, made.pinned, made.again) == (8, Act.relu, pin(0.5), ref("opt.learning_rate"))
    assert jax.tree.leaves(made) == ([] if thing is None else jax.tree.leaves([thing] * len(leaves)))


def test_no_constructor_and_no_validation_on_unflatten():
    calls = []

    @config
    class Checked:
        rate: float = 1.0

        def validate(self):
            calls.append("validate")

    jax.tree.map(lambda x: -x, Checked())
    jax.jit(lambda c: c.rate)(Checked())
    assert calls == []


def test_flatten_then_unflatten_keeps_structure_and_values():
    cfg = Cfg(aux=Opt(clip=0.3), heads={"b": Opt(), "a": Opt(0.7)}, losses={"z": 3, "a": 1e-7})
    mapped = jax.tree.map(lambda x: x, cfg)
    assert jax.tree.structure(mapped) == jax.tree.structure(cfg)
    assert host(mapped) == cfg
    assert list(vars(mapped))[:3] == list(vars(cfg))[:3] == ["opt", "aux", "optimizer"]
    assert repr(host(mapped).optimizer) == repr(cfg.optimizer)


def test_floats_are_tracers_in_every_transformation():
    def check(cfg):
        for value in (cfg.opt.learning_rate, cfg.losses["ce"], cfg.optimizer.weight_decay, cfg.chain[1].learning_rate):
            assert isinstance(value, jax.core.Tracer)
        return cfg.opt.learning_rate * cfg.width + cfg.losses["ce"]

    cfg = Cfg(opt=Opt(3))
    assert jax.jit(check)(cfg) == 25.0
    assert eqx.filter_jit(check)(cfg) == 25.0
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *[Cfg(opt=Opt(i)) for i in range(3)])
    assert stacked.opt.learning_rate.shape == (3,)
    assert jax.vmap(check)(stacked).tolist() == [1.0, 9.0, 17.0]
    assert lax.scan(lambda total, c: (total + check(c), None), 0.0, stacked)[0] == 27.0
    gradient = eqx.filter_grad(check)(cfg)
    assert gradient.opt.learning_rate == 8.0
    assert gradient.losses["ce"] == 1.0
    assert gradient.width == 8
    assert jax.grad(lambda opt: opt.learning_rate**2)(Opt(3)).learning_rate == 6.0
    axes = jax.tree.map(lambda _: None, cfg)
    axes = eqx.tree_at(lambda c: c.opt.learning_rate, axes, 0, is_leaf=lambda x: x is None)
    one = eqx.tree_at(lambda c: c.opt.learning_rate, cfg, jnp.arange(3.0))
    rate = jax.vmap(lambda cfg: cfg.opt.learning_rate * cfg.losses["ce"], in_axes=(axes,))(one)
    assert rate.tolist() == [0.0, 1.0, 2.0]


def test_replace_inside_a_trace():
    def f(opt):
        doubled = override(opt, {"learning_rate": opt.learning_rate * 2})
        return doubled.learning_rate

    assert jax.jit(f)(Opt(0.5)) == 1.0
    assert jax.jit(lambda node: override(node, {"b1": node.b1 * 2}).b1)(lazy(optax.adamw)(0.1, b1=0.25)) == 0.5


@given(st.sampled_from(FLOATS), st.floats(-100, 100, width=32, allow_subnormal=False))
def test_changing_a_float_keeps_the_structure(path, value):
    cfg = Cfg()
    changed = override(cfg, {path: value})
    assert jax.tree.structure(changed) == jax.tree.structure(cfg)
    assert named_leaves(changed)[path] == np.float32(value)
    assert {p: v for p, v in named_leaves(changed).items() if p != path} == {
        p: v for p, v in named_leaves(cfg).items() if p != path
    }


STATICS = {
    "width": 9, "opt.nesterov": True, "opt.mixed[1]": 4, "opt.clip": 1.0, "fixed": -0.5, "optional": None,
    "pinned": pin(0.6), "again": ref("opt.betas[0]"), "schedule": lazy(optax.constant_schedule)(0.25),
    "optimizer": lazy(optax.adam)(1e-3), "optimizer.nesterov": True, "aux": Opt(), "heads": {"a": Opt()},
    "losses": {"ce": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("path", STATICS)
def test_changing_anything_else_changes_the_structure(path):
    assert jax.tree.structure(override(Cfg(), {path: STATICS[path]})) != jax.tree.structure(Cfg())


def test_structural_optional_floats():
    one, two, none = Opt(clip=1.0), Opt(clip=2.0), Opt()
    assert jax.tree.structure(one) == jax.tree.structure(two) != jax.tree.structure(none)
    assert named_leaves(one)["clip"] == 1.0
    assert none.clip is None


def test_a_hundred_float_edits_compile_once(compilations):
    def f(cfg):
        optimizer = resolve(cfg.chain[1], root=cfg)
        return optimizer.update(sum(jax.tree.leaves(cfg)), optimizer.init(0.0))[0]

    compiled = jax.jit(f)
    compiled(Cfg())
    compilations.clear()
    random.seed(0)
    results, cfg = set(), Cfg()
    for _ in range(100):
        cfg = override(
            cfg, {random.choice(FLOATS): random.uniform(0.1, 10), "chain[1].learning_rate": random.uniform(0.1, 1)}
        )
        results.add(float(compiled(cfg)))
    assert compilations.names == []
    assert len(results) == 100
    assert compiled(override(Cfg(), {"width": 9})) == compiled(Cfg())
    assert len(compilations.names) == 1


def test_what_the_user_may_hold_in_a_float_field_shares_the_program(compilations):
    compiled = jax.jit(lambda opt: opt.learning_rate * 2)
    compiled(Opt())
    compilations.clear()
    given_ = (
        2,
        0.1,
        np.float64(0.1),
        np.float32(0.1),
        np.array(0.1),
        jnp.float32(0.1),
        jnp.asarray(0.1),
        jnp.full((), 1.0),
    )
    for value in given_:
        compiled(Opt(value))
    assert [name for name in compilations.names if "lambda" in name] == []


def test_static_values_share_a_program_only_if_equal_by_type():
    @config
    class Static:
        x: Any = 1

    @jax.jit
    def f(cfg, like):
        traces.append(cfg.x)
        return 0

    traces = []
    for value in (1, True, 1.0, 0.0, -0.0, float("nan"), float("nan"), (1,), (True,), 1):
        f(Static(value), 0)
    assert repr(traces) == "[1, True, 1.0, 0.0, -0.0, nan, (1,), (True,)]"


@config
class W:
    a: Any = None


def test_configs_in_other_trees():
    class Model(eqx.Module):
        static: Opt = eqx.field(static=True)
        child: Opt
        weight: jax.Array

    with warnings.catch_warnings():  # equinox looks for arrays by flattening, and a config has its own
        warnings.simplefilter("ignore", UserWarning)
        model, other = Model(Opt(), Opt(), jnp.ones(2)), Model(Opt(), Opt(5), jnp.ones(2))
        third = Model(Opt(5), Opt(), jnp.ones(2))
    assert list(named_leaves(model)) == [
        "child.learning_rate",
        "child.betas[0]",
        "child.betas[1]",
        "child.mixed[0]",
        "weight",
    ]
    assert jax.tree.structure(model) == jax.tree.structure(other)
    assert jax.tree.structure(model) != jax.tree.structure(third)
    dynamic, static = eqx.partition(model, eqx.is_array)
    assert eqx.combine(dynamic, static).child.learning_rate == np.float32(1e-3)


def test_opaque_fields_stay_on_the_host():
    @config
    class Data:
        arrays: Any = field(opaque=True)
        rate: float = 1.0

    arrays = {"x": np.ones(3)}
    assert len(jax.tree.leaves(Data(arrays))) == 1
    assert jax.tree.structure(Data(arrays)) == jax.tree.structure(Data(arrays, rate=2.0))
    assert jax.tree.structure(Data(arrays)) != jax.tree.structure(Data({"x": np.ones(3)}))
    assert jax.tree.map(lambda x: x, Data(arrays)).arrays is arrays


def test_jax_names_the_field_that_does_not_fit():
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"opt\.learning_rate"):
        jax.jit(lambda cfg: 1 if cfg.opt.learning_rate > 0 else 2)(Cfg())


def test_what_was_written_under_x64_does_not_become_infinite_without():
    with jax.enable_x64(True):
        cfg = Opt(1e300)
        assert jax.tree.leaves(cfg)[0] == 1e300
    with pytest.raises(ConfigError, match="becomes inf"):
        jax.tree.leaves(cfg)


def test_gradients_of_a_config_with_int_leaves():
    @config
    class Run:
        rate: float = 0.5
        seed: int = field(dynamic=True, unsigned=True, default=1)

    with pytest.raises(TypeError, match="real- or complex-valued"):
        jax.grad(lambda run: run.rate**2)(Run())
    grads = eqx.filter_grad(lambda run: run.rate**2)(Run())
    assert (grads.rate, grads.seed) == (1.0, None)


def test_a_donated_config_and_those_that_share_its_defaults_live_on():
    @config
    class Outer:
        opt: Opt = Opt()
        weights: dict[str, float] = field(default_factory=lambda: {"a": 0.5})

    def double(tree):
        return jax.tree.map(lambda x: x * 2, tree)

    cfg = Outer()
    for _ in range(3):
        doubled = jax.jit(double, donate_argnums=0)(cfg)
        assert doubled.weights["a"] == 1.0
        assert cfg.weights == {"a": 0.5}
    assert jax.jit(lambda cfg: cfg.opt.learning_rate)(Outer()) == np.float32(1e-3)
    assert [leaf.is_deleted() for leaf in jax.tree.leaves(cfg)] == [False] * len(jax.tree.leaves(cfg))


def test_python_floats_put_into_leaves_are_strong_at_the_border(compilations):
    function = jax.jit(lambda opt: opt.learning_rate * jnp.ones((), jnp.bfloat16))
    written = function(Opt(0.5))
    compilations.clear()
    for edited in (eqx.tree_at(lambda opt: opt.learning_rate, Opt(), 0.5), jax.tree.map(float, Opt(0.5))):
        assert edited.learning_rate == 0.5
        assert function(edited).dtype == written.dtype
    assert compilations.names == []


def test_dicts_have_one_order_everywhere():
    one, two = W({"b": 1, "a": 2}), W({"a": 2, "b": 1})
    values = jax.jit(lambda cfg: jnp.array(list(cfg.a.values())))
    assert list(one.a) == list(two.a) == ["a", "b"]
    assert values(one).tolist() == values(two).tolist() == [2, 1]
    node = lazy(lambda table: list(table.values()))({"b": 1.0, "a": 2.0})
    assert resolve(node) == jax.jit(resolve)(node) == [2.0, 1.0]


def test_calling_the_constructor_again_forgets_what_was_flattened():
    opt = Opt(0.5)
    assert (jax.tree.leaves(opt)[0], hash(opt)) == (0.5, hash(Opt(0.5)))
    opt.__init__(0.25)
    assert (jax.tree.leaves(opt)[0], hash(opt)) == (0.25, hash(Opt(0.25)))
    opt.__setstate__(Opt(0.75).__getstate__())
    assert (jax.tree.leaves(opt)[0], hash(opt)) == (0.75, hash(Opt(0.75)))
