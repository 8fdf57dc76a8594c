"""Hypothesis strategies from annotations: instances of a config class whose fields hold what their types admit."""

import enum
import string
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from equikd.config._dataclass import hints, plans
from equikd.config._roles import is_config_class, spell
from equikd.config._values import exact_float
from equikd.errors import ConfigError, message, report

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

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
    for name, annotation in hints(cls).items():
        if name not in plans(cls):
            continue
        try:
            drawn[name] = given[name] if name in given else _field(cls, name, annotation)
        except ConfigError as error:
            errors.append(f"{cls.__qualname__}.{name}: {error}")
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


def _field(cls: type, name: str, annotation: Any) -> Any:
    from hypothesis import strategies as st

    made = plans(cls)[name]
    if made.kind == "integer":
        return st.integers(0, 2**32 - 1) if made.unsigned else st.integers(-(2**31), 2**31 - 1)
    return values(annotation)


def values(annotation: Any) -> Any:
    """A strategy of values that fit an annotation.

    Raises:
        ConfigError: the annotation says too little.
    """
    from hypothesis import strategies as st

    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    simple = {
        float: st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
        .map(lambda value: float(str(np.float32(value))))  # what `host` gives back of a leaf
        .filter(_fits_a_leaf),
        int: st.integers(),
        bool: st.booleans(),
        str: st.text(_TEXT, max_size=12),
        bytes: st.binary(max_size=8),
        complex: st.complex_numbers(),
        type(None): st.none(),
    }
    if origin is typing.Annotated:
        return values(arguments[0])
    if annotation in simple:
        return simple[annotation]
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(st.text(_TEXT, min_size=1, max_size=6), values(arguments[1]), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    if is_config_class(annotation):
        return configs(annotation)
    raise ConfigError(
        message(
            f"{spell(annotation)} does not say what to draw",
            expected="float, int, bool, str, enums, Literal, tuples, dicts and config classes",
            fix="give a strategy: fields={'NAME': strategy}",
        )
    )
