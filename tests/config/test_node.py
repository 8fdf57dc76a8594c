"""Nodes: calls written down, checked where they are written, equal by what they say, and never changed in place."""

import copy
import pickle
import sys
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from equikd.config import Node, config, from_json, lazy, override, pin, ref, resolve, to_json
from equikd.config._node import parts
from equikd.errors import ConfigError
from equikd.tree import PathError, get


def stack(first, *rest, scale=1.0):
    return (first, rest, scale)


def anything(a, /, b, **options):
    return (a, b, options)


def strict(rate: float, name: str = "x", count: int = 3, mixed: "int | float" = 1, both=0.5):
    return (rate, name, count, mixed, both)


def undefined(rate: float, other: "NoSuchName" = None):  # noqa: F821
    return rate


def maker(width: int):
    def inner(depth: int, rate: float = 0.1):
        return (width, depth, rate)

    return inner


@config
class Opt:
    rate: float = 0.1


def raised(function) -> str:
    with pytest.raises(ConfigError) as caught:
        function()
    return str(caught.value)


def test_arguments_have_names_however_they_were_written():
    named = lazy(optax.adamw)(learning_rate=1e-3, b1=0.8)
    assert named == lazy(optax.adamw)(1e-3, 0.8) == lazy(optax).adamw(1e-3, b1=0.8)
    assert (named.learning_rate, named["b1"], get(named, "b1")) == (1e-3, 0.8, 0.8)
    assert repr(named) == "optax.adamw(learning_rate=0.001, b1=0.8)"
    assert lazy(optax.adamw)(b1=0.8, learning_rate=1e-3) == named
    assert hash(lazy(optax.adamw)(b1=0.8, learning_rate=1e-3)) == hash(named)


def test_positions_where_the_signature_has_no_names():
    chain = lazy(optax.chain)(lazy(optax.clip)(1.0), lazy(optax.sgd)(0.1))
    assert repr(chain) == "optax.chain(optax.clip(max_delta=1.0), optax.sgd(learning_rate=0.1))"
    assert chain[1].learning_rate == chain[-1].learning_rate == get(chain, "[1].learning_rate") == 0.1
    assert list(chain) == [chain[0], chain[1]]
    node = lazy(stack)(1, 2, 3, scale=2)
    assert node.tree_items() == {0: 1, 1: 2, 2: 3, "scale": 2.0}
    assert lazy(stack)(first=1).tree_items() == {"first": 1}
    with pytest.raises(IndexError, match="without an argument"):
        chain[2]


def test_positional_only_and_extra_keywords():
    node = lazy(anything)(1, 2, z=3, c=0.5)
    assert node.tree_items() == {0: 1, "b": 2, "c": 0.5, "z": 3}
    assert node == lazy(anything)(1, b=2, c=0.5, z=3)
    assert lazy(dict)(b=1, a=2) == lazy(dict)(a=2, b=1)


def test_a_call_of_a_call():
    node = lazy(maker)(8)(depth=2)
    assert repr(node) == "tests.config.test_node.maker(width=8)(depth=2)"
    assert get(node, "__call__.width") == 8
    assert len(jax.tree.leaves(lazy(maker)(8)(0.5))) == 1
    assert override(node, {"__call__.width": 16, "depth": 3}) == lazy(maker)(16)(depth=3)
    assert node != lazy(maker)(9)(depth=2)


def test_an_uncalled_lazy_is_a_name():
    one = lazy(eqx.nn.MLP)(2, 2, 8, 2, activation=lazy(jax.nn.relu))
    two = lazy(eqx.nn.MLP)(2, 2, 8, 2, activation=jax.nn.relu)
    assert one == two == lazy(eqx.nn.MLP)(2, 2, 8, 2, activation=lazy(jax.nn).relu)
    assert one.activation is jax.nn.relu
    assert repr(lazy(jax.nn).relu) == "lazy(jax.nn:relu)"
    assert repr(lazy(jax.nn)) == "lazy(jax.nn)"
    assert lazy(lazy(optax.sgd))(0.1) == lazy(optax.sgd)(0.1)
    assert lazy(one) is one
    assert "adamw" in dir(lazy(optax))
    assert repr(pickle.loads(pickle.dumps(lazy(optax.adamw)))) == "lazy(optax:adamw)"


def test_roles_are_fixed_when_written():
    node = lazy(strict)(1, count=3, mixed=1, both=1)
    assert repr(node) == f"{__name__}.strict(rate=1.0, count=3, mixed=1.0, both=1.0)"
    assert len(jax.tree.leaves(node)) == 3
    assert lazy(undefined)(1).rate == 1.0
    assert lazy(optax.adamw)(1).learning_rate == 1.0
    assert lazy(eqx.nn.MLP)(2, 2, 8, 2).width_size == 8
    betas = lazy(dict)(betas=(0.9, (1, 0.5)), weights={"a": 0.1, "b": "x"})
    assert len(jax.tree.leaves(betas)) == 3
    assert len(jax.tree.leaves(lazy(strict)(pin(0.1), mixed=ref("rate")))) == 0
    assert type(lazy(strict)(np.float32(0.1)).rate) is float
    assert lazy(strict)(Opt()).rate == Opt()


def test_a_wrong_call_is_an_error_at_the_line_that_wrote_it(snapshot):
    line = sys._getframe().f_lineno + 1
    text = raised(lambda: lazy(optax.adamw)(learning_rat=1e-3))
    assert f"{__file__}:{line}" in text
    snapshot("unknown_argument", text)
    snapshot("missing_argument", raised(lambda: lazy(optax.adamw)(b1=0.9)))
    snapshot("too_many", raised(lambda: lazy(maker)(1, 2)))
    snapshot("twice", raised(lambda: lazy(maker)(1, width=2)))
    snapshot("unknown_attribute", raised(lambda: lazy(optax).adamww))
    snapshot("not_callable", raised(lambda: lazy(3)))
    snapshot("module_called", raised(lambda: lazy(optax)(3)))
    snapshot("odd_name", raised(lambda: lazy(dict)(__qualname__=1)))


def rates(a: float | str = 0.1, b: float | Literal["auto"] = 0.1, c: Any = 0.1, d: "Unknown" = 0.1):  # noqa: F821
    return a, b, c, d


def test_a_text_stands_where_the_annotation_has_room_for_it():
    assert lazy(rates)("a", "auto", "c", "d").d == "d"


def test_wrong_values_are_reported_together(snapshot):
    text = raised(lambda: lazy(optax.chain)(optax.adam(1e-3), lazy(optax.clip)(1.0), [1], jnp.ones(2)))
    snapshot("built_arguments", text)
    snapshot("wrong_kinds", raised(lambda: lazy(strict)(True, name=1)) + "\n" + raised(lambda: lazy(strict)("fast")))
    snapshot("text_for_a_number", raised(lambda: lazy(optax.adamw)("3e-4", b1="0.9", mu_dtype="bfloat16")))
    snapshot("key_argument", raised(lambda: lazy(eqx.nn.Linear)(2, 2, key=jax.random.key(0))))
    assert "strict.rate" in raised(lambda: lazy(strict)(1e39))
    assert "dict.a[0]['b']" in raised(lambda: lazy(dict)(a=({"b": [1]},)))


def test_a_node_is_immutable(snapshot):
    node = lazy(optax.sgd)(0.1)
    with pytest.raises(AttributeError) as caught:
        node.learning_rate = 0.2
    snapshot("immutable", str(caught.value))
    with pytest.raises(AttributeError) as caught:
        node.learning_rat  # noqa: B018
    snapshot("unknown_attribute_of_a_node", str(caught.value))
    assert node.learning_rate == 0.1
    arguments = {"b": 1}
    held = lazy(dict)(a=arguments)
    arguments["b"] = 2
    assert held.a == {"b": 1}


def test_equality_is_typed_and_names_the_function():
    assert lazy(dict)(a=1) != lazy(dict)(a=True)
    assert lazy(dict)(a=0.0) != lazy(dict)(a=-0.0)
    assert lazy(dict)(a=float("nan")) == lazy(dict)(a=float("nan"))
    assert lazy(optax.sgd)(0.1) != lazy(optax.adam)(0.1)
    assert jax.tree.structure(lazy(dict)(a=1)) != jax.tree.structure(lazy(dict)(a=True))
    assert jax.tree.structure(lazy(optax.sgd)(0.1)) != jax.tree.structure(lazy(optax.adam)(0.1))
    assert jax.tree.structure(lazy(optax.sgd)(0.1)) == jax.tree.structure(lazy(optax.sgd)(0.2))
    assert lazy(optax.sgd)(0.1) != "sgd"


@pytest.mark.parametrize("number", range(3))
def test_copies_are_equal(number):
    node = [
        lazy(eqx.nn.MLP)(2, 2, 8, 2, activation=jax.nn.relu),
        lazy(maker)(8)(depth=2),
        lazy(optax.chain)(lazy(optax.clip)(1.0), lazy(dict)(a=Opt(0.3), b=ref("x"))),
    ][number]
    jax.tree.leaves(node)
    for twin in (copy.copy(node), copy.deepcopy(node), pickle.loads(pickle.dumps(node))):
        assert twin == node
        assert hash(twin) == hash(node)
        assert parts(twin)[2] == parts(node)[2] != ""
        assert jax.tree.structure(twin) == jax.tree.structure(node)


def test_lambdas_and_locals_work_in_process():
    def local(rate):
        return rate

    node = lazy(lambda rate: rate)(0.1)
    assert node.rate == 0.1
    assert node == node.map(lambda part: part)
    assert lazy(local)(0.1) == lazy(local)(0.1)
    assert copy.deepcopy(node) == node


def test_a_mapped_node_keeps_its_structure():
    node = lazy(strict)(0.5, "y", both=2)
    doubled = jax.tree.map(lambda x: 2 * x, node)
    assert type(doubled) is Node
    assert (float(doubled.rate), doubled.name, float(doubled.both)) == (1.0, "y", 4.0)
    assert list(doubled.tree_items()) == list(node.tree_items())
    assert jax.tree.structure(doubled) == jax.tree.structure(node)


def test_edits_keep_the_order_of_the_signature():
    edited = override(lazy(optax.adamw)(1e-3, weight_decay=0.1), {"b1": 0.5})
    written = lazy(optax.adamw)(1e-3, 0.5, weight_decay=0.1)
    assert edited == written
    assert jax.tree.structure(edited) == jax.tree.structure(written)
    assert edited.tree_accepts("b2")
    assert not edited.tree_accepts("b1x")
    for name in ("first", "rest", "args", 0):
        assert not lazy(stack)(1).tree_accepts(name) or name == "first"
    assert not lazy(anything)(1, 2).tree_accepts("options")


def test_pins_and_references(snapshot):
    assert pin(1) == pin(1.0) != pin(2.0)
    assert (repr(pin(0.5)), repr(ref("a.b"))) == ("pin(0.5)", "ref('a.b')")
    assert ref("a") != ref("b")
    assert len({pin(0.5), pin(0.5), ref("a"), ref("a")}) == 2
    snapshot("wrong_pin", raised(lambda: pin("fast")))
    snapshot("wrong_ref", raised(lambda: ref("")) + "\n" + raised(lambda: ref("a.*")) + "\n" + raised(lambda: ref(3)))
    with pytest.raises(PathError):
        ref("a..b")


def test_partial_keeps_what_is_given_and_checks_it(snapshot):
    node = lazy.partial(optax.adamw)(b1=1, weight_decay=0.5)
    assert node.b1 == 1.0
    assert type(node.b1) is float
    assert from_json(to_json(node)) == node
    assert override(node, {"learning_rate": 1}).learning_rate == 1.0
    linear = resolve(lazy.partial(eqx.nn.Linear)(3))(2, key=jax.random.key(0))
    assert (linear.in_features, linear.out_features) == (3, 2)
    with pytest.raises(ConfigError) as error:
        lazy.partial(optax.adamw)(learning_rat=1e-3, b1=0.9)
    snapshot("partial_unknown_argument", str(error.value))
    with pytest.raises(ConfigError, match="nothing"):
        override(node, {"nothing": 1.0})


def test_none_stands_only_where_the_signature_has_it(snapshot):
    assert lazy(optax.sgd)(0.1, momentum=None).momentum is None
    with pytest.raises(ConfigError) as error:
        lazy(optax.adamw)(None)
    snapshot("none_for_a_float", str(error.value))
    with pytest.raises(ConfigError, match="wrong kind of value"):
        override(lazy(optax.adamw)(1e-3), {"learning_rate": None})
