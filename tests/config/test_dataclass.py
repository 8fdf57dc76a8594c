"""Config classes as dataclasses: fields, inheritance, annotations as strings, equality, copies and pickles."""

import copy
import dataclasses
import enum
import os
import pickle
import subprocess
import sys
import textwrap
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equikd.config import config, field, host, lazy, pin, ref, resolve, roles
from equikd.errors import ConfigError

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # a new process finds what this one does


class Act(enum.Enum):
    relu = "relu"
    gelu = "gelu"


@config
class Opt:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None
    nesterov: bool = False
    steps: int = 100


@config
class Net:
    width: int = 8
    act: Act = Act.relu
    fn: Callable[[jax.Array], jax.Array] = jax.nn.relu
    mode: Literal["a", 1] = "a"


@config
class Experiment:
    net: Net = Net()
    opt: Opt = Opt()
    optimizer: Any = lazy(optax.adamw)(1e-3, b1=0.8)
    weights: dict[str, float] = field(default_factory=lambda: {"ce": 1.0, "l2": 0.1})
    heads: tuple[Net, ...] = (Net(4), Net(2))
    rate: float = ref("opt.learning_rate")
    smoothing: float = pin(0.1)


@config(kw_only=True)
class Base:
    rate: float
    name: str = "base"


@config(kw_only=True)
class Derived(Base):
    width: int = 3
    name: str = "derived"


def test_values_outside_are_pythons():
    opt = Opt(learning_rate=1, betas=(1, np.float32(0.5)))
    assert opt.learning_rate == 1.0
    assert [type(value) for value in (opt.learning_rate, *opt.betas)] == [float] * 3
    jax.tree.leaves(opt)
    assert type(opt.learning_rate) is float
    assert opt.betas == (1.0, 0.5)


def test_it_is_a_frozen_dataclass():
    assert dataclasses.is_dataclass(Opt)
    assert [f.name for f in dataclasses.fields(Opt)] == ["learning_rate", "betas", "clip", "nesterov", "steps"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Opt().steps = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        del Opt().steps
    assert dataclasses.replace(Opt(), learning_rate=2) == Opt(2.0)
    assert dataclasses.asdict(Base(rate=1)) == {"rate": 1.0, "name": "base"}


def test_inheritance_and_kw_only():
    assert Derived(rate=1).name == "derived"
    assert list(roles(Derived)) == ["rate", "name", "width"]
    with pytest.raises(TypeError):
        Derived(1.0)
    with pytest.raises(TypeError):
        Base()
    assert isinstance(Derived(rate=1), Base)
    assert Derived(rate=1) != Base(rate=1, name="derived")
    assert jax.tree.structure(Derived(rate=1)) != jax.tree.structure(Base(rate=1, name="derived"))


def test_a_forgotten_decorator_is_an_error(snapshot):
    class Forgotten(Opt):
        extra: int = 1

    with pytest.raises(ConfigError) as caught:
        Forgotten()
    with pytest.raises(ConfigError) as again:
        Forgotten(extra=2)  # the inherited constructor does not know it
    assert str(again.value) == str(caught.value)
    snapshot("forgotten_decorator", str(caught.value).replace("test_a_forgotten_decorator_is_an_error.<locals>.", ""))


def test_post_init_is_refused(snapshot):
    with pytest.raises(ConfigError) as caught:

        @config
        class Wrong:
            def __post_init__(self):
                pass

    snapshot("post_init", str(caught.value).replace("test_post_init_is_refused.<locals>.", ""))


def test_a_field_that_is_no_argument_is_refused():
    @config
    class Wrong:
        a: int = field(init=False, default=1)

    with pytest.raises(ConfigError, match=r"Wrong\.a: a config field is an argument"):
        Wrong()


def test_an_init_only_variable_is_refused():
    @config
    class Wrong:
        a: dataclasses.InitVar[int] = 3

    with pytest.raises(ConfigError, match="Wrong: an InitVar is lost"):
        Wrong()


def test_class_variables_methods_and_properties_are_kept():
    @config
    class Rich:
        count: ClassVar[int] = 3
        rate: float = 1.0

        @property
        def twice(self):
            return self.rate * 2

        def __call__(self, x):
            return self.twice * x

    assert list(roles(Rich)) == ["rate"]
    assert jax.jit(lambda rich: rich(Rich.count))(Rich(2)) == 12.0
    assert Experiment(optimizer=Rich()).optimizer == Rich()
    assert repr(Rich(2)).endswith("Rich(rate=2.0)")


def test_a_wrong_annotation_names_the_field():
    @config
    class Wrong:
        a: list[int] = ()

    with pytest.raises(ConfigError, match=r"Wrong\.a: list\[int\]: a config has no lists"):
        Wrong()


def test_all_wrong_fields_are_reported_at_once(snapshot):
    with pytest.raises(ConfigError) as caught:
        Opt("fast", (0.9,), "no", 1, 2.5)
    snapshot("wrong_fields", str(caught.value))


def test_a_class_made_in_a_function_may_refer_to_others_there():
    @config
    class Tree:
        child: "Tree | None" = None
        late: "Late | None" = None
        opt: "Opt" = Opt()

    @config
    class Late:
        rate: float = 0.5

    assert len(jax.tree.leaves(Tree(Tree(late=Late())))) == 2 * 3 + 1
    assert roles(Tree)["late"][0] == "child"


def test_a_name_that_never_comes_is_an_error(snapshot):
    @config
    class Wrong:
        a: "Nowhere"  # noqa: F821

    with pytest.raises(ConfigError) as caught:
        Wrong(1)
    snapshot("unknown_annotation", str(caught.value).replace("test_a_name_that_never_comes_is_an_error.<locals>.", ""))


def test_a_module_with_string_annotations(tmp_path):
    module = """
    from __future__ import annotations
    import enum, jax
    from equikd.config import config, roles, field

    @config
    class Outer:
        inner: Inner | None = None
        rate: float = 0.1
        mode: Mode | None = None
        seed: int = field(dynamic=True, default=0)

    @config
    class Inner(Outer):
        width: int = 3

    class Mode(enum.Enum):
        fast = 1

    def local():
        @config
        class Local(Inner):
            more: Inner = Inner(rate=1)
        return Local()

    if __name__ == "__main__":
        assert len(jax.tree.leaves(Outer(Inner(mode=Mode.fast)))) == 4
        assert {name: role for name, (role, _) in roles(Outer).items()} == dict(
            inner="child", rate="leaf", mode="static", seed="leaf")
        assert len(jax.tree.leaves(local())) == 4
    """
    path = tmp_path / "future.py"
    path.write_text(textwrap.dedent(module))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, env=ENV)
    assert done.returncode == 0, done.stderr


def test_repr_is_what_was_written():
    assert repr(Opt()) == "Opt(learning_rate=0.001, betas=(0.9, 0.999), clip=None, nesterov=False, steps=100)"
    assert repr(Net()) == "Net(width=8, act=Act.relu, fn=jax.nn.relu, mode='a')"
    assert "optimizer=optax.adamw(learning_rate=0.001, b1=0.8)" in repr(Experiment())
    assert "rate=ref('opt.learning_rate'), smoothing=pin(0.1)" in repr(Experiment())


def test_an_own_repr_is_kept():
    @config
    class Named:
        a: int = 1

        def __repr__(self):
            return "mine"

    assert repr(Named()) == "mine"


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), dataclasses.replace]
)
@pytest.mark.parametrize("flattened", [False, True])
def test_copies_are_equal(duplicate, flattened):
    cfg = Experiment()
    if flattened:
        jax.tree.leaves(cfg)
    twin = duplicate(cfg)
    assert twin == cfg
    assert hash(twin) == hash(cfg)
    assert repr(twin) == repr(cfg)
    assert jax.tree.structure(twin) == jax.tree.structure(cfg)
    assert twin.net.fn is jax.nn.relu


def test_a_local_function_can_be_copied():
    cfg = Net(fn=lambda x: x)
    assert copy.deepcopy(cfg) == cfg
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(cfg)


def test_dict_order_does_not_matter():
    one, two = Experiment(weights={"a": 1, "b": 2}), Experiment(weights={"b": 2, "a": 1})
    assert one == two
    assert hash(one) == hash(two)
    assert jax.tree.structure(one) == jax.tree.structure(two)


floats = st.floats(width=32, allow_subnormal=False)
opts = st.builds(
    Opt,
    floats,
    st.tuples(floats, floats),
    st.none() | floats,
    st.booleans(),
    st.integers(-3, 3),
)


@given(opts, opts)
def test_equal_exactly_if_the_fields_are(one, two):
    assert (one == two) is (repr(one) == repr(two))
    assert len({one, two, copy.deepcopy(one), copy.deepcopy(two)}) == 2 - (one == two)
    assert one != repr(one)


def test_equality_is_typed():
    @config
    class Any_:
        x: Any = 1

    assert Any_(1) != Any_(True)
    assert Any_(0.0) != Any_(-0.0)
    assert Any_(float("nan")) == Any_(float("nan"))
    assert Any_((1, (2.0,))) != Any_((1, (2,)))


def test_a_config_may_be_a_dict_key_and_a_default():
    assert {Opt(): 1}[Opt()] == 1
    assert Experiment().opt is Experiment().opt


def test_roles_are_listed(snapshot):
    @config
    class All:
        rate: float
        steps: int
        act: Callable
        optional: float | None
        structural: float | None = field(dynamic=True)
        fixed: float = field(static=True)
        seed: int = field(dynamic=True, unsigned=True)
        data: Any = field(opaque=True)
        betas: tuple[float, float]
        widths: tuple[int, ...]
        weights: dict[str, float]
        schedule: float | Callable[[int], float]
        child: Opt
        children: dict[str, Opt]
        anything: Any

    snapshot("roles", "\n".join(f"{name}: {role}, {why}" for name, (role, why) in roles(All).items()))


def test_arrays_in_float_fields_pass_through():
    opt = Opt(jnp.float32(0.5))
    assert isinstance(opt.learning_rate, jax.Array)
    assert opt == Opt(jnp.float32(0.5))
    assert not jax.typeof(Opt(jnp.asarray(0.5)).learning_rate).weak_type
    assert type(Opt(np.float32(0.1)).learning_rate) is float
    assert type(Opt(np.array(0.5)).learning_rate) is float


def test_an_inherited_keyword_only_field_may_be_declared_again():
    @config(kw_only=True)
    class Base:
        mask: str | None = "mask"

    @config
    class Own(Base):
        x: str
        mask: str | None = None

    assert Own("preds").mask is None
    assert Own("preds", mask="m").mask == "m"
    with pytest.raises(ConfigError):
        Own("preds", "m")  # pyright: ignore[reportCallIssue]


def test_wrong_arguments_are_named(snapshot):
    @config
    class Opt:
        rate: float
        steps: int = 1

    errors = []
    for args, kwargs in (((), {"rat": 0.1}), ((), {}), ((0.1, 2, 3), {}), ((0.1,), {"rate": 0.2})):
        with pytest.raises(ConfigError) as error:
            Opt(*args, **kwargs)
        errors.append(str(error.value))
    snapshot("wrong_arguments", "\n".join(errors))


def test_names_that_a_config_class_needs_itself_are_refused(snapshot):
    errors = []
    for name in ("_flat", "validate", "tree_items"):
        with pytest.raises(ConfigError) as error:
            config(type("Taken", (), {"__annotations__": {name: int}}))
        errors.append(str(error.value))
    snapshot("taken_names", "\n".join(errors))


def test_a_dict_in_a_config_cannot_be_changed_in_place(snapshot):
    given = {"a": 1.0, "b": 2.0}
    cfg = Experiment(weights=given)
    before = jax.tree.structure(cfg)
    given["a"] = 7.0  # what the caller holds is no part of the config
    assert cfg.weights == {"a": 1.0, "b": 2.0}
    changes = [
        lambda d: d.__setitem__("a", 3.0),
        lambda d: d.__delitem__("a"),
        lambda d: d.update(a=3.0),
        lambda d: d.setdefault("c", 3.0),
        lambda d: d.pop("a"),
        lambda d: d.popitem(),
        lambda d: d.clear(),
        lambda d: d.__ior__({"a": 3.0}),
        lambda d: d.__init__({"a": 3.0}),
    ]
    for weights in (cfg.weights, pickle.loads(pickle.dumps(cfg)).weights, copy.deepcopy(cfg).weights):
        for change in changes:
            with pytest.raises(ConfigError, match="cannot be changed in place") as error:
                change(weights)
    with pytest.raises(ConfigError) as error:
        cfg.weights["a"] = 3.0
    snapshot("frozen_dict", str(error.value))
    assert jax.tree.structure(cfg) == before
    assert type(cfg.weights | {"c": 1.0}) is dict
    mapped = jax.tree.map(lambda x: x, cfg)
    for outside in (mapped, host(mapped), eqx.filter(cfg, eqx.is_array), jax.device_get(cfg)):
        with pytest.raises(ConfigError, match="cannot be changed in place"):
            outside.weights["a"] = 7.0
    assert type(host({"a": mapped.weights["a"]})) is dict
    assert jax.jit(lambda traced: jax.tree.map(lambda a, b: a * b, traced.weights, {"a": 2, "b": 3})["a"])(cfg) == 2
    assert jax.tree.map(lambda x: x * 2, cfg.weights) == {"a": 2.0, "b": 4.0}


def test_calls_receive_plain_dicts():
    node = lazy(type)({"a": 1.0})
    assert resolve(node) is dict


def test_methods_that_unflattening_passes_over_are_refused(snapshot):
    class Mixin:
        def __post_init__(self):
            pass

    @dataclasses.dataclass(frozen=True)
    class Base:
        a: float = 1.0

        def __post_init__(self):
            pass

    errors = []
    for name, bases, method in (
        ("Mixed", (Mixin,), None),
        ("Derived", (Base,), None),
        ("Own", (), "__init__"),
        ("Equal", (), "__eq__"),
        ("Hashed", (), "__hash__"),
        ("Items", (), "tree_items"),
        ("Pickled", (), "__getstate__"),
    ):
        body = {} if method is None else {method: lambda self, other=None: None}
        with pytest.raises(ConfigError) as error:
            config(type(name, bases, body))
        errors.append(str(error.value).replace("test_methods_that_unflattening_passes_over_are_refused.<locals>.", ""))
    snapshot("own_methods", "\n".join(errors))


def test_a_config_class_may_implement_a_protocol():
    @typing.runtime_checkable
    class Named(typing.Protocol):
        name: str

    @config
    class Own(Named):
        name: str = "x"
        rate: float = 0.5

    assert isinstance(Own(), Named)
    assert len(jax.tree.leaves(Own())) == 1
