"""Nodes: calls written down, checked where they are written, equal by what they say, and never changed in place."""

import copy
import enum
import functools
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NewType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beartype import beartype

from equikd.config import Node, config, diff, from_json, host, lazy, override, pin, ref, resolve, to_json
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
    assert list(node.tree_items().items()) == [(0, 1), ("b", 2), ("z", 3), ("c", 0.5)]
    assert node == lazy(anything)(1, z=3, b=2, c=0.5)


def ordered(a, **rest):
    return list(rest)


@pytest.mark.parametrize("function", [dict, ordered])
def test_keywords_that_the_signature_does_not_name_keep_their_order(function):
    one, two = lazy(function)(a=1.0, zz=0.5, bb="x"), lazy(function)(a=1.0, bb="x", zz=0.5)
    assert list(resolve(one)) == [name for name in ("a", "zz", "bb") if function is dict or name != "a"]
    assert one != two
    assert jax.tree.structure(one) != jax.tree.structure(two)
    assert list(resolve(from_json(to_json(one)))) == list(resolve(one)) == list(resolve(override(one, {"zz": 0.25})))
    assert str(diff(one, two)) != ""
    assert lazy(ordered)(zz=1, a=2) == lazy(ordered)(a=2, zz=1)
    names = jax.jit(lambda node: jnp.array([name == "zz" for name in resolve(node)]))
    assert names(one).tolist() != names(two).tolist()


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
    assert pin(pin(0.5)) == pin(jnp.float32(0.5)) == pin(np.float32(0.5)) == pin(0.5)
    assert type(pin(jnp.float32(0.5)).value) is float
    for wrong in (lazy(dict)(), True, jnp.ones(2), None):
        raised(lambda wrong=wrong: pin(wrong))
    with pytest.raises(ConfigError, match="a traced value"):
        jax.jit(pin)(0.5)
    snapshot("wrong_pin", raised(lambda: pin("fast")) + "\n" + raised(lambda: pin(ref("a"))))
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


@config
class Line:
    rate: float = 0.5

    def __call__(self, count):
        return self.rate * count

    def method(self, count):
        return count


class Undecorated(Opt):
    other: float = 1.0


def test_a_call_of_a_config_class_is_the_config():
    assert type(lazy(Opt)(rate=1)) is Opt
    assert lazy(Opt)(0.3) == Opt(0.3) == from_json(to_json(lazy(Opt)(0.3)))
    assert repr(lazy(Opt)) == f"lazy({__name__}:Opt)"
    assert lazy(dict)(kind=lazy(Opt)).kind is Opt
    part = lazy.partial(Opt)(rate=1)
    assert (type(part), type(part.rate), resolve(part)()) == (Node, float, Opt(1.0))
    assert from_json(to_json(part)) == part
    assert "no field 'rat'" in raised(lambda: lazy(Opt)(rat=0.1))
    assert "decorate Undecorated" in raised(lambda: lazy(Undecorated)(0.1))


class Unhashable:
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, x):
        return x


def test_what_lazy_does_not_take(snapshot):
    calls = [
        lambda: lazy(Line())(3),
        lambda: lazy(Line().method),
        lambda: lazy.partial(Line()),
        lambda: lazy(Unhashable())(1),
        lambda: lazy.partial(Unhashable()),
        lambda: lazy(functools.partial)(Unhashable(), 1),
    ]
    snapshot("not_lazy", "\n".join(map(raised, calls)))


def rows(betas: tuple[float, float], by_name: "dict[str, float] | None" = None, *, sizes: Sequence[float] = ()):
    return betas, by_name, sizes


def by_default(betas=(0.9, 0.99)):
    return betas


def test_ints_in_containers_are_floats_where_the_signature_has_floats():
    node = lazy(rows)((1, 0), {"a": 1}, sizes=(1, 2, 3))
    assert len(jax.tree.leaves(node)) == 6
    assert repr(node.betas) == "(1.0, 0.0)"
    assert repr(lazy(by_default)((1, 0)).betas) == "(1.0, 0.0)"
    assert repr(lazy(integers)(sizes=(1, 2)).sizes) == "(1, 2)"
    assert repr(lazy(dict)(a=(1, 0)).a) == "(1, 0)"


class Way(enum.Enum):
    up = 1


def integers(n: int = 1, sizes: tuple[int, ...] = (), on: bool = False, act: Callable = abs, way: Way | None = None):
    return n, sizes, on, act, way


def loose_integers(n: int = None, array: "int | jax.Array" = 1, kind: type = int):  # noqa: RUF013
    return n, array, kind


def positional(x: float, /, *rest: float, **more: float):
    return x, rest, more


def test_places_without_a_name_have_a_role_too():
    node = lazy(positional)(1, 2, 3, a=4)
    assert len(jax.tree.leaves(node)) == 4
    assert len(jax.tree.leaves(override(node, {"[0]": 5, "[2]": 6, "a": 7}))) == 4
    for call in (lambda: lazy(positional)("x"), lambda: lazy(positional)(1, "x"), lambda: lazy(positional)(1, a="x")):
        assert "expected: float" in raised(call)
    with pytest.raises(ConfigError, match="expected: float"):
        override(node, {"[1]": "x"})
    part = lazy.partial(positional)(1)
    assert len(jax.tree.leaves(override(part, {"[1]": 2}))) == 1


def test_wrong_kinds_of_static_arguments(snapshot):
    calls = [
        lambda: lazy(integers)(1.5),
        lambda: lazy(integers)(100.0),
        lambda: lazy(integers)("x"),
        lambda: lazy(integers)(None),
        lambda: lazy(integers)(sizes=(1, "x")),
        lambda: lazy(integers)(sizes=3),
        lambda: lazy(integers)(on="no"),
        lambda: lazy(integers)(act="relu"),
        lambda: lazy(integers)(way="up"),
        lambda: lazy(eqx.nn.MLP)("scaler", 2, 8, 2, activation="relu"),
        lambda: lazy(optax.sgd)(0.1, nesterov="no"),
        lambda: override(lazy(integers)(), {"n": 1.5}),
        lambda: override(lazy(integers)(way=Way.up), {"way": 3}),
    ]
    snapshot("static_kinds", "\n".join(map(raised, calls)))


def test_kinds_that_pass():
    lazy(integers)(True, (True, 2), act=lazy(jax.nn.relu), way=None)
    lazy(integers)(ref("a"), ref("b"), act=lazy(dict)(), way=ref("c"))
    lazy(integers)(act=Line(), way=Way.up)
    lazy(eqx.nn.MLP)("scalar", 2, 8, 2)
    lazy(loose_integers)("x", 0.5, "y")  # its default does not fit, and classes are not checked


def inner(x, y=2.0):
    return x, y


@functools.wraps(inner)
def takes_others(*, extra: float, x=1):
    return extra, x


@functools.wraps(inner)
def hands_over(*args, **kwargs):
    return inner(*args, **kwargs)


@functools.wraps(inner)
def takes_more(x, *args, extra: int = 3, **kwargs):
    return inner(x, *args, **kwargs), extra


@functools.wraps(inner)
def hands_over_but_one(x, *args, **kwargs):
    return inner(x, *args, **kwargs)


def test_the_parameters_of_a_wrapper_are_its_own():
    assert resolve(lazy(takes_others)(extra=1.0)) == (1.0, 1)
    assert lazy(hands_over)(1, 2) == lazy(hands_over)(x=1, y=2.0)
    for function in (hands_over, hands_over_but_one, beartype(inner), jax.jit(inner), eqx.filter_jit(inner)):
        assert "no argument 'z'" in raised(lambda function=function: lazy(function)(z=1))
        assert lazy(function)(1, 2).tree_items() == {"x": 1, "y": 2.0}
    assert resolve(lazy(takes_more)(1, y=3.0, extra=4)) == ((1, 3.0), 4)
    assert "no argument 'y'" in raised(lambda: lazy(takes_others)(extra=1, y=1))


def test_a_key_is_not_written(snapshot):
    snapshot("key_by_position", raised(lambda: lazy(jax.random.normal)((3,))))
    assert resolve(lazy(jax.random.normal)(shape=(3,)), key=jax.random.key(0)).shape == (3,)


def test_dicts_have_texts_as_keys(snapshot):
    calls = [lambda: lazy(optax.piecewise_constant_schedule)(1.0, {10: 0.5}), lambda: lazy(dict)(a={1: 2})]
    snapshot("dict_keys", "\n".join(map(raised, calls)))


def own_names(map, tree_items, tree_replace, tree_accepts, _where, _function=0.5):
    return map, tree_items, tree_replace, tree_accepts, _where, _function


def test_arguments_may_be_named_like_methods_of_a_node():
    node = lazy(own_names)(1, 2, 3, 4, 5)
    assert (node.map, node.tree_items, node.tree_replace, node.tree_accepts, node._where) == (1, 2, 3, 4, 5)
    assert get(node, "tree_items") == 2
    edited = override(node, {"map": 6, "tree_replace": 7})
    assert (edited.map, edited.tree_replace) == (6, 7)
    assert from_json(to_json(node)) == node == pickle.loads(pickle.dumps(node))
    assert list(Node.tree_items(node)) == ["map", "tree_items", "tree_replace", "tree_accepts", "_where"]


def test_python_floats_that_a_tree_operation_makes_are_strong_leaves():
    for node in (lazy(strict)(0.5), lazy(dict)(a=(0.5, {"b": 0.5}), b=lazy(dict)(c=0.5))):
        mapped = jax.tree.map(lambda leaf: 0.25, node)
        leaves = jax.tree.leaves(mapped)
        assert [(float(leaf), leaf.weak_type, leaf.dtype.name) for leaf in leaves] == [(0.25, False, "float32")] * len(
            jax.tree.leaves(node)
        )
        assert jax.tree.structure(mapped) == jax.tree.structure(node)
        assert repr(mapped).count("0.25") == len(leaves)  # as it was given
    moved = eqx.tree_at(lambda node: node.rate, lazy(strict)(0.5, both=0.5), 0.25)
    assert not jax.tree.leaves(moved)[0].weak_type
    holes = jax.tree.map(lambda leaf: None if leaf == 0.5 else 0.25, lazy(strict)(0.5, both=1.0))
    assert [float(leaf) for leaf in jax.tree.leaves(holes)] == [0.25]
    assert jax.tree.leaves(holes, is_leaf=lambda leaf: leaf is None)[0] is None


def test_a_node_outlives_its_donation():
    node = lazy(strict)(0.5, both=0.25)
    doubled = jax.jit(lambda node: jax.tree.map(lambda leaf: 2 * leaf, node), donate_argnums=0)
    assert host(doubled(node)).rate == host(doubled(node)).rate == 1.0
    assert [float(leaf) for leaf in jax.tree.leaves(node)] == [0.5, 0.25]


Rate = NewType("Rate", float)


def test_a_new_type_of_float_is_a_float():
    def function(x: Rate, y: Annotated[Rate, "y"] = Rate(1.0)):
        return x, y

    assert [leaf.item() for leaf in jax.tree.leaves(lazy(function)(3, 2))] == [3.0, 2.0]
