"""Construction normalises what is meant and refuses what is not, by the annotation of the field."""

import dataclasses
import enum
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Generic, Literal, NewType, Optional, Protocol, TypeVar, Union

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from equikd.config import config, field, lazy, pin, ref, roles
from equikd.config._dataclass import plans
from equikd.config._plans import plan
from equikd.errors import ConfigError


class Act(enum.Enum):
    relu = "relu"


class Level(enum.IntEnum):
    low = 1


class Schedule(Protocol):
    def __call__(self, step: int) -> float: ...


@dataclasses.dataclass(frozen=True)
class Plain:
    a: int = 1


@config
class Child:
    rate: float = 0.1


@config
class Stranger:
    rate: float = 0.1


def holder(annotation, **options):
    """A config class with one field `x` of this annotation."""

    class Holder:
        __annotations__ = {"x": annotation}
        x = field(**options)

    Holder.__qualname__ = Holder.__name__ = "Holder"
    return config(Holder)


NODE = lazy(optax.constant_schedule)(0.5)

ROLES = [
    (float, {}, "leaf"),
    (Annotated[float, "unit"], {}, "leaf"),
    (NewType("Rate", float), {}, "leaf"),
    (NewType("Rate", float) | None, {}, "static"),
    (NewType("Rate", float) | None, {"dynamic": True}, "leaf"),
    (int, {}, "static"),
    (bool, {}, "static"),
    (str, {}, "static"),
    (bytes, {}, "static"),
    (Act, {}, "static"),
    (Literal["a", 1], {}, "static"),
    (Callable, {}, "static"),
    (Callable[[int], float], {}, "static"),
    (tuple[int, ...], {}, "static"),
    (tuple[int, str], {}, "static"),
    (float | None, {}, "static"),
    (Optional[float], {}, "static"),  # noqa: UP045
    (float | None, {"dynamic": True}, "leaf"),
    (int | None, {}, "static"),
    (float, {"static": True}, "static"),
    (int, {"dynamic": True}, "leaf"),
    (int, {"dynamic": True, "unsigned": True}, "leaf"),
    (Child, {}, "child"),
    (Child | None, {}, "child"),
    (tuple[Child, ...], {}, "child"),
    (dict[str, Child], {}, "child"),
    (dict[str, float], {}, "child"),
    (tuple[float, float], {}, "child"),
    (tuple[float, ...], {}, "child"),
    (float | Callable, {}, "child"),
    (Any, {}, "static"),
    (Plain, {}, "static"),
    (Any, {"opaque": True}, "opaque"),
]


@pytest.mark.parametrize(("annotation", "options", "role"), ROLES, ids=str)
def test_the_table_of_roles(annotation, options, role):
    assert plans(holder(annotation, **options))["x"].role == role


ACCEPTED = [
    (float, 1, 1.0),
    (float, np.float32(0.5), 0.5),
    (NewType("Rate", float), 1, 1.0),
    (NewType("Rate", float) | None, 1, 1.0),
    (float, np.int64(2), 2.0),
    (float, float("inf"), float("inf")),
    (int, np.int32(3), 3),
    (bool, np.bool_(True), True),
    (str, "a", "a"),
    (Act, Act.relu, Act.relu),
    (Literal["a", 1], 1, 1),
    (Callable, jax.nn.relu, jax.nn.relu),
    (Callable, lazy(jax.nn.relu), jax.nn.relu),
    (Callable, lazy(jax.nn).relu, jax.nn.relu),
    (Callable, NODE, NODE),
    (tuple[int, ...], (np.int64(1), 2), (1, 2)),
    (tuple[int, ...], (), ()),
    (tuple[float, ...], (1, 0.5), (1.0, 0.5)),
    (tuple[float, int], (1, 1), (1.0, 1)),
    (tuple, (1, "a"), (1, "a")),
    (dict[str, float], {"a": 1}, {"a": 1.0}),
    (dict, {"a": (1,)}, {"a": (1,)}),
    (dict[str, Child], {"a": Child(1)}, {"a": Child(1.0)}),
    (float | None, 1, 1.0),
    (float | None, None, None),
    (int | float, 1, 1),
    (int | float, 1.0, 1.0),
    (float | Callable, 1, 1.0),
    (float | Callable, jnp.sin, jnp.sin),
    (float | Callable, NODE, NODE),
    (float | Schedule, 1, 1.0),
    (float | Schedule, jnp.sin, jnp.sin),
    (float | Any, "x", "x"),
    (Union[tuple[float, float], None], (1, 2), (1.0, 2.0)),  # noqa: UP007
    (str | tuple[str, ...], ("a",), ("a",)),
    (Child | Stranger, Stranger(), Stranger()),
    (Child, NODE, NODE),
    (float, ref("a.b"), ref("a.b")),
    (float, pin(1), pin(1.0)),
    (int, ref("a"), ref("a")),
    (Any, (NODE, 1), (NODE, 1)),
    (Any, {"a": np.float32(0.5)}, {"a": 0.5}),
    (Plain, Plain(2), Plain(2)),
    (Any, pathlib.Path("a"), pathlib.Path("a")),
    (Any, jnp.bfloat16, jnp.bfloat16),
    (type, jnp.bfloat16, jnp.bfloat16),
]


@pytest.mark.parametrize("number", range(len(ACCEPTED)))
def test_what_is_meant_is_kept(number):
    annotation, given, kept = ACCEPTED[number]
    x = holder(annotation)(given).x
    assert repr(x) == repr(kept)
    assert isinstance(x, type(kept))
    assert x == kept
    jax.tree.leaves(holder(annotation)(given))


REFUSED = [
    (float, True),
    (NewType("Rate", float), True),
    (float, np.bool_(True)),
    (float, "0.1"),
    (float, None),
    (float, 1j),
    (float, (1.0,)),
    (float, jax.nn.relu),
    (float, lazy(jax.nn.relu)),
    (float, 1e39),
    (float, 2**53 + 1),
    (float, np.arange(2.0)),
    (float, jnp.int32(1)),
    (int, True),
    (int, 1.0),
    (int, "1"),
    (int, jnp.int32(1)),
    (int, np.arange(2)),
    (bool, 1),
    (str, b"a"),
    (Act, "relu"),
    (Act, Level.low),
    (Literal["a", 1], True),
    (Literal["a", 1], "b"),
    (Callable, "relu"),
    (Callable, None),
    (Callable, optax.adam(1e-3)),
    (tuple[int, ...], [1, 2]),
    (tuple[int, ...], (1, "a")),
    (tuple[int, ...], (1, True)),
    (tuple[float, float], (0.9,)),
    (tuple[float, float], [0.9, 0.999]),
    (tuple[float, float], (0.9, "a")),
    (dict[str, float], {1: 1.0}),
    (dict[str, float], {"a": "b"}),
    (dict[str, float], [("a", 1.0)]),
    (dict[str, Child], {"a": 1.0}),
    (dict[str, Child], {"a": Stranger()}),
    (float | None, "x"),
    (float | None, True),
    (float | Callable, "x"),
    (float | Callable, True),
    (float | Callable, optax.adam(1e-3)),
    (Child, Stranger()),
    (Child, 1.0),
    (Child, None),
    (Child | None, Stranger()),
    (tuple[Child, ...], (Child(), Stranger())),
    (Any, [1]),
    (Any, (1, [2])),
    (Any, {"a": {"b": jnp.ones(2)}}),
    (Any, optax.adam(1e-3)),
    (Any, lazy(optax)),
    (Plain, Plain([1])),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_by_name(number):
    annotation, given = REFUSED[number]
    with pytest.raises(ConfigError, match=r"Holder\.x"):
        holder(annotation)(given)


def test_refusals_lead_to_the_place(snapshot):
    class Built(eqx.Module):
        width: int = 3

    Holder = holder(Any)
    messages = []
    for given in ({"a": ({"b": Built()},)}, (1, [2, 3]), {"optimizer": optax.sgd(0.1)}, {"x y": np.ones(2)}):
        with pytest.raises(ConfigError) as caught:
            Holder(given)
        messages.append(str(caught.value).replace("test_refusals_lead_to_the_place.<locals>.", "").splitlines()[0])
    snapshot("nested_refusals", "\n".join(messages))


def test_a_wrong_kind_of_value(snapshot):
    messages = []
    for annotation, given in (
        (float, "fast"),
        (float | Callable[[int], float], True),
        (tuple[float, float], (1.0,)),
        (Child, Stranger()),
    ):
        with pytest.raises(ConfigError) as caught:
            holder(annotation)(given)
        messages.append(str(caught.value))
    snapshot("wrong_kind", "\n".join(messages))


@pytest.mark.parametrize(("unsigned", "low", "high"), [(False, -(2**31), 2**31 - 1), (True, 0, 2**32 - 1)])
def test_dynamic_ints_have_a_range(unsigned, low, high):
    Holder = holder(int, dynamic=True, unsigned=unsigned)
    for value in (low, high):
        (leaf,) = jax.tree.leaves(Holder(value))
        assert int(leaf) == value
    for value in (low - 1, high + 1, 1.0, True, "1"):
        with pytest.raises(ConfigError, match=r"Holder\.x"):
            Holder(value)


def test_static_floats_are_kept_as_they_are():
    Holder = holder(float, static=True)
    assert Holder(1e300).x == 1e300
    assert type(Holder(1).x) is float
    with pytest.raises(ConfigError):
        Holder("a")


def test_a_dict_is_copied():
    given = {"a": 1.0}
    held = holder(dict[str, float])(given)
    given["a"] = 2.0
    assert held.x == {"a": 1.0}


def test_the_wrong_container_is_told_with_the_right_one(snapshot):
    mapping, row = dict[str, Child], tuple[Child, ...]
    messages = []
    for annotation, given in (
        (mapping, Child()),
        (mapping, [Child()]),
        (mapping, (Child(),)),
        (mapping, {"a": [Child()]}),
        (mapping | None, [Child()]),
        (dict[str, str], ["batch.image"]),
        (dict[str, str], {"batch.image"}),
        (dict[str, float], Child()),
        (row, Child()),
        (row, {"a": Child()}),
        (row, [Child()]),
        (tuple[str, ...], ["a"]),
        (str, ["a"]),
        (int, Child()),
        (Child, {"a": 1}),
    ):
        with pytest.raises(ConfigError) as caught:
            holder(annotation)(given)
        messages.append(str(caught.value))
    snapshot("wrong_container", "\n".join(messages))


@pytest.mark.parametrize("annotation", [dict[str, Child], tuple[Child, ...], tuple[str, ...], int, Child], ids=str)
def test_references_and_nodes_stand_where_a_container_belongs(annotation):
    for value in (NODE, ref("y")):
        assert holder(annotation)(value).x is value


def test_options_that_mean_nothing_are_refused(snapshot):
    errors = []
    for annotation, options in (
        (str, {"dynamic": True}),
        (bool, {"dynamic": True}),
        (float, {"dynamic": True}),
        (int, {"unsigned": True}),
        (int, {"static": True, "dynamic": True}),
        (Any, {"opaque": True, "static": True}),
    ):
        with pytest.raises(ConfigError) as error:
            plan(annotation, **options)
        errors.append(str(error.value))
    snapshot("options", "\n".join(errors))


@pytest.mark.parametrize(
    ("annotation", "value", "leaves"),
    [
        (int | None, 3, 1),
        (int | None, None, 0),
        (dict[str, int], {"a": 3, "b": 4}, 2),
        (tuple[int | None, ...], (3, None, 4), 2),
        (tuple[float | None, ...], (0.5, None), 1),
        (dict[str, float | None], {"a": 0.5, "b": None}, 1),
    ],
)
def test_dynamic_reaches_into_containers(annotation, value, leaves):
    dynamic, plain = holder(annotation, dynamic=True)(value), holder(annotation)(value)
    assert len(jax.tree.leaves(dynamic)) == leaves
    assert jax.tree.leaves(plain) == []
    assert dynamic.x == plain.x == value


def test_ints_that_are_leaves_are_ints():
    cls = holder(int, dynamic=True)
    assert type(cls(np.array(5)).x) is int  # a numpy array could be changed in place
    assert cls(jnp.int32(5)).x == 5
    for wrong in (jnp.float32(1.5), np.array(True), np.array(2**40), 2**40, True, 1.0):
        with pytest.raises(ConfigError):
            cls(wrong)


@pytest.mark.parametrize("annotation", [int, str, bool, tuple[int, ...], Literal["a"], dict[str, int]])
def test_a_pin_stands_only_where_a_float_may(annotation):
    with pytest.raises(ConfigError, match="wrong kind of value"):
        holder(annotation)(pin(0.5))


def test_static_floats_are_exact_too():
    for cls in (holder(float, static=True), holder(float | None)):
        assert cls(3).x == 3.0
        for wrong in (2**53 + 1, 10**400):
            with pytest.raises(ConfigError, match="int"):
                cls(wrong)


@pytest.mark.parametrize(
    ("annotation", "value", "leaves"),
    [
        (Final[float], 0.5, 1),
        (Mapping[str, float], {"a": 0.5, "b": 1}, 2),
        (Sequence[float], (0.5, 1), 2),
        (tuple[float, float] | tuple[float, float, float], (1, 2, 3), 3),
    ],
)
def test_other_spellings_of_leaves(annotation, value, leaves):
    assert [type(leaf.dtype.type(0)) for leaf in jax.tree.leaves(holder(annotation)(value))] == [np.float32] * leaves


def test_a_generic_config_class_in_a_field_admits_its_own_instances_only():
    T = TypeVar("T")

    @config
    class Box(Generic[T]):
        x: T

    cls = holder(Box[float])
    assert jax.tree.leaves(cls(Box(ref("y")))) == []
    for wrong in (5, "x"):
        with pytest.raises(ConfigError):
            cls(wrong)


def test_dynamic_ints_stay_editable_after_a_tree_operation():
    cls = config(type("Two", (), {"__annotations__": {"x": int | None, "y": float}, "x": field(dynamic=True)}))
    mapped = jax.tree.map(lambda leaf: leaf, cls(x=3, y=0.5))
    assert dataclasses.replace(mapped, y=0.25).x == 3
    assert roles(cls)["x"][0] == "leaf"
