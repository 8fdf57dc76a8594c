"""Structures as plain JSON: a tree of modules, configs and values is rebuilt, or what is in the way is named."""

import collections
import dataclasses
import enum
import functools
import json
import math
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd.config as ekc
from equikd.config._values import FrozenDict
from equikd.train._structure import Reader, Writer, importable_name


class Colour(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


class Bits(enum.Flag):
    A = 1
    B = 2


class Pair(NamedTuple):
    left: Any
    right: Any = 3


class Block(eqx.Module):
    dynamic: Any
    static: Any = eqx.field(static=True)

    def method(self, x: Any) -> Any:
        return self.dynamic, x


@dataclasses.dataclass(frozen=True)
class Plain:
    a: Any
    b: Any = 2

    def __post_init__(self) -> None:
        if CONSTRUCTORS_REFUSE:
            raise AssertionError("a constructor ran")


@ekc.config
class Rates:
    rate: float = 0.1
    width: int = 3
    pair: tuple[float, int] = (0.5, 1)
    inner: Any = None


CONSTRUCTORS_REFUSE = False
_kept_lambda = lambda x: x


def block(dynamic: Any, static: Any) -> Block:
    """A block with any values in its fields, of which equinox's constructor refuses some."""
    made = object.__new__(Block)
    object.__setattr__(made, "dynamic", dynamic)
    object.__setattr__(made, "static", static)
    return made


def there_and_back(value: Any) -> Any:
    writer = Writer()
    plain = json.loads(json.dumps(writer.write(value), allow_nan=False))
    assert writer.blocked == {}
    reader = Reader(writer.arrays)
    read = reader.read(plain)
    assert reader.problems == []
    return read


def same(a: Any, b: Any) -> bool:
    """Equal by type and value all the way down; floats and arrays by their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes() or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, jax.Array | np.ndarray | np.generic):
        return a is b
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Block | Plain):
        return same(vars(a), vars(b))
    return a == b


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(max_size=5),
    st.sampled_from([*Colour, Bits.A, np.dtype("float32"), np.dtype(">i4"), jnp.dtype("bfloat16"), jnp.float32]),
    st.sampled_from([jax.nn.relu, jnp.tanh, jnp.add, np.add, math.sin, eqx.nn.Linear, optax.adam, len, _kept_lambda]),
    st.sampled_from([np.ones(2), np.float32(3), jnp.ones(2, jnp.bfloat16), jnp.zeros((0, 1)), jax.random.key(0)]),
    st.frozensets(st.integers(), max_size=3),
)


def node(children: st.SearchStrategy) -> st.SearchStrategy:
    keys = st.one_of(
        st.text(max_size=4), st.integers(), st.tuples(st.booleans(), st.text(max_size=2)), st.sampled_from(Colour)
    )
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=3),
        st.dictionaries(st.text(max_size=4), children, max_size=3).map(collections.OrderedDict),
        st.dictionaries(st.text(max_size=4), children, max_size=3).map(FrozenDict),
        st.builds(Pair, children, children),
        st.builds(block, children, children),
        st.builds(Plain, children, children),
    )


@given(st.recursive(ATOMS, node, max_leaves=8))
def test_any_tree_is_rebuilt_exactly(value):
    assert same(there_and_back(value), value)


def test_no_constructor_runs(monkeypatch):
    plain = Plain(1)
    monkeypatch.setitem(globals(), "CONSTRUCTORS_REFUSE", True)
    assert there_and_back(plain) == plain

    monkeypatch.setattr(Block, "__init__", None)
    assert vars(there_and_back(block(1, (2,)))) == {"dynamic": 1, "static": (2,)}


def test_configs_and_nodes_come_back_as_plain_data():
    config = Rates(0.25, inner=ekc.lazy(optax.adamw)(1e-3, weight_decay=0.1))
    assert there_and_back((config, config.inner)) == (config, config.inner)
    node = ekc.lazy(optax.chain)(ekc.lazy(optax.scale)(2.0), ekc.lazy(optax.identity)())
    assert there_and_back(node) == node
    assert there_and_back(ekc.lazy(node)(1)) == ekc.lazy(node)(1)
    trained = jax.tree.map(lambda leaf: leaf, config)  # as it comes out of a compiled step
    assert isinstance(trained.rate, jax.Array)
    read = there_and_back(trained)
    assert type(read.rate) is float
    assert read == config
    assert jax.tree.structure(read) == jax.tree.structure(config)


def test_functions_with_arguments_and_methods_come_back():
    read = there_and_back(functools.partial(jax.nn.gelu, approximate=False))
    assert (read.func, read.keywords) == (jax.nn.gelu, {"approximate": False})
    read = there_and_back(jax.tree_util.Partial(jnp.add, 2.0))
    assert isinstance(read, jax.tree_util.Partial)
    assert read(3.0) == 5.0
    assert there_and_back(eqx.Partial(pow, 2))(3) == 8
    method = there_and_back(Block(1, 2).method)
    assert method(3) == (1, 3)
    assert there_and_back(eqx.nn.Identity().__call__)(4) == 4


def test_unset_fields_stay_unset():
    half = object.__new__(Block)
    object.__setattr__(half, "static", 1)
    assert vars(there_and_back(half)) == {"static": 1}


def test_state_markers_are_shared_between_model_and_state():
    model = (eqx.nn.BatchNorm(2, "batch", mode="ema"), eqx.nn.BatchNorm(2, "batch", mode="ema"))  # markers are object()
    state = eqx.nn.State(model)
    read_model, read_state = there_and_back((model, state))
    index = read_model[1].ema_state_index
    assert read_state.get(index)[0] is state.get(model[1].ema_state_index)[0]
    assert index.marker is not read_model[0].ema_state_index.marker


def test_lambdas_held_by_a_module_have_a_name():
    assert importable_name(_kept_lambda) == f"{__name__}:_kept_lambda"
    assert (
        importable_name(eqx.nn.MLP(1, 1, 1, 1, key=jax.random.key(0)).final_activation) == "equinox.nn._mlp:_identity"
    )


def test_what_a_script_defines_is_found_by_that_script_alone(monkeypatch):
    class Net(eqx.Module):
        width: int = 3

    Net.__module__, Net.__qualname__ = "__main__", "Net"
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "Net", Net, raising=False)
    plain = Writer().write(Net())
    assert plain == {"module": "__main__:Net", "fields": {"width": 3}}
    assert type(Reader({}).read(plain)) is Net
    monkeypatch.delattr(main, "Net")
    reader = Reader({})
    reader.read([plain])
    assert reader.problems == ["[0]: '__main__:Net': __main__ has no 'Net'"]
    writer = Writer()
    writer.write([Net()])
    assert writer.blocked == {"[0]": "__main__:Net does not import back to the same object"}


def test_everything_in_the_way_is_named(snapshot):
    class Local(eqx.Module):
        w: Any

    value = {
        "lambda": Block(1, lambda x: x),
        "local": Local(np.ones(1)),
        "jit": eqx.filter_jit(jnp.sin),
        "text": np.array(["a"]),
        "both": Bits.A | Bits.B,
        "object": [object()],
        "sound": (1, jax.nn.relu),
    }
    writer = Writer()
    reader = Reader(writer.arrays)
    reader.read(json.loads(json.dumps(writer.write(value))))
    assert len(writer.blocked) == 6
    snapshot("blocked", "\n".join(reader.problems).replace(__name__, "tests"))


@pytest.mark.parametrize(
    ("plain", "problem"),
    [
        ({"object": "no_such_package:x"}, "cannot import no_such_package"),
        ({"object": "jax.nn:no_such"}, "has no 'no_such'"),
        ({"unknown": 1}, "unknown is malformed"),
        ({}, "an empty object is malformed"),
        ({"module": "jax.nn:relu", "fields": {}}, "not a class with fields"),
        ({"module": "equinox.nn:Identity", "fields": {"gone": 1}}, "gone is gone"),
        ({"module": "equinox.nn:Lambda", "fields": {}}, "fn is new"),
        ({"namedtuple": f"{__name__}:Pair", "fields": {"left": 1}}, "have changed"),
        ({"enum": f"{__name__}:Colour", "member": "GREEN"}, "enum is malformed"),
        ({"array": "nowhere"}, "array is malformed"),
        ({"complex": [1]}, None),
    ],
)
def test_what_does_not_fit_any_more_is_a_problem(plain, problem):
    reader = Reader({})
    reader.read([1, plain])
    assert reader.problems == [] if problem is None else problem in reader.problems[0]
    assert problem is None or reader.problems[0].startswith("[1]: ")
