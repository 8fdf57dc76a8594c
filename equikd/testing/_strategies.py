"""Hypothesis strategies from annotations: instances of a config class whose fields hold what their types admit."""

import enum
import functools
import string
import types
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from equikd.config._dataclass import hints, plans
from equikd.config._plans import Plan, is_config_class, spell
from equikd.config._values import exact_float
from equikd.errors import ConfigError, message, report

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_open: list[type] = []  # classes whose strategies are being made
_TEXT = string.ascii_letters + string.digits + " _-./'\"\\é∂"


def configs(cls: type, *, fields: "Mapping[str, SearchStrategy[Any]] | None" = None) -> "SearchStrategy[Any]":
    """Instances of a config class that its `validate` accepts.

    Args:
        cls: the config class.
        fields: field -> strategy, for fields whose annotation says too little, or to narrow what is drawn.

    Returns:
        A strategy; floats are finite and held exactly by float32, so that nothing is lost in a leaf.

    Raises:
        ConfigError: annotations that cannot be drawn from; all such fields at once.

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

    given = dict(fields or {})
    drawn: dict[str, Any] = {}
    errors = []
    annotations = {name: annotation for name, annotation in hints(cls).items() if name in plans(cls)}
    _open.append(cls)
    for name, annotation in annotations.items():
        try:
            drawn[name] = given[name] if name in given else _field(cls, name, annotation)
        except ConfigError as error:
            errors.append(f"{cls.__qualname__}.{name}: {error}")
    _open.pop()
    if errors:
        raise ConfigError(report(f"{len(errors)} fields cannot be drawn", errors))
    return st.builds(cls, **drawn).filter(_is_valid)


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
        ConfigError: the annotation says too little.
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
    if origin is typing.Annotated:
        return values(arguments[0], integers)
    if annotation in simple:
        return simple[annotation]
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(argument, integers) for argument in arguments))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(values(arguments[0], integers), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values(argument, integers) for argument in arguments))
    if origin is dict:
        return st.dictionaries(st.text(_TEXT, min_size=1, max_size=6), values(arguments[1], integers), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    if is_config_class(annotation):
        return _later(annotation) if annotation in _open else configs(annotation)
    raise ConfigError(
        message(
            f"{spell(annotation)} does not say what to draw",
            expected="float, int, bool, str, enums, Literal, tuples, dicts and config classes",
            fix="give a strategy: fields={'NAME': strategy}",
        )
    )
