"""Values from a command line: read as what stands where they are to stand."""

import enum
import math
import pathlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equikd.config import config, field, flatten, lazy, override, pin, ref
from equikd.config._flags import edited, readings
from equikd.config._values import typed_key
from equikd.errors import ConfigError
from equikd.examples.digits import get_config
from equikd.optim import Precision
from equikd.sharding import data_parallel
from equikd.train import Checkpoints, EarlyStop, RollBack, SkipNonFinite, StopAfter


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@config
class Inner:
    rate: float = 0.5
    name: str = "a"


@config
class Outer:
    rate: float = 0.5
    count: int = 3
    seed: int = field(dynamic=True, default=0)
    flag: bool = True
    name: str = "a"
    maybe_name: str | None = None
    maybe_count: int | None = None
    maybe_rate: float | None = None
    every: int | None = 5
    names: tuple[str, ...] = ("a",)
    none_yet: tuple[str, ...] = ()
    betas: tuple[float, float] = (0.9, 0.99)
    sizes: tuple[int, ...] = (1, 2)
    globs: tuple[str, ...] | str = "all"
    mode: Mode = Mode.FAST
    path: pathlib.Path = pathlib.Path("a")
    activation: Callable[..., Any] = jax.nn.relu
    inner: Inner = Inner()
    maybe_inner: Inner | None = Inner()
    inputs: dict[str, str] = field(default_factory=lambda: {"x": "batch.x"})
    anything: Any = None


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("rate", "1", 1.0),
        ("rate", "1e-3", 1e-3),
        ("rate", ".5", 0.5),
        ("rate", "inf", math.inf),
        ("rate", "1_000", 1000.0),
        ("inner.rate", "-2", -2.0),
        ("count", "7", 7),
        ("count", "1e5", 100_000),
        ("count", "1_000", 1000),
        ("count", "-1", -1),
        ("seed", "3", 3),
        ("flag", "false", False),
        ("flag", "False", False),
        ("flag", "0", False),
        ("flag", "no", False),
        ("flag", "on", True),
        ("name", "1", "1"),
        ("name", "none", "none"),
        ("name", "true", "true"),
        ("name", "1e-3", "1e-3"),
        ("name", "'b'", "'b'"),
        ("name", "(1, 2)", "(1, 2)"),
        ("name", "", ""),
        ("name", "a=b", "a=b"),
        ("inner.name", "nan", "nan"),
        ("maybe_name", "b", "b"),
        ("maybe_name", "1", "1"),
        ("maybe_name", "none", None),
        ("maybe_count", "4", 4),
        ("maybe_rate", "4", 4.0),
        ("every", "None", None),
        ("every", "null", None),
        ("every", "6", 6),
        ("names", "b,c", ("b", "c")),
        ("names", "b", ("b",)),
        ("names", "1,2", ("1", "2")),
        ("names", "('b', 'c')", ("b", "c")),
        ("names", "[b, c]", ("b", "c")),
        ("names", "()", ()),
        ("names", "", ()),
        ("none_yet", "b,c", ("b", "c")),
        ("none_yet", "b", ("b",)),
        ("betas", "0,1", (0.0, 1.0)),
        ("betas", "(0.5, 1e-3)", (0.5, 1e-3)),
        ("sizes", "4", (4,)),
        ("sizes", "4,5,6", (4, 5, 6)),
        ("sizes", "[4, 5]", (4, 5)),
        ("globs", "**.rate", "**.rate"),
        ("globs", "('a', 'b')", ("a", "b")),
        ("mode", "SLOW", Mode.SLOW),
        ("path", "runs/1", pathlib.Path("runs/1")),
        ("activation", "jax.nn.gelu", jax.nn.gelu),
        ("activation", "jax.nn:gelu", jax.nn.gelu),
        ("maybe_inner", "none", None),
        ("inputs", "{'x': 'batch.y'}", {"x": "batch.y"}),
        ("inputs.x", "batch.y", "batch.y"),
        ("inputs.x", "1", "1"),
        ("anything", "3", 3),
        ("anything", "3.5", 3.5),
        ("anything", "[1, [2]]", (1, (2,))),
        ("anything", "true", True),
        ("anything", "some words", "some words"),
        ("**.name", "1", "1"),
    ],
)
def test_a_text_is_read_as_what_stands_there(path, text, value):
    got = edited(Outer(), {path: text})
    assert got == override(Outer(), {path: value})
    assert typed_key(_get(got, path.removeprefix("**."))) == typed_key(value)


def _get(cfg: Any, path: str) -> Any:
    for name in path.split("."):
        cfg = cfg[name] if isinstance(cfg, dict) else getattr(cfg, name)
    return cfg


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("rate", "fast", "Outer.rate: wrong kind of value"),
        ("rate", "none", "NoneType"),
        ("rate", "1,2", "expected: float"),
        ("count", "abc", "expected: int"),
        ("count", "3.5", "expected: int"),
        ("count", "1e-3", "expected: int"),
        ("flag", "2", "expected: bool"),
        ("betas", "0.5", "tuple[float, float]"),
        ("sizes", "a,b", "tuple[int, ...]"),
        ("mode", "MEDIUM", "Mode"),
        ("activation", "jax.nn.gelo", "'gelu'"),
        ("inner", "3", "Inner"),
        ("inputs", "x", "dict[str, str]"),
        ("nam", "b", "'name'"),
        ("rate.x", "1", "rate.x"),
        ("[", "1", "is not a path"),
    ],
)
def test_what_does_not_fit_is_refused(path, text, said):
    with pytest.raises(ConfigError) as error:
        edited(Outer(), {path: text})
    assert said in str(error.value)


def test_all_wrong_values_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        edited(Outer(), {"rate": "fast", "count": "4", "nam": "b"})
    assert str(error.value).startswith("2 values are wrong")
    assert "rate" in str(error.value)
    assert "nam" in str(error.value)


def test_arguments_of_nodes_follow_their_signature():
    node = {"optimizer": lazy(optax.adamw)(1e-3)}
    got = edited(node, {"optimizer.learning_rate": "1", "optimizer.b1": "0", "optimizer.nesterov": "true"})
    assert got == {"optimizer": lazy(optax.adamw)(1.0, b1=0.0, nesterov=True)}
    with pytest.raises(ConfigError):
        edited(node, {"optimizer.learning_rate": "fast"})
    with pytest.raises(ConfigError, match="learning_rate"):
        edited(node, {"optimizer.learning_rat": "1"})


def scale(
    x=None,
    act: Callable[..., Any] = None,  # noqa: RUF013  # as libraries write it
    rate: float | Callable[..., Any] = 0.5,
    name: str | None = None,
    count: int | None = None,
    mode: int | str = "auto",
    either: str | Callable[..., Any] = "same",
    function=jax.nn.relu,
):
    """Arguments that are not written, whose defaults and annotations tell how a text is read."""


UNWRITTEN = {
    "act": ("jax.nn:gelu", jax.nn.gelu),
    "act ": ("jax.nn.gelu", jax.nn.gelu),
    "act  ": ("none", None),
    "rate": ("optax:constant_schedule", optax.constant_schedule),
    "rate ": ("1", 1.0),
    "name": ("1", "1"),
    "name ": ("none", None),
    "count": ("1e5", 100_000),
    "mode": ("3", 3),
    "mode ": ("fast", "fast"),
    "either": ("jax.nn:gelu", "jax.nn:gelu"),
    "function": ("jax.nn:gelu", jax.nn.gelu),
    "x": ("some:words", "some:words"),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_an_unwritten_argument_is_read_by_its_default_and_annotation(name):
    text, value = UNWRITTEN[name]
    got = edited(lazy(scale)(), {name.strip(): text})
    assert typed_key(getattr(got, name.strip())) == typed_key(value)


def test_an_unwritten_activation_becomes_the_function():
    node = {"model": lazy(eqx.nn.MLP)(2, 2, 4, 1)}
    for path, text in {"model.activation": "jax.nn:gelu", "model.final_activation": "jax.nn.gelu"}.items():
        assert edited(node, {path: text})["model"][path.removeprefix("model.")] is jax.nn.gelu
    part = edited({"model": lazy.partial(eqx.nn.MLP)(2, 2, 4, 1)}, {"model.activation": "jax.nn:gelu"})
    assert part["model"].activation is jax.nn.gelu


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("act", "jax.nn:gelo", "act: 'jax.nn:gelo': jax.nn has no 'gelo'"),
        ("act", "gelu", "act: 'gelu' is not a name"),
        ("x", "jax.nn:gelu", "x: nothing says whether a function or a text is wanted"),
        ("count", "jax.nn:gelu", "count: a function does not fit here"),
    ],
)
def test_a_function_that_does_not_fit_is_refused(path, text, said):
    with pytest.raises(ConfigError) as error:
        edited(lazy(scale)(), {path: text})
    assert str(error.value).startswith(said)


def test_pins_and_references_are_replaced_by_their_kind():
    cfg = Outer(rate=pin(0.5), inner=Inner(rate=ref("rate")))
    assert edited(cfg, {"rate": "1"}).rate == pin(1.0)
    assert edited(cfg, {"inner.rate": "1"}).inner.rate == 1.0


@given(st.floats(width=32))
def test_every_float_is_written_as_python_writes_it(value):
    (read,) = readings(repr(value), 0.5)
    assert typed_key(read) == typed_key(value)


@given(st.text())
def test_every_text_is_a_string_where_a_string_stands(text):
    assert edited({"a": "old"}, {"a": text}) == {"a": text}


@given(st.text(), st.sampled_from([None, 1, True, 0.5, (1,), Mode.FAST, pathlib.Path("a")]))
def test_reading_never_fails(text, standing):
    assert readings(text, standing)


def test_what_help_lists_changes_nothing():
    trainer = get_config()
    for path, value in flatten(trainer).items():
        text = value if isinstance(value, str) else repr(value)
        if not hasattr(value, "open"):
            assert edited(trainer, {path: text}) == trainer, path


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("guard", "SkipNonFinite(max_consecutive=3)", SkipNonFinite(max_consecutive=3)),
        ("guard", "RollBack(0.25)", RollBack(0.25)),
        ("guard", "None", None),
        ("stop_after", "StopAfter(seconds=60)", StopAfter(seconds=60.0)),
        ("early_stop", "EarlyStop('test/accuracy', mode='max')", EarlyStop("test/accuracy", mode="max")),
        ("mesh", "DataParallel(devices=4)", data_parallel(4)),
        ("precision", "Precision()", Precision()),
        ("checkpoints", "Checkpoints(every=None, keep=1)", Checkpoints(every=None, keep=1)),
    ],
)
def test_a_config_may_be_written_as_in_python(path, text, value):
    assert getattr(edited(get_config(), {path: text}), path) == value


@pytest.mark.parametrize(
    "text",
    [
        "SkipNonFinite(most=3)",
        "SkipNonFinite(max_consecutive=three)",
        "SkipNonFinite(max_consecutive=3",
        "SkipNonFinite(max_consecutive='a')",
        "SkipNonFinite(**{})",
        "SkipNonFinite(1, 2)",
    ],
)
def test_one_that_is_written_wrongly_is_refused(text):
    with pytest.raises(ConfigError, match="guard"):
        edited(get_config(), {"guard": text})
