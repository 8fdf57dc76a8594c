"""`resolve` makes the calls: floats outside, weak tracers inside, one object for one place, errors with paths."""

import functools
import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from equikd._compat import is_weak
from equikd.config import config, field, host, lazy, override, pin, ref, resolve
from equikd.config._resolve import Resolver, check_references
from equikd.errors import ConfigError
from equikd.tree import named_leaves


class Box:
    """What was built, told apart by identity."""

    def __init__(self, value=None, other=None):
        self.value, self.other = value, other


@config
class Opt:
    rate: float = 0.5
    inner: Any = None


@config
class Cfg:
    opt: Opt = Opt()
    optimizer: Any = lazy(optax.adamw)(ref("opt.rate"), b1=0.9)
    boxes: tuple[Any, ...] = (lazy(Box)(1.0), lazy(Box)(ref("boxes[0]")), ref("boxes[-2]"))
    weights: dict[str, float] = field(default_factory=lambda: {"ce": 0.25})
    copy: float = ref("weights.ce")
    width: int = 3


def calls(built):
    return lambda other: (built.value, other)


def branch(rate, other=1.0):
    return 1 if rate > 0 else 2


def failing(rate=0.5):
    raise ZeroDivisionError("user's own words")


def test_on_the_host_floats_are_pythons():
    assert resolve(lazy(Box)(0.1)).value == 0.1
    assert type(resolve(lazy(Box)(0.1)).value) is float
    assert resolve(Cfg()).copy == 0.25
    assert resolve({"a": (1, lazy(Box)(2.0)), "b": "x"})["a"][1].value == 2.0
    assert resolve(3) == 3
    assert resolve(lazy(jax.nn.relu)) is jax.nn.relu


def test_configs_come_back_as_configs_with_built_children():
    built = resolve(Opt(0.5, lazy(Box)(Opt(0.7, lazy(Box)("deep")))))
    assert type(built) is Opt
    assert built.inner.value.inner.value == "deep"
    plain = Opt(0.5)
    assert resolve(plain) is plain


def test_calls_of_calls():
    assert resolve(lazy(functools.partial)(max, 3)(4)) == 4
    assert resolve(lazy(calls)(lazy(Box)(1))(other=2)) == (1, 2)


def test_a_pin_has_the_value_of_a_leaf():
    assert resolve(lazy(Box)(pin(0.1))).value == float(np.float32(0.1))
    assert type(resolve(lazy(Box)(pin(0.1))).value) is float
    assert not named_leaves(lazy(Box)(pin(0.1)))


def check_weak(value):
    assert isinstance(value, jax.core.Tracer)
    assert is_weak(value)
    assert (value * jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16
    return value


def test_inside_a_trace_floats_are_weak():
    def f(cfg):
        built = resolve(cfg)
        values = (built.opt.rate, built.boxes[0].value, built.weights["ce"], built.copy)
        return sum(map(check_weak, values)) * built.width

    cfg = Cfg()
    assert jax.jit(f)(cfg) == 6.0
    assert eqx.filter_jit(f)(cfg) == 6.0
    assert jax.vmap(f)(jax.tree.map(lambda x: jnp.stack([x, x]), cfg)).tolist() == [6.0, 6.0]
    gradient = eqx.filter_grad(f)(cfg)
    assert (gradient.opt.rate, gradient.weights["ce"]) == (3.0, 6.0)  # read twice: itself and by reference
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), cfg)
    assert lax.scan(lambda total, one: (total + f(one), None), 0.0, stacked)[0] == 12.0


def test_bf16_state_stays_bf16_and_scans():
    cfg = lazy(optax.adamw)(1e-3, b1=0.9, b2=0.999, weight_decay=0.1)
    params = jnp.ones(3, jnp.bfloat16)

    @jax.jit
    def run(cfg, params):
        optimizer = resolve(cfg)

        def body(carry, _):
            params, state = carry
            updates, state = optimizer.update(params, state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(body, (params, optimizer.init(params)), length=3)[0]

    params, state = run(cfg, params)
    assert params.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"bfloat16", "int32"}


def test_the_same_numbers_as_plain_optax():
    cfg = lazy(optax.sgd)(0.1, momentum=0.9)
    params = jnp.arange(3.0)

    def updates(optimizer):
        return optimizer.update(params, optimizer.init(params), params)[0]

    constants = optax.sgd(float(np.float32(0.1)), momentum=float(np.float32(0.9)))
    wanted = jax.jit(lambda p: updates(constants))(params)
    assert jax.jit(lambda c: updates(resolve(c)))(cfg).tolist() == wanted.tolist()


def test_a_reference_is_one_leaf_with_two_readers():
    cfg = Cfg()
    assert "optimizer.learning_rate" not in named_leaves(cfg)
    built = resolve(override(cfg, {"weights.ce": 0.75}))
    assert built.copy == 0.75
    seen = []
    Resolver(cfg, seen=lambda path, value: seen.append(path)).build(cfg, ())
    assert seen == []  # on the host there are no arrays
    device = jax.tree.map(lambda x: x, cfg)
    Resolver(device, seen=lambda path, value: seen.append(path)).build(device.optimizer, ("optimizer",))
    assert set(seen) == {"opt.rate", "optimizer.b1"}


def test_a_node_that_is_referred_to_is_built_once():
    built = resolve(Cfg())
    assert built.boxes[1].value is built.boxes[0]
    assert built.boxes[1] is built.boxes[2]
    assert resolve(lazy(Box)(ref("shared"), ref("shared")), root={"shared": lazy(Box)()}).value is not None
    both = resolve(lazy(Box)(ref("shared"), ref("shared")), root={"shared": lazy(Box)()})
    assert both.value is both.other
    assert resolve(Cfg()).boxes[0] is not built.boxes[0]


def test_references_that_lead_nowhere_or_in_a_circle(snapshot):
    messages = []
    for cfg in (
        {"a": lazy(Box)(ref("b.learning_rat")), "b": {"learning_rate": 1.0}},
        {"a": ref("b"), "b": ref("a")},
        {"a": lazy(Box)(lazy(Box)(ref("a")))},
        {"a": {"b": ref("a")}},
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(cfg)
        messages.append(str(caught.value))
    snapshot("references", "\n".join(messages))


def test_all_wrong_references_are_reported_together(snapshot):
    cfg = {
        "a": lazy(Box)(ref("nowhere")),
        "b": ref("c"),
        "c": (1, ref("b")),
        "d": Opt(ref("e.x")),
        "e": {"y": 1.0},
        "f": ref("e.y"),
    }
    with pytest.raises(ConfigError) as caught:
        check_references(cfg)
    snapshot("all_references", str(caught.value))
    check_references(Cfg())


def test_a_part_is_resolved_in_its_root():
    cfg = Cfg()
    state = resolve(cfg.optimizer, root=cfg, path="optimizer").init(jnp.ones(2))
    assert len(jax.tree.leaves(state)) == 3
    with pytest.raises(ConfigError, match=r"opt\.rate"):
        resolve(cfg.optimizer)


def key_data(model):
    return {path: np.asarray(leaf).tobytes() for path, leaf in named_leaves(model).items() if eqx.is_array(leaf)}


def layers(*widths):
    return lazy(dict)(**{f"layer{i}": lazy(eqx.nn.Linear)(4, w) for i, w in enumerate(widths)})


def test_each_node_has_a_key_of_its_own_folded_from_its_path():
    key = jax.random.key(0)
    two, three = resolve(layers(4, 4), key=key), resolve(layers(4, 4, 4), key=key)
    assert key_data(two["layer0"]) != key_data(two["layer1"])
    assert key_data(three["layer0"]) == key_data(two["layer0"])
    assert key_data(three["layer1"]) == key_data(two["layer1"])
    assert key_data(resolve(layers(4, 4), key=key)) == key_data(two)
    assert key_data(resolve(layers(4, 4), key=jax.random.key(1))) != key_data(two)
    below = {"model": layers(4, 4), "other": 1}
    assert key_data(resolve(below["model"], key=key, root=below, path="model")) == key_data(two)
    jitted = eqx.filter_jit(lambda key: resolve(layers(4, 4), key=key))(key)
    for one, other in zip(jax.tree.leaves(jitted), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_missing_key_is_an_error(snapshot):
    with pytest.raises(ConfigError) as caught:
        resolve({"model": layers(4)})
    snapshot("no_key", str(caught.value))


def test_an_exception_keeps_its_type_and_gains_a_note(snapshot):
    line = inspect.currentframe().f_lineno + 1
    cfg = {"a": (lazy(Box)(lazy(failing)(0.25)),)}
    with pytest.raises(ZeroDivisionError, match="user's own words") as caught:
        resolve(cfg)
    assert f"{__file__}:{line}" in caught.value.__notes__[0]
    assert len(caught.value.__notes__) == 1
    assert any(entry.name == "failing" for entry in caught.traceback)
    snapshot("note", caught.value.__notes__[0])


def test_python_control_flow_gains_the_pin(snapshot):
    cfg = {"schedule": lazy(Box)(lazy(branch)(0.5, other=2.0))}
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.jit(lambda leaves: resolve(jax.tree.unflatten(jax.tree.structure(cfg), leaves)))(jax.tree.leaves(cfg))
    assert any(entry.name == "branch" for entry in caught.traceback)
    snapshot("pin_hint", "\n".join(note for note in caught.value.__notes__ if "JAX has removed" not in note))
    pinned = override(cfg, {"schedule.value.rate": pin(0.5)})
    assert jax.jit(lambda cfg: resolve(cfg)["schedule"].value)(pinned) == 1


def test_a_resolved_float_can_be_differentiated_through_optax():
    params = jnp.arange(1.0, 4.0)

    def loss(cfg):
        optimizer = resolve(cfg)
        updates, _ = optimizer.update(2 * params, optimizer.init(params), params)
        return jnp.sum((params + updates) ** 2)

    gradient = jax.grad(loss)(lazy(optax.sgd)(0.25))
    assert host(gradient).learning_rate == pytest.approx(float(-2 * jnp.sum((params - 0.5 * params) * 2 * params)))


@config
class Fields:
    n: int = 3
    rate: float = 0.5
    name: str = "a"
    rates: tuple[float, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    steps: int = field(dynamic=True, default=4)
    anything: Any = None


def counted(n: int, rate: float = 0.5):
    return n, rate


REFERRED = [
    {"cfg": Fields(n=ref("cfg.rate"))},
    {"cfg": Fields(rate=ref("cfg.name"))},
    {"cfg": Fields(rates=(0.5, ref("cfg.name")))},
    {"cfg": Fields(weights={"a": ref("cfg.name")})},
    {"cfg": Fields(steps=ref("cfg.rate"))},
    {"cfg": Fields(), "node": lazy(counted)(ref("cfg.rate"))},
    {"cfg": Fields(), "node": lazy(counted)(1, ref("cfg.name"))},
]


def test_what_a_reference_leads_to_must_fit_its_reader(snapshot):
    messages = []
    for cfg in REFERRED:
        with pytest.raises(ConfigError) as caught:
            resolve(cfg)
        messages.append(str(caught.value))
        with pytest.raises(ConfigError, match="leads to a value of the wrong kind"):
            jax.jit(lambda cfg: jnp.zeros(()) if resolve(cfg) else None)(cfg)
    snapshot("referred_kinds", "\n".join(messages))


def test_an_int_that_a_float_refers_to_is_a_float():
    built = resolve(
        {
            "cfg": Fields(rate=ref("cfg.n"), rates=(ref("cfg.n"),), weights={"a": ref("cfg.steps")}),
            "node": lazy(counted)(ref("cfg.n"), ref("cfg.n")),
            "made": Fields(anything=ref("node")),
        }
    )
    assert repr((built["cfg"].rate, built["cfg"].rates, built["cfg"].weights)) == "(3.0, (3.0,), {'a': 4.0})"
    assert repr(built["node"]) == "(3, 3.0)"
    assert built["made"].anything is built["node"]


def test_an_int_leaf_that_a_float_refers_to_is_a_weak_float_in_a_trace():
    cfg = {"fields": Fields(rate=ref("fields.steps"))}
    seen = []
    out = jax.jit(lambda cfg: seen.append(resolve(cfg)["fields"].rate) or seen[0] * jnp.ones((), jnp.bfloat16))(cfg)
    assert (seen[0].dtype, seen[0].weak_type, out.dtype) == (jnp.float32, True, jnp.bfloat16)
    assert out == cfg["fields"].steps


def formatted(rate, other=1.0):
    return f"{rate:.3f}", other


def keyed(rate, other=1.0):
    return {rate: other}


def shaped(rate, other=1.0):
    return jnp.zeros((rate,)), other


def late(rates, other=1.0):
    return bool(rates[1]["a"] > 0)


def notes(cfg):
    with pytest.raises((TypeError, jax.errors.ConcretizationTypeError)) as caught:
        jax.jit(lambda cfg: (resolve(cfg), 1)[1])(cfg)
    return "\n".join(note for note in caught.value.__notes__ if note.startswith("while resolving"))


@pytest.mark.parametrize("function", [formatted, keyed, branch])
def test_only_the_guilty_floats_are_named(function):
    assert "{'a.rate': ek.pin(...)}" in notes({"a": lazy(function)(0.5, other=0.25)})
    assert "{'b': ek.pin(...)}" in notes({"a": lazy(function)(ref("c"), other=0.25), "b": 0.5, "c": ref("b")})


def test_floats_inside_containers_are_named_by_their_paths():
    assert "{'a.rates[1].a': ek.pin(...)}" in notes({"a": lazy(late)((0.5, {"a": 0.5}))})


def test_what_a_pin_would_not_mend_is_not_advised():
    assert "pin" not in notes({"a": lazy(shaped)(0.5)})  # no float is a shape
