"""An argument of a node as the node holds it: its role, and whether it is of the kind that the signature asks for.

A float is a leaf, and so is an int where the signature admits a float, by annotation or by default, in tuples and dicts
too. Kinds are checked only where the annotation is made of plain kinds alone, as `isinstance` would: one that names an
array type, a protocol or a class says nothing here, and neither does one that its own default does not fit.
"""

import collections.abc
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from equikd.config._names import display_name, shortened
from equikd.config._plans import bare
from equikd.config._roles import ARGUMENT, Plan, is_array, normalise, spell
from equikd.config._signatures import admits_float, admits_none, admits_text, parameter_of
from equikd.config._values import Pin, is_node, is_part
from equikd.errors import ConfigError, message

_FLOAT = Plan("float", float)


def checked_argument(function: Any, key: Any, value: Any, path: str) -> Any:
    """The value of an argument as a node holds it.

    Args:
        function: what is called; of a node nothing is known.
        key: name or position.
        value: as it was written.
        path: for messages.

    Raises:
        ConfigError: it is no plain data, or of the wrong kind.
    """
    if isinstance(value, dict) and (odd := [name for name in value if not isinstance(name, str)]):
        raise ConfigError(_odd_keys(function, value, odd[0], path))
    value = normalise(ARGUMENT, value, path)
    if is_node(function) or is_part(value):
        return value
    try:
        rule = _rule(function, key)
    except TypeError:  # the function cannot be hashed
        return value
    if rule is None:
        return value
    kind = type(value)
    if kind is str or kind is bool or value is None:
        _refuse_instead_of_float(rule.parameter, rule.annotation, value, path)
    elif kind is int and rule.floats:
        value = normalise(_FLOAT, value, path)
    elif kind is tuple or isinstance(value, dict):
        value = like(rule.parameter.default, value, path)
        value = normalise(ARGUMENT, with_floats(rule.annotation, value, path), path)
    if not rule.checked or _fits(rule.annotation, value):
        return value
    whole = int(value) if type(value) is float and value.is_integer() else None
    fix = f"write {whole}" if whole is not None and _fits(rule.annotation, whole) else None
    got = "None" if value is None else f"{type(value).__name__} {shortened(value)}"
    got = display_name(value) if callable(value) else got
    raise ConfigError(message(f"{path}: wrong kind of value", got=got, expected=spell(rule.annotation), fix=fix))


class _Rule(NamedTuple):
    """What a signature says of one argument: whether it may be a float, and whether its kind is checked."""

    parameter: inspect.Parameter
    annotation: Any
    floats: bool
    checked: bool


@functools.lru_cache(maxsize=4096)
def _rule(function: Any, key: Any) -> _Rule | None:
    parameter, annotation = parameter_of(function, key)
    if parameter is None:
        return None
    has_default = parameter.default is not inspect.Parameter.empty
    checked = _is_plain(annotation) and (not has_default or _fits(annotation, parameter.default))
    return _Rule(parameter, annotation, admits_float(parameter, annotation), checked)


def _refuse_instead_of_float(parameter: inspect.Parameter, annotation: Any, value: Any, path: str) -> None:
    """Refuse a bool, a text or None where the signature asks for a float, if by its default alone."""
    if value is None:
        wrong = not admits_none(parameter, annotation)
    elif annotation is float:
        wrong = True
    elif type(value) is str:
        wrong = admits_float(parameter, annotation) and not admits_text(parameter, annotation)
    else:
        wrong = type(parameter.default) is float and not _mentions_bool(annotation)
    if wrong:
        raise ConfigError(message(f"{path}: wrong kind of value", got=repr(value), expected="float"))


def _mentions_bool(annotation: Any) -> bool:
    """Whether an annotation names bool."""
    return annotation is bool or any(_mentions_bool(part) for part in typing.get_args(bare(annotation)))


def _odd_keys(function: Any, value: Any, odd: Any, path: str) -> str:
    pairs = shortened(tuple(value.items()), 60)
    if display_name(function) in ("optax:piecewise_constant_schedule", "optax:piecewise_interpolate_schedule"):
        fix = f"ek.optim.PiecewiseConstant(init_value, {pairs}), whose steps and scales are traced"
    else:
        fix = f"name a function of your own that takes pairs, and give it {pairs}"
    return message(f"{path}: dict keys are strings", got=repr(odd), expected="str", fix=fix)


def like(old: Any, new: Any, path: str) -> Any:
    """A new tuple or dict with floats, or pins, wherever the old one has them; what it has more is as all of the old.

    Raises:
        ConfigError: an int has no exact float.
    """
    if type(new) is int and type(old) is float:
        return normalise(_FLOAT, new, path)
    if type(new) in (int, float) and type(old) is Pin:
        return Pin(normalise(_FLOAT, new, path))
    if type(new) is tuple and type(old) is tuple:
        others = _common(old)
        return tuple(like(old[i] if i < len(old) else others, part, f"{path}[{i}]") for i, part in enumerate(new))
    if isinstance(new, dict) and isinstance(old, dict):
        others = _common(tuple(old.values()))
        return {key: like(old.get(key, others), part, f"{path}[{key!r}]") for key, part in new.items()}
    return new


def _common(parts: tuple[Any, ...]) -> Any:
    return 0.0 if parts and all(type(part) is float for part in parts) else None


def with_floats(annotation: Any, value: Any, path: str) -> Any:
    """A value whose ints are floats where the annotation has a float, in tuples and dicts too."""
    annotation = bare(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if type(value) is int:
        kinds = arguments if origin in (typing.Union, types.UnionType) else (annotation,)
        return normalise(_FLOAT, value, path) if float in kinds else value
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            value = with_floats(argument, value, path)
        return value
    if not isinstance(origin, type) or Ellipsis in arguments[:1]:
        return value
    if type(value) is tuple and (issubclass(tuple, origin) or origin is list):
        members = arguments
        if (len(arguments) == 1 and origin is not tuple) or arguments[1:] == (Ellipsis,):
            members = arguments[:1] * len(value)
        if len(members) != len(value):
            return value
        return tuple(with_floats(m, v, f"{path}[{i}]") for i, (m, v) in enumerate(zip(members, value, strict=True)))
    if isinstance(value, dict) and issubclass(dict, origin) and len(arguments) == 2:
        return {key: with_floats(arguments[1], part, f"{path}[{key!r}]") for key, part in value.items()}
    return value


_KINDS = (bool, int, float, str)


def _is_plain(annotation: Any) -> bool:
    """Whether an annotation is made of plain kinds, enums, `Literal`, callables and tuples of these alone."""
    annotation = bare(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (*_KINDS, None, type(None), Callable, typing.Callable):
        return True
    if origin in (Literal, collections.abc.Callable):
        return True
    if origin in (typing.Union, types.UnionType):
        return all(map(_is_plain, arguments))
    if origin is tuple:
        return all(argument is Ellipsis or _is_plain(argument) for argument in arguments)
    return isinstance(annotation, type) and issubclass(annotation, enum.Enum)


def _fits(annotation: Any, value: Any) -> bool:
    """Whether a value is of a plain kind: a bool passes for an int, an int for a float, an array for a number."""
    annotation = bare(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_part(value) or is_array(value):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(argument, value) for argument in arguments)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in arguments)
    if origin is tuple:
        if type(value) is not tuple:
            return False
        members = arguments[:1] * len(value) if arguments[1:] == (Ellipsis,) else arguments
        return len(members) == len(value) and all(map(_fits, members, value))
    if annotation is float:
        return isinstance(value, float | int) and type(value) is not bool
    if annotation in (None, type(None)):
        return value is None
    if annotation in (Callable, typing.Callable) or origin is collections.abc.Callable:
        return callable(value)
    return isinstance(value, annotation)
