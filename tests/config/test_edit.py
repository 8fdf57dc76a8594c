"""Edits: values by path, roles kept, all failures at once, and `diff` gives back what `override` was given."""

import enum
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

from equikd.config import config, diff, field, flatten, lazy, override, pin, ref, resolve, with_defaults
from equikd.config._edit import MISSING
from equikd.errors import ConfigError


class Act(enum.Enum):
    relu = 1
    gelu = 2


def loose(padding: "str | int" = "SAME", *rest, scale=1.0, **more):
    return padding, rest, scale, more


@config
class Opt:
    rate: float = 0.5
    steps: int = 10
    schedule: float | Callable = 1.0
    either: "str | int" = "auto"
    anything: Any = 3
    act: Act = Act.relu
    clip: float | None = None
    seed: int = field(dynamic=True, default=0)


def make_opt(rate: float):
    return Opt(rate)


@config
class Cfg:
    model: Any = lazy(eqx.nn.MLP)(2, 2, width_size=8, depth=2, activation=jax.nn.relu)
    optimizer: Any = lazy(optax.chain)(lazy(optax.clip)(1.0), lazy(optax.adamw)(1e-3, weight_decay=0.1))
    losses: dict[str, Opt] = field(default_factory=lambda: {"ce": Opt(), "l 2": Opt(0.25), "__x__": Opt()})
    betas: tuple[float, float] = (0.9, 0.999)
    name: str = "run"
    flag: bool = False
    again: float = ref("losses.ce.rate")
    fixed: float = pin(0.5)


def raised(changes, cfg=None) -> str:
    with pytest.raises(ConfigError) as caught:
        override(cfg or Cfg(), changes)
    return str(caught.value)


EDITS = [
    ("optimizer[1].learning_rate", 1, 1.0),
    ("optimizer[-1].learning_rate", 0.2, 0.2),
    ("optimizer[0].max_delta", np.float32(0.5), 0.5),
    ("optimizer[1].b1", 1, 1.0),
    ("optimizer[1].nesterov", True, True),
    ("optimizer[1].learning_rate", lazy(optax.constant_schedule)(0.1), lazy(optax.constant_schedule)(0.1)),
    ("optimizer[1].mask", None, None),
    ("optimizer[0]", lazy(optax.sgd)(1), lazy(optax.sgd)(1.0)),
    ("losses.ce.rate", 2, 2.0),
    ("losses['l 2'].rate", 2, 2.0),
    ("losses['__x__'].steps", np.int64(3), 3),
    ("losses.__x__.rate", 1, 1.0),
    ("losses.ce.schedule", 2, 2.0),
    ("losses.ce.schedule", jnp.sin, jnp.sin),
    ("losses.ce.either", 3, 3),
    ("losses.ce.anything", "text", "text"),
    ("losses.ce.act", Act.gelu, Act.gelu),
    ("losses.ce.clip", 1, 1.0),
    ("losses.ce.seed", 5, 5),
    ("losses.ce", lazy(make_opt)(1), lazy(make_opt)(1.0)),
    ("betas[0]", 1, 1.0),
    ("betas[-1]", 0.5, 0.5),
    ("again", 1, 1.0),
    ("fixed", 1, pin(1.0)),
    ("fixed", 0.25, pin(0.25)),
    ("model.width_size", 16, 16),
    ("model.activation", jax.nn.gelu, jax.nn.gelu),
    ("model.activation", lazy(jax.nn.gelu), jax.nn.gelu),
    ("name", "other", "other"),
    ("losses.ce.rate", pin(2), pin(2.0)),
    ("losses.ce.rate", ref("betas[0]"), ref("betas[0]")),
]


@pytest.mark.parametrize("number", range(len(EDITS)))
def test_an_override_is_what_diff_finds(number):
    path, given_value, kept = EDITS[number]
    cfg = Cfg()
    edited = override(cfg, {path: given_value})
    assert repr(cfg) == repr(Cfg())
    (difference,) = diff(cfg, edited)
    assert difference.path == path.replace("[-1]", "[1]").replace("['__x__']", ".__x__")
    assert (repr(difference.after), type(difference.after)) == (repr(kept), type(kept))
    if difference.before is not MISSING and type(difference.after) is not type(pin(1)):  # what is pinned stays pinned
        assert override(edited, {difference.path: difference.before}) == cfg


REFUSED = [
    ("optimizer[1].learning_rate", "fast"),
    ("optimizer[1].learning_rate", True),
    ("optimizer[1].b1", "fast"),
    ("optimizer[1].b1", True),
    ("optimizer[1].learning_rate", 1e39),
    ("optimizer[1].learning_rate", jnp.ones(2)),
    ("optimizer[0]", optax.clip(1.0)),
    ("model.width_size", 16.0),
    ("model.width_size", "16"),
    ("losses.ce.rate", "fast"),
    ("losses.ce.steps", 1.5),
    ("losses.ce.act", "gelu"),
    ("losses.ce", 1.0),
    ("betas", (1.0,)),
    ("betas[0]", "x"),
    ("name", 3),
    ("flag", 1),
    ("optimizer[2]", lazy(optax.sgd)(0.1)),
    ("optimizer[1].momentum", 0.9),
    ("losses.new", Opt()),
    ("losses.ce.new", 1),
    ("betas[2]", 1.0),
    ("", Cfg()),
    ("a..b", 1),
    ("**.nothing", 1),
    ("betas[0:1]", 1.0),
    ("name.x", 1),
    (1, 2),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_refused(number):
    path, value = REFUSED[number]
    raised({path: value})


def test_signatures_decide_for_nodes():
    assert override(lazy(loose)(padding="SAME"), {"padding": 3}).padding == 3
    assert override(lazy(loose)("SAME", 1), {"[1]": 2})[1] == 2
    assert override(lazy(loose)(), {"scale": 2}).scale == 2.0
    for name in ("rest", "more", "args", "kwargs", "unknown", "self"):
        raised({name: 1}, lazy(loose)())
    raised({"scale": "big"}, lazy(loose)())
    assert override(lazy(loose)(extra=1), {"extra": 2}).extra == 2


def test_globs():
    cfg = override(Cfg(), {"**.rate": 2, "losses.*.steps": 20, "optimizer[*].weight_decay": 0})
    assert [loss.rate for loss in cfg.losses.values()] == [2.0, 2.0, 2.0]
    assert [loss.steps for loss in cfg.losses.values()] == [20, 20, 20]
    assert cfg.optimizer[1].weight_decay == 0.0
    assert override(Cfg(), {"losses.l*.rate": 3}).losses["ce"].rate == 0.5


def test_plain_containers_and_order():
    cfg = {"a": (1, {"b": 0.5}), "node": lazy(optax.sgd)(0.1)}
    edited = override(cfg, {"a[1].b": 2, "node": lazy(optax.adam)(1), "node.b1": 0.5})
    assert edited == {"a": (1, {"b": 2.0}), "node": lazy(optax.adam)(1.0, 0.5)}
    assert override(cfg, {}) is cfg


def test_inside_a_trace_and_on_the_device():
    mapped = jax.tree.map(lambda x: x, Cfg())
    edited = override(mapped, {"losses.ce.rate": 2, "optimizer[1].learning_rate": 3})
    assert (edited.losses["ce"].rate, edited.optimizer[1].learning_rate) == (2.0, 3.0)
    assert jax.tree.structure(edited) == jax.tree.structure(Cfg())
    traced = jax.jit(
        lambda x: override(Cfg(), {"optimizer[1].learning_rate": x, "losses.ce.rate": x}).losses["ce"].rate * 2
    )
    assert traced(0.5) == 1.0


def test_messages(snapshot):
    snapshot("unknown_path", raised({"optimizer[1].learning_rat": 1.0}))
    snapshot("unknown_top", raised({"optimzer[1].b1": 1.0}))
    snapshot("index", raised({"optimizer[2].b1": 1.0}))
    snapshot("wrong_kind_in_a_node", raised({"optimizer[1].learning_rate": "fast"}))
    snapshot("wrong_kind_in_a_config", raised({"losses.ce.rate": "fast"}))
    snapshot("glob", raised({"**.learning_rat": 1.0}))
    snapshot("glob_of_defaults", raised({"**.b2": 0.0}))
    snapshot("alias", raised({"optimizer[1].lr": 1.0}))
    snapshot("no_argument", raised({"optimizer[1].momentum": 0.9}))
    snapshot("all_at_once", raised({"name": 3, "losses.cee.rate": 1.0, "betas": [1, 2], "a..b": 1, "model.depth": 3}))


scalars = {
    "optimizer[1].learning_rate": st.floats(-10, 10, width=32, allow_subnormal=False),
    "optimizer[1].b2": st.floats(0, 1, width=32, allow_subnormal=False),
    "losses['l 2'].rate": st.floats(-10, 10, width=32, allow_subnormal=False),
    "betas[1]": st.floats(0, 1, width=32, allow_subnormal=False),
    "losses.ce.steps": st.integers(),
    "name": st.text(),
    "flag": st.booleans(),
    "model.depth": st.integers(0, 5),
}


@given(st.fixed_dictionaries({}, optional=scalars))
def test_override_then_diff_gives_back_the_override(changes):
    before = Cfg()
    edited = override(before, changes)
    old = {**flatten(before), "optimizer[1].b2": MISSING}
    wanted = {path: value for path, value in changes.items() if repr(old[path]) != repr(value)}
    assert {path: repr(value) for path, _, value in diff(before, edited)} == {k: repr(v) for k, v in wanted.items()}
    assert diff(edited, edited) == ()
    assert override(before, {path: value for path, _, value in diff(before, edited)}) == edited


def test_diff_takes_a_replaced_subtree_once(snapshot):
    one = Cfg()
    two = override(
        one,
        {
            "model": lazy(eqx.nn.Linear)(2, 2),
            "losses.ce.rate": 2,
            "betas[1]": 0.99,
            "optimizer[1].b1": 0.8,
            "name": "x" * 100,
        },
    )
    assert [difference.path for difference in diff(one, two)] == [
        "model", "optimizer[1].b1", "losses.ce.rate", "betas[1]", "name"
    ]  # fmt: skip
    snapshot("table", str(diff(one, two)))
    assert str(diff(one, one)) == ""
    assert [d.path for d in diff({"a": 1, "b": (1, 2)}, {"b": (1, 2, 3), "c": None})] == ["a", "b[2]", "c"]
    assert diff(1, True)[0] == ("", 1, True)
    assert diff({"a": 0.0}, {"a": -0.0})[0].path == "a"
    assert diff({"a": float("nan")}, {"a": float("nan")}) == ()


def test_with_defaults_spells_out_floats_only():
    cfg = with_defaults(Cfg())
    assert repr(cfg.optimizer[1]) == (
        "optax.adamw(learning_rate=0.001, b1=0.9, b2=0.999, eps=1e-08, eps_root=0.0, weight_decay=0.1)"
    )
    assert with_defaults(cfg) == cfg
    assert cfg.optimizer[1] == lazy(optax.adamw)(1e-3, 0.9, 0.999, 1e-8, 0.0, weight_decay=0.1)
    assert with_defaults(lazy(loose)(3)).scale == 1.0
    params = jnp.ones(3)
    one, two = resolve(Cfg().optimizer), resolve(cfg.optimizer)
    grads = jnp.arange(3.0)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(
            jax.tree.leaves(one.update(grads, one.init(params), params)),
            jax.tree.leaves(two.update(grads, two.init(params), params)),
            strict=True,
        )
    )
    assert override(cfg, {"**.b2": 0.5}).optimizer[1].b2 == 0.5


def test_flatten_lists_every_value():
    flat = flatten(Cfg(losses={"l 2": Opt()}))
    assert flat["losses['l 2'].rate"] == 0.5
    assert flat["optimizer[1].weight_decay"] == 0.1
    assert flat["again"] == ref("losses.ce.rate")
    assert flat["model.activation"] is jax.nn.relu
    assert override(Cfg(losses={"l 2": Opt()}), flat) == Cfg(losses={"l 2": Opt()})
    assert flatten({"a": (), "b": {}, "c": lazy(optax.identity)()}) == {"a": (), "b": {}, "c": lazy(optax.identity)()}


def mixed(a: float = 1.0, *rest, b: float = 2.0):
    return a, rest, b


def branch(lr: float, momentum: float = 0.9):
    return lr, momentum


def betas(b, weights=None):
    return b, weights


def test_what_stands_by_position_is_not_written_by_name_too(snapshot):
    node, part = lazy(mixed)(2.0, 3.0), lazy.partial(branch)(0.5)
    assert repr(with_defaults(node)) == f"{__name__}.mixed(2.0, 3.0, b=2.0)"
    assert resolve(with_defaults(node)) == (2.0, (3.0,), 2.0)
    assert resolve(with_defaults(lazy(mixed)())) == (1.0, (), 2.0)
    assert with_defaults(part) == part
    refused = [raised({"a": 5.0}, node), raised({"lr": 0.7}, part), raised({"x.lr": 0.7}, {"x": part})]
    snapshot("by_position", "\n".join(refused))
    raised({"**.a": 5.0}, {"x": node})
    assert resolve(override(node, {"[0]": 5, "b": 6})) == (5.0, (3.0,), 6.0)
    assert resolve(override(part, {"[1]": 7, "momentum": 1}))() == (7.0, 1.0)
    assert override(part, {"momentum": 1}) == lazy.partial(branch)(0.5, momentum=1)


def test_containers_keep_the_roles_of_what_they_replace():
    node = lazy(betas)((0.9, 0.99), {"a": 0.5, "b": (0.5, 3)})
    edited = override(node, {"b": (1, 0), "weights": {"a": 1, "b": (2, 4), "c": 5}})
    assert repr(edited.b) == "(1.0, 0.0)"
    assert repr(edited.weights) == "{'a': 1.0, 'b': (2.0, 4), 'c': 5}"
    assert repr(override(node, {"b": (1, 2, 3)}).b) == "(1.0, 2.0, 3.0)"
    assert repr(override({"b": (0.9, pin(0.5))}, {"b": (1, 0)})) == "{'b': (1.0, pin(0.0))}"
    assert repr(override(node, {"b": (ref("x"), 1)}).b) == "(ref('x'), 1.0)"
    assert len(jax.tree.leaves(override(node, {"b": (1, 0)}))) == len(jax.tree.leaves(node))
    assert "expected: float" in raised({"b": ("x", 0.5)}, node)
    assert "expected: float" in raised({"weights": {"a": "x"}}, node)


def test_changes_are_a_dict_of_paths(snapshot):
    messages = []
    for wrong in ("x", None, {1: 2}, {None: 2}, [("name", "x")]):
        with pytest.raises(ConfigError) as caught:
            override(Cfg(), wrong)
        messages.append(str(caught.value))
    snapshot("no_dict", "\n".join(messages))


def test_what_is_pinned_takes_numbers_only():
    assert override({"b": pin(0.5)}, {"b": 1})["b"] == pin(1.0)
    for wrong in ("x", True):
        with pytest.raises(ConfigError, match="wrong kind of value"):
            override({"b": pin(0.5)}, {"b": wrong})
