"""Typed keys: static values are equal exactly if they have the same type and value; built objects are refused."""

import dataclasses
import enum
import math
import pathlib
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.config._values import Static, check_plain, exact_float, float_dtype, number, typed_key
from equikd.errors import ConfigError


class Colour(enum.IntEnum):
    red = 1


class Other(enum.IntEnum):
    red = 1


@dataclasses.dataclass(frozen=True)
class Pair:
    a: object
    b: object = 0


@dataclasses.dataclass(frozen=True)
class Unfit:
    a: dict


@dataclasses.dataclass
class Mutable:
    a: int


class Net(eqx.Module):
    width: int = 3


scalars = st.sampled_from(
    [
        0,
        1,
        False,
        True,
        0.0,
        -0.0,
        1.0,
        math.nan,
        math.inf,
        1j,
        complex(0.0, -0.0),
        None,
        "1",
        b"1",
        Colour.red,
        Other.red,
        ...,
    ]
)
values = st.recursive(
    scalars,
    lambda v: (
        st.lists(v, max_size=2).map(tuple) | st.dictionaries(st.sampled_from("ab"), v, max_size=2) | st.builds(Pair, v)
    ),
    max_leaves=4,
).filter(lambda v: not (isinstance(v, Pair) and "{" in repr(v)))


def spelt(value):
    """An independent notion of equality: the repr, which tells types, signs and nan apart, with dicts sorted."""
    if isinstance(value, dict):
        return str(sorted((key, spelt(part)) for key, part in value.items()))
    if isinstance(value, tuple):
        return "T" + str([spelt(part) for part in value])
    return f"{type(value).__qualname__}:{value!r}"


def holds_dict_in_pair(value):
    if isinstance(value, Pair):
        return "{" in repr(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return any(map(holds_dict_in_pair, parts))


values = values.filter(lambda value: not holds_dict_in_pair(value))


@given(values, values)
def test_typed_keys_are_equal_exactly_if_the_values_are(one, two):
    assert (typed_key(one) == typed_key(two)) is (spelt(one) == spelt(two))
    assert (Static(one) == Static(two)) is (spelt(one) == spelt(two))
    if spelt(one) == spelt(two):
        assert hash(Static(one)) == hash(Static(two))
    assert (jax.tree.structure(Static(one)) == jax.tree.structure(Static(two))) is (spelt(one) == spelt(two))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, True),
        (0.0, -0.0),
        ((1, (0.0,)), (1, (-0.0,))),
        (Colour.red, Other.red),
        (Colour.red, 1),
        (Pair(1), Pair(True)),
        (Pair(Pair(0.0)), Pair(Pair(-0.0))),
        (np.dtype("float32"), np.float32),
        (jnp.float32, np.float32),
        (pathlib.Path("a"), "a"),
    ],
    ids=repr,
)
def test_what_python_takes_for_equal_is_told_apart(one, two):
    assert typed_key(one) != typed_key(two)


@pytest.mark.parametrize(
    "make", [float, lambda x: (1, (float(x),)), lambda x: Pair(float(x)), lambda x: {"a": float(x)}], ids="abcd"
)
def test_nan_is_found_again(make):
    assert Static(make("nan")) == Static(make("nan"))
    assert hash(Static(make("nan"))) == hash(Static(make("nan")))


def test_what_cannot_be_hashed():
    for value in ([1], {1}, Unfit({}), ({"a": [1]},)):
        with pytest.raises(TypeError):
            typed_key(value)


def test_fields_left_out_of_a_comparison_stay_out():
    @dataclasses.dataclass(frozen=True)
    class Noted:
        a: int
        note: str = dataclasses.field(default="", compare=False)

    assert typed_key(Noted(1, "x")) == typed_key(Noted(1, "y"))
    assert typed_key(Noted(1)) != typed_key(Noted(True))


@given(st.floats() | st.integers())
def test_exact_floats_keep_their_value_or_are_refused(value):
    try:
        kept = exact_float(value, "C.x")
    except ConfigError as error:
        assert str(error).startswith("C.x: ")  # noqa: PT017  # whether it raises depends on the value
        return
    assert type(kept) is float
    assert kept == value or math.isnan(value)
    stored = np.float32(kept)
    assert np.isinf(stored) == math.isinf(value)
    assert (stored == 0) == (value == 0)
    if isinstance(value, int) and abs(value) < 2**53:
        assert int(stored) == value


def test_ranges_that_float32_does_not_have(snapshot):
    messages = []
    for value in (1e39, -1e39, 1e-46, 1e-40, 16777217.0, 2**53 + 1, 10**400):
        with pytest.raises(ConfigError) as caught:
            exact_float(value, "Opt.lr")
        messages.append(str(caught.value))
    snapshot("float_ranges", "\n".join(messages))
    for value in (math.inf, -math.inf, math.nan, 0.0, -0.0, 3.4e38, 1.2e-38, 16777216.0, 1e300 * 0):
        exact_float(value, "Opt.lr")


def test_x64_has_wider_floats():
    with jax.enable_x64(True):
        assert float_dtype() == np.float64
        assert exact_float(1e300, "x") == 1e300
        assert exact_float(16777217, "x") == 16777217.0
    assert float_dtype() == np.float32


def test_numpy_scalars_become_python_numbers():
    for value in (np.float16(0.5), np.float32(0.5), np.float64(0.5), np.int8(3), np.bool_(True), np.str_("a")):
        assert type(number(value)).__module__ == "builtins"
        assert number(value) == value
    assert number(None) is None


def built():
    with pathlib.Path("/dev/null").open() as file:
        file_ = file
    return {
        "optimizer": optax.adam(1e-3),
        "module": Net(),
        "jax_array": jnp.ones((2, 3)),
        "numpy_array": np.ones(3),
        "prng_key": jax.random.key(0),
        "file": file_,
        "generator": np.random.default_rng(0),
        "list": [1, 2],
        "set": {1},
        "range": range(3),
        "object": object(),
        "unhashable_dataclass": Unfit({}),
        "mutable_dataclass": Mutable(1),
        "python_module": math,
    }


@pytest.mark.parametrize("name", built())
def test_built_objects_are_refused_with_what_to_write(name, snapshot):
    with pytest.raises(ConfigError) as caught:
        check_plain(built()[name], "Trainer.field")
    text = str(caught.value)
    assert "fix:" in text
    snapshot(name, text)


PLAIN = [None, True, 1, 0.5, 1j, "a", b"a", ..., Colour.red, np.dtype("int8"), jnp.bfloat16, pathlib.Path("a"), Pair(1)]
NAMED = [jax.nn.relu, jnp.tanh, jnp.add, np.tanh, len, optax.adam, eqx.nn.Linear, eqx.filter_jit(len), lambda: 0]


@pytest.mark.parametrize("value", PLAIN + NAMED, ids=map(str, range(len(PLAIN + NAMED))))
def test_plain_data_passes(value):
    assert check_plain(value, "x") is value
    hash(Static(value))


def test_arrays_are_spelt_by_dtype_and_shape(snapshot):
    image = np.zeros((1437, 8, 8), np.float32)

    @ek.config.config
    class Holder:
        evals: dict[str, ek.evals.Eval]

    data = ek.data.InMemory({"image": image, "more": [image] * 20}, batch_size=4)
    assert "'image': float32[1437,8,8]" in repr(data)
    assert len(repr(data)) < 500
    with pytest.raises(ConfigError) as caught:
        Holder(evals={"test": data})
    text = str(caught.value).replace("test_arrays_are_spelt_by_dtype_and_shape.<locals>.", "")
    snapshot("eval_forgotten", text)


def test_an_iterator_is_refused_with_what_to_write(snapshot):
    with pytest.raises(ConfigError) as caught:
        check_plain((i for i in range(3)), "Trainer.train_data")
    snapshot("iterator", str(caught.value).replace("test_an_iterator_is_refused_with_what_to_write.<locals>.", ""))


class Switch(enum.IntFlag):
    a = 1
    b = 2


class Ratio(float, enum.Enum):
    half = 0.5
    one = 1.0


class Named(NamedTuple):
    value: object


@dataclasses.dataclass(frozen=True, eq=False)
class Compared:
    parts: object


def test_flags_are_compared_by_value():
    different = [Switch(0), Switch(1), Switch(3), Switch(8), Switch(16)]
    assert len({typed_key(flag) for flag in different}) == len(different)
    assert typed_key(Switch(3)) == typed_key(Switch.a | Switch.b)


def test_containers_of_static_values_are_compared_part_by_part():
    for wrap in (Named, lambda part: frozenset([part]), lambda part: Pair(Named(part)), Compared):
        assert typed_key(wrap(1)) != typed_key(wrap(True))
        assert typed_key(wrap(math.nan)) == typed_key(wrap(math.nan))
    with pytest.raises(ConfigError, match="cannot be hashed"):  # whoever holds the list may change it
        check_plain(Compared([1]), "x")


def test_enums_with_float_values_stay_enums():
    node = ek.lazy(lambda value, pair: (value, pair))(Ratio.half, (Ratio.one, 0.5))
    assert len(jax.tree.leaves(node)) == 1
    assert ek.resolve(node) == (Ratio.half, (Ratio.one, 0.5))
    assert type(ek.resolve(node)[0]) is type(ek.resolve(node)[1][0]) is Ratio
