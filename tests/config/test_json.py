"""JSON is exact both ways, refuses what could not be read again, and meets any text with a config or a ConfigError."""

import dataclasses
import enum
import json
import math
import operator
import os
import pathlib
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equikd.config import config, field, from_json, lazy, pin, ref, to_json
from equikd.config._dataclass import comparison_key
from equikd.errors import ConfigError
from equikd.optim import WarmupCosine

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # a new process finds what this one does


class Act(enum.Enum):
    relu = "relu"


class Level(enum.IntEnum):
    low = 1


class Half(float, enum.Enum):
    half = 0.5


class Access(enum.Flag):
    read = 1
    write = 2
    both = 3
    run = 4


class Bits(enum.IntFlag):
    one = 1


@dataclasses.dataclass(frozen=True)
class Plain:
    a: Any = 1
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Picky:
    a: int

    def __post_init__(self):
        if self.a < 0:
            raise LookupError("must not be negative")


@config
class Opt:
    rate: float = 0.1
    name: Any = "x"
    act: Act = Act.relu
    inner: Any = None
    betas: tuple[float, float] = (0.9, 0.999)
    weights: dict[str, float] = field(default_factory=dict)


def anything(*args, **kwargs):
    return args, kwargs


def maker(width):
    return anything


ODD_KEYS = st.text(max_size=3) | st.sampled_from(
    ["a", "a b", "__x__", "__qualname__", "__dict__", "__format__", "[0]", "é", "'", '"', "a.b", "\ud800"]
)
FUNCTIONS = [jax.nn.relu, jnp.tanh, jnp.add, optax.adamw, eqx.nn.MLP, jnp.bfloat16, np.float32, len, operator.mul, Opt]
FLAGS = [Access.read, Access.read | Access.run, Access.both, Access(0), Bits(8), Bits(16), Bits.one | 8]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.sampled_from([2**2000 - 1, 2**2000, -(2**2001)]),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(),
    st.sampled_from(
        [*FUNCTIONS, Act.relu, Level.low, Half.half, *FLAGS, np.dtype("float32"), np.dtype(jnp.bfloat16), ...]
    ),
    st.sampled_from([pathlib.Path("a/b"), pathlib.PurePosixPath("/c"), pathlib.PureWindowsPath("d:\\e")]),
    st.sampled_from([ref("a.b"), pin(0.5), pin(math.inf), Plain(1), Plain(True, (0.0,)), Picky(3)]),
)
argument_floats = st.floats(width=32, allow_subnormal=False)


def branches(value):
    node_value = value.filter(fits_a_node)
    names = st.sampled_from(["a", "b", "a b", "é", "self"])
    return st.one_of(
        st.lists(value, max_size=3).map(tuple),
        st.dictionaries(ODD_KEYS, value, max_size=3),
        st.builds(
            lambda args, kw: lazy(anything)(*args, **kw),
            st.lists(node_value, max_size=2),
            st.dictionaries(names, node_value, max_size=2),
        ),
        st.builds(lambda v: lazy(maker)(width=v)(v), node_value),
        st.builds(
            Opt,
            rate=argument_floats,
            name=value,
            inner=value,
            betas=st.tuples(argument_floats, argument_floats),
            weights=st.dictionaries(ODD_KEYS, argument_floats, max_size=2),
        ),
    )


def fits_a_node(value):
    """Whether a node takes the value: its floats are leaves, which must be representable."""
    try:
        lazy(anything)(value)
    except ConfigError:
        return False
    return True


VALUES = st.recursive(LEAVES, branches, max_leaves=6)


@given(VALUES)
def test_a_round_trip_is_the_identity(value):
    for wrapped in (value, {"root": value}, Opt(inner=value)):
        text = to_json(wrapped)
        back = from_json(text)
        assert comparison_key(back) == comparison_key(wrapped)
        assert to_json(back) == text
        assert to_json(from_json(to_json(wrapped, indent=2))) == text
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_form_that_the_readme_shows():
    cfg = {"optimizer": lazy(optax.adamw)(3e-4), "act": jax.nn.relu, "chain": lazy(optax.chain)(lazy(optax.sgd)(0.1))}
    assert json.loads(to_json(cfg)) == {
        "__format__": 1,
        "optimizer": {"__qualname__": "optax:adamw", "learning_rate": 0.0003},
        "act": {"__name__": "jax.nn:relu"},
        "chain": {"__qualname__": "optax:chain", "[0]": {"__qualname__": "optax:sgd", "learning_rate": 0.1}},
    }
    assert from_json('{"__qualname__": "optax._src.alias:adamw", "learning_rate": 1}') == lazy(optax.adamw)(1.0)
    assert from_json("[1, [2.5, null]]") == (1, (2.5, None))


def test_values_that_json_does_not_have():
    cfg = {
        "a": math.nan,
        "b": -math.inf,
        "c": -0.0,
        "d": 2**53 + 1,
        "e": 10**300,
        "f": (1.0, 1, True),
        "g": 5e-324,
        "h": 1e300,
    }
    back = from_json(to_json(cfg))
    assert repr(back) == repr(cfg)
    assert to_json(jax.tree.map(lambda x: x, Opt(0.3))) == to_json(Opt(0.3, betas=(0.9, 0.999)))


SEEDS = [
    to_json(
        Opt(0.5, ("a", 1, None), inner=lazy(anything)(1.5, a=pin(0.5), b=(ref("x.y"), {"__k__": 2})), weights={"w": 1})
    ),
    to_json(
        {"optimizer": lazy(optax.adamw)(3e-4, b1=0.9, nesterov=True), "act": (jax.nn.relu, np.dtype("int8"), Act.relu)}
    ),
    to_json({"x": (math.nan, 1j, b"bytes", pathlib.Path("p"), ..., Plain(2), lazy(maker)(3)(4))}),
]
TOKENS = """0 1e999 -1 true null " { } [ ] , : __name__ __qualname__ __pin__ __float__ __dataclass__ __dict__ __ref__
    optax:sgd os:getcwd \\ud800 é Infinity""".split()
TOKENS += ["1" * 400, " "]


@st.composite
def edited(draw):
    text = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        length = draw(st.integers(0, 12))
        text = text[:start] + draw(st.sampled_from(TOKENS) | st.text(max_size=2)) + text[start + length :]
    return text


def loads_or_refuses(text):
    try:
        cfg = from_json(text)
    except ConfigError:
        return
    again = to_json(cfg)
    assert comparison_key(from_json(again)) == comparison_key(cfg)
    assert to_json(from_json(again)) == again


@settings(max_examples=500)
@given(edited())
def test_edited_texts_load_or_are_refused(text):
    loads_or_refuses(text)


words = st.sampled_from(
    """__qualname__ __name__ __float__ __dict__ __pin__ __ref__ __bytes__ __path__ __complex__ pure __ellipsis__
    __dataclass__ __opaque__ __unloadable__ __format__ [0] [1] rate inner a""".split()
)
bits = st.sampled_from(
    f"optax:sgd os:getcwd {__name__}:Opt {__name__}:Plain {__name__}:Picky math:pi nan x.y Path AAA=".split()
)
plain_forms = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | bits | st.text(max_size=2),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3),
    max_leaves=8,
)


@settings(max_examples=500)
@given(plain_forms)
def test_any_plain_form_loads_or_is_refused(plain):
    loads_or_refuses(json.dumps(plain))


MALFORMED = r"""
{
NaN
Infinity
{"a": 1, "a": 2}
{"__format__": 2}
{"__format__": null}
{"__strange__": 1}
{"__float__": "fast"}
{"__bytes__": "&"}
{"__path__": 3}
{"__path__": "a", "pure": "Popen"}
{"__pin__": 1e39}
{"__ref__": ""}
{"__ref__": "a..b"}
{"__name__": "math:pi"}
{"__name__": 3}
{"__name__": "optax:adamww"}
{"__qualname__": "math:pi"}
{"__qualname__": "optax:adamw"}
{"__qualname__": "optax:adamw", "learning_rate": [[]], "b1x": 1}
{"__qualname__": "optax:chain", "[1]": 1}
{"__dataclass__": "os:getcwd"}
{"__dataclass__": "test_json_missing:Picky", "a": 1}
{"__dict__": 3}
{"__dict__": [["a"]]}
{"__complex__": [1, 2, 3]}
{"__float__": "nan", "x": 1}
{"__ref__": "a", "__pin__": 1}
{"__path__": "a", "pure": "Path", "x": 1}
{"__ellipsis__": false}
{"__dict__": [[1, 2]]}
{"__dict__": [[null, 2]]}
{"__int__": 3}
{"__int__": "fast"}
{"__flag__": "enum:Flag", "value": "x"}
{"__flag__": "os:getcwd", "value": 1}
{"__dict__": [["__a", 1], ["__a", 2]]}
{"a": 1e400}
{"__qualname__": {"__qualname__": 3}}
""".splitlines()  # the first one is empty
MALFORMED += ["[" * 100000, '{"__float__": ' + "9" * 400 + "}"]


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_malformed_texts_are_refused(number):
    with pytest.raises(ConfigError):
        from_json(MALFORMED[number])


def test_loading_calls_nothing():
    with pytest.raises(ConfigError, match="is not a frozen dataclass"):
        from_json('{"__dataclass__": "os:getcwd"}')
    with pytest.raises(ConfigError, match="must not be negative"):
        from_json(json.dumps({"__dataclass__": f"{__name__}:Picky", "a": -1}))


def test_messages_of_wrong_texts(snapshot):
    texts = {
        "not_json": '{"a": 1',
        "not_strict": '{"a": NaN}',
        "twice": '{"a": 1, "a": 2}',
        "format": '{"__format__": 99, "a": 1}',
        "mark": '{"a": [{"__strange__": 1}]}',
        "name": '{"optimizer": {"__qualname__": "optax:adamww", "learning_rate": 1}}',
        "argument": '{"optimizer": {"__qualname__": "optax:adamw", "learning_rat": 1}}',
        "field": json.dumps({"opt": {"__qualname__": f"{__name__}:Opt", "rat": 1, "rate": "fast"}}),
        "value": json.dumps({"opt": {"__qualname__": f"{__name__}:Opt", "rate": "fast", "act": 1}}),
        "beside": '{"a": {"__ref__": "b", "__pin__": 1}}',
        "malformed": '{"a": {"__bytes__": 3}}',
        "unloadable": '{"a": {"__unloadable__": "mod:<lambda>"}}',
    }
    for name, text in texts.items():
        with pytest.raises(ConfigError) as caught:
            from_json(text)
        snapshot(name, str(caught.value))


def test_a_path_is_no_text(snapshot):
    messages = []
    for wrong in ("config.json", pathlib.Path("config.json"), {"a": 1}):
        with pytest.raises(ConfigError) as caught:
            from_json(wrong)
        messages.append(str(caught.value).replace("WindowsPath", "PosixPath"))
    snapshot("path", "\n".join(messages))


def test_only_allowed_packages(snapshot):
    text = to_json({"optimizer": lazy(optax.sgd)(0.1), "act": jax.nn.relu, "dtype": np.dtype("int8")})
    assert from_json(text, allow=("optax", "jax", "numpy")) == from_json(text)
    with pytest.raises(ConfigError) as caught:
        from_json(text, allow=("optax", "numpy"))
    snapshot("not_allowed", str(caught.value))
    for name in (
        "os:system",
        "pathlib:os.system",
        f"{__name__}:subprocess.run",
        f"{__name__}:operator",
        "equikd.config._json:Any",
    ):
        with pytest.raises(ConfigError):
            from_json(json.dumps({"__name__": name}), allow=("pathlib", "tests", "equikd"))
    assert "antigravity" not in sys.modules
    with pytest.raises(ConfigError, match="antigravity"):
        from_json('{"__name__": "antigravity:x"}', allow=("optax",))
    assert "antigravity" not in sys.modules


def test_what_only_this_process_knows_is_refused_with_its_path(snapshot):
    def local(rate):
        return rate

    cfg = {"a": lazy(lambda rate: rate)(0.1), "b": (lazy(dict)(f=local),), "c": Opt()}
    with pytest.raises(ConfigError) as caught:
        to_json(cfg)
    snapshot("unwritable", str(caught.value))
    text = to_json(cfg, unloadable=True)
    assert "<lambda>" in json.loads(text)["a"]["__qualname__"]["__unloadable__"]
    with pytest.raises(ConfigError, match="exists only in the process that wrote this config"):
        from_json(text)


def test_classes_of_main_work_in_process_only():
    code = """
from equikd.config import config, to_json, lazy, resolve
from equikd.errors import ConfigError
@config
class Mine:
    rate: float = 0.1
assert resolve(lazy(dict)(a=Mine(0.5)))["a"].rate == 0.5
try:
    to_json({"a": Mine()})
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENV)
    assert done.stdout.startswith("a: Mine is defined in __main__"), done.stderr
    assert "move Mine to a module" in done.stdout


def test_opaque_arrays_are_named_not_written(snapshot):
    @config
    class Data:
        arrays: Any = field(opaque=True)

    Data.__qualname__, Data.__module__ = "Opt", __name__  # a class with a name, for the message
    with pytest.raises(ConfigError) as caught:
        to_json({"data": Data({"x": np.ones((2, 3), np.float32)})})
    assert "data.arrays: holds arrays" in str(caught.value)
    text = to_json({"data": Data({"x": np.ones((2, 3), np.float32)})}, unloadable=True)
    spec = json.loads(text)["data"]["arrays"]["__opaque__"]["['x']"]
    assert (spec["dtype"], spec["shape"], len(spec["hash"])) == ("float32", [2, 3], 16)
    other = to_json({"data": Data({"x": np.zeros((2, 3), np.float32)})}, unloadable=True)
    assert other != text
    with pytest.raises(ConfigError) as caught:
        from_json(json.dumps({"arrays": json.loads(text)["data"]["arrays"]}))
    snapshot("opaque", str(caught.value))


def test_an_allowed_equikd_gives_config_classes_only(snapshot):
    importing = {"__qualname__": "equikd.config._names:import_object", "name": "os:system"}
    text = json.dumps({"__qualname__": importing, "[0]": "true"})
    with pytest.raises(ConfigError) as error:
        from_json(text, allow=("equikd",))
    snapshot("function_of_equikd", str(error.value))
    plain = to_json(WarmupCosine(0.0, 1.0, warmup_steps=1, decay_steps=10))
    assert from_json(plain, allow="equikd") == WarmupCosine(0.0, 1.0, warmup_steps=1, decay_steps=10)


def test_a_constant_is_refused_without_its_value():
    with pytest.raises(ConfigError) as error:
        from_json('{"__name__": "os:environ"}')
    assert "PATH" not in str(error.value)


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="dict keys are strings"):
        to_json({1: 2.0})
    deep: Any = 1.0
    for _ in range(5000):
        deep = (deep,)
    with pytest.raises(ConfigError, match="nested too deeply"):
        to_json(deep)


@config
class Leaves:
    rate: float = 0.1
    seed: int = field(dynamic=True, unsigned=True, default=10)
    steps: tuple[int, ...] = field(dynamic=True, default=(2, 300))
    node: Any = lazy(anything)(0.3, b=(0.7, 2))


def test_what_a_tree_operation_gives_back_is_written_as_it_was():
    for mapped in (jax.tree.map(lambda leaf: leaf, Leaves()), jax.tree.map(np.asarray, Leaves())):
        assert to_json(mapped) == to_json(Leaves())
        assert from_json(to_json(mapped)) == Leaves()
    scalars = jax.tree.map(lambda leaf: np.asarray(leaf)[()], Leaves())
    assert to_json(scalars) == to_json(Leaves())


def test_leaves_that_are_no_numbers(snapshot):
    messages = []

    def refused(cfg):
        with pytest.raises(ConfigError) as caught:
            to_json({"opt": cfg})
        messages.append(str(caught.value))

    refused(jax.tree.map(lambda leaf: jax.numpy.stack([leaf, leaf]), Opt()))
    refused(jax.eval_shape(lambda cfg: cfg, Leaves(steps=(), node=None)))
    jax.jit(refused)(lazy(anything)(0.5))
    snapshot("no_numbers", "\n".join(messages))


def test_flags_and_long_ints_have_marks_of_their_own():
    assert json.loads(to_json((Access.read | Access.run, Access.both, Access(0)))) == [
        {"__flag__": f"{__name__}:Access", "value": 5},
        {"__name__": f"{__name__}:Access.both"},
        {"__flag__": f"{__name__}:Access", "value": 0},
    ]
    assert json.loads(to_json(10**300)) == 10**300
    assert from_json(to_json((10**5000, -(10**5000)))) == (10**5000, -(10**5000))  # Python prints no ints so long
    with pytest.raises(ConfigError, match="malformed __flag__"):
        from_json(json.dumps({"__flag__": f"{__name__}:Access", "value": 64}))
    with pytest.raises(ConfigError, match="is not a class of flags"):
        from_json(json.dumps({"__flag__": f"{__name__}:Act", "value": 1}))


@dataclasses.dataclass(frozen=True)
class Derived:
    a: int
    b: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass(frozen=True)
class Rounded:
    a: int

    def __post_init__(self):
        object.__setattr__(self, "a", self.a + 1)


def test_a_dataclass_that_its_fields_do_not_make_again_is_refused(snapshot):
    with pytest.raises(ConfigError) as caught:
        to_json({"a": Derived(1), "b": (Rounded(1),), "c": Plain(math.nan)})
    snapshot("not_made_again", str(caught.value))


def test_a_partial_is_checked_when_it_is_read():
    text = '{"__qualname__": "functools:partial", "[0]": {"__name__": "optax:adamw"}, "b2": 1, "b1": 0}'
    assert from_json(text) == lazy.partial(optax.adamw)(b1=0, b2=1)
    with pytest.raises(ConfigError, match="no argument 'b11'"):
        from_json(text.replace("b1", "b11"))


def test_a_config_is_not_called():
    (schedule,) = json.loads(to_json((WarmupCosine(0.0, 1.0, 1, 10),)))
    text = json.dumps({"__qualname__": schedule, "[0]": 3})
    with pytest.raises(ConfigError, match="is a config, whose floats it would hide"):
        from_json(text)
