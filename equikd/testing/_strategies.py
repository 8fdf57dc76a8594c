"""Hypothesis strategies from annotations: instances of a config class whose fields hold what their types admit."""

import contextlib
import dataclasses
import enum
import functools
import inspect
import string
import types
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from equikd.config._dataclass import hints, plans
from equikd.config._plans import Plan, is_config_class, spell
from equikd.config._values import exact_float
from equikd.errors import ConfigError, message, nearest, report
from equikd.wiring import KeyPath

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_open: list[type] = []  # classes whose strategies are being made
_KEY_PATHS = ("preds", "batch.x", "batch['a b']", "preds.heads[-1].logits", "interms.*", "params.layers[1:]")
_TEXT = string.ascii_letters + string.digits + " _-./'\"\\é∂"


def configs(cls: type, *, fields: "Mapping[str, SearchStrategy[Any]] | None" = None) -> "SearchStrategy[Any]":
    """Instances of a config class that its `validate` accepts.

    A field whose annotation says too little (a callable, `Any`, a class that is no config) keeps its default; of a
    union the members are drawn that say enough. A `KeyPath` is a valid key path.

    Args:
        cls: the config class.
        fields: field -> strategy, for fields whose annotation says too little, or to narrow what is drawn.

    Returns:
        A strategy; floats are finite and held exactly by float32, so that nothing is lost in a leaf.

    Raises:
        ConfigError: fields without a default whose annotations cannot be drawn from, all at once; names in `fields`
            that are no fields; an abstract class.

    Example:
        >>> from equikd.config import config
        >>> @config
        ... class Opt:
        ...     learning_rate: float
        >>> import hypothesis
        >>> isinstance(hypothesis.find(configs(Opt), lambda opt: opt.learning_rate > 1), Opt)
        True
    """
    from hypothesis import strategies as st

    if inspect.isabstract(cls):
        raise ConfigError(message(f"{cls.__qualname__} is abstract", fix="take a class of which instances can be made"))
    given = dict(fields or {})
    drawn: dict[str, Any] = {}
    errors = []
    _refuse_unknown(cls, given)
    missing = dataclasses.MISSING
    required = {
        one.name for one in dataclasses.fields(cls) if one.default is missing and one.default_factory is missing
    }
    _open.append(cls)
    try:
        for name, annotation in hints(cls).items():
            if name not in plans(cls):
                continue
            try:
                drawn[name] = given[name] if name in given else _field(cls, name, annotation)
            except _TooLittle as error:
                if name in required:
                    errors.append(_undrawable(cls, name, error))
    finally:
        _open.pop()
    if errors:
        raise ConfigError(report(f"{len(errors)} field{'s' * (len(errors) > 1)} cannot be drawn", errors))
    return st.builds(cls, **drawn).filter(_is_valid)


class _TooLittle(Exception):
    """An annotation from which nothing can be drawn."""

    def __init__(self, annotation: Any) -> None:
        super().__init__(annotation)
        self.annotation = annotation


def _undrawable(cls: type, name: str, error: _TooLittle) -> str:
    if error.__cause__ is not None:
        inner = error.annotation.__qualname__
        fix = f"give a strategy: fields={{{name!r}: configs({inner}, fields=...)}}"
        return message(f"{cls.__qualname__}.{name}: no {inner} can be drawn", got=str(error.__cause__), fix=fix)
    return message(
        f"{cls.__qualname__}.{name}: {spell(error.annotation)} does not say what to draw",
        expected="float, int, bool, str, KeyPath, enums, Literal, tuples, dicts and config classes, or a default",
        fix=f"give a strategy: fields={{{name!r}: strategy}}",
    )


def _refuse_unknown(cls: type, given: Mapping[str, Any]) -> None:
    known = list(plans(cls))
    for name in given:
        if name not in known:
            what = f"fields: {cls.__qualname__} has no field {name!r}"
            raise ConfigError(message(what, expected=", ".join(known), near=nearest(name, known)))


def _is_valid(cfg: Any) -> bool:
    check = getattr(type(cfg), "validate", None)
    try:
        return check is None or check(cfg) is None or True
    except (ValueError, TypeError, AssertionError):
        return False


def _fits_a_leaf(value: float) -> bool:
    try:
        exact_float(value, "")
    except ConfigError:
        return False
    return True


@functools.cache
def _later(cls: type) -> Any:
    """The strategy of a class within itself."""
    from hypothesis import strategies as st

    return st.deferred(lambda: configs(cls))


def _field(cls: type, name: str, annotation: Any) -> Any:
    from hypothesis import strategies as st

    leaves = [plan for plan in _members(plans(cls)[name]) if plan.kind == "integer"]
    if not leaves:
        return values(annotation)
    return values(annotation, st.integers(0, 2**32 - 1) if leaves[0].unsigned else st.integers(-(2**31), 2**31 - 1))


def _members(plan: Plan) -> Iterator[Plan]:
    yield plan
    for member in plan.members:
        yield from _members(member)


def values(annotation: Any, integers: Any = None) -> Any:
    """A strategy of values that fit an annotation; `integers`: that of its ints, all of them by default.

    Raises:
        _TooLittle: the annotation does not say what to draw.
    """
    from hypothesis import strategies as st

    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    simple = {
        float: st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
        .map(lambda value: float(str(np.float32(value))))  # what `host` gives back of a leaf
        .filter(_fits_a_leaf),
        int: st.integers() if integers is None else integers,
        bool: st.booleans(),
        str: st.text(_TEXT, max_size=12),
        bytes: st.binary(max_size=8),
        complex: st.complex_numbers(),
        type(None): st.none(),
    }
    if annotation == KeyPath:
        return st.sampled_from(_KEY_PATHS)
    if origin is typing.Annotated:
        return values(arguments[0], integers)
    if annotation in simple:
        return simple[annotation]
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*_drawable(arguments, integers, annotation))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(values(arguments[0], integers), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values(argument, integers) for argument in arguments))
    if origin is dict:
        return st.dictionaries(st.text(_TEXT, min_size=1, max_size=6), values(arguments[1], integers), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    if is_config_class(annotation) and not inspect.isabstract(annotation):
        try:
            return _later(annotation) if annotation in _open else configs(annotation)
        except ConfigError as error:  # one of its own fields says too little
            raise _TooLittle(annotation) from error
    raise _TooLittle(annotation)


def _drawable(members: tuple[Any, ...], integers: Any, union: Any) -> list[Any]:
    """Strategies of the members of a union that say enough."""
    found = []
    for member in members:
        with contextlib.suppress(_TooLittle):
            found.append(values(member, integers))
    if not found:
        raise _TooLittle(union)
    return found
