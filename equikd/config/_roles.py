"""Values as a config holds them: checked against the plan of their field, and normalised.

Ints where floats belong become floats, numpy scalars Python numbers, dicts immutable; what does not fit is refused,
naming the field. References, pins and nodes may stand in any field.
"""

import enum
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from equikd._compat import Tracer
from equikd.config._names import shortened
from equikd.config._plans import ANY as ANY
from equikd.config._plans import ARGUMENT as ARGUMENT
from equikd.config._plans import Plan as Plan
from equikd.config._plans import bare
from equikd.config._plans import is_config_class as is_config_class
from equikd.config._plans import plan as plan
from equikd.config._plans import spell as spell
from equikd.config._values import FrozenDict, Pin, check_plain, exact_float, is_config, is_part, number, whole_float
from equikd.errors import ConfigError, message


def is_array(value: Any) -> bool:
    """Whether a value is an array or a tracer."""
    return isinstance(value, jax.Array | np.ndarray)


def normalise(plan: Plan, value: Any, path: str) -> Any:
    """The value as the config holds it: ints where floats belong become floats, numpy scalars Python numbers.

    Raises:
        ConfigError: the value does not fit the annotation; the message names `path`.
    """
    value = number(value)
    if plan.kind == "opaque":
        return value
    if is_part(value):
        if is_config(value) and not _admits(plan.annotation, value):
            raise _unfit(plan, value, path)
        if type(value) is Pin and not _takes_floats(plan):
            raise _unfit(plan, value, path)
        return value
    if is_uncalled(value):
        value = value.__equikd_target__
    return _NORMALISERS[plan.kind](plan, value, path)


def _takes_floats(plan: Plan) -> bool:
    """Whether a pinned float may stand in a field."""
    if plan.kind == "static":  # float | None, or a float that is static anyway
        annotation = bare(plan.annotation)
        members = typing.get_args(annotation) or (annotation,)
        return any(bare(member) in (float, Any) for member in members)
    return plan.kind in ("float", "any", "argument") or any(map(_takes_floats, plan.members))


def _admits(annotation: Any, value: Any) -> bool:
    """Whether a config may stand in a field; config classes in the annotation must be its own, others say nothing."""
    annotation = bare(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_admits(part, value) for part in typing.get_args(annotation) if part is not type(None))
    if (typing.get_origin(annotation) or annotation) in (*_SCALARS, tuple, dict):
        return False
    return not is_config_class(annotation) or isinstance(value, annotation)


_SCALARS = (bool, int, float, complex, str, bytes)


def is_uncalled(value: Any) -> bool:
    """Whether a value is a `lazy(...)` that nobody has called: a name."""
    return "__equikd_target__" in getattr(type(value), "__slots__", ())


def _unfit(plan: Plan, value: Any, path: str) -> ConfigError:
    fix = None
    if plan.kind == "dict":  # the likeliest slip: the part itself, or another container of parts
        part = value[0] if isinstance(value, tuple | list) and value else value
        part = f"{type(part).__qualname__}(...)" if is_config(part) else shortened(part, 60)
        fix = f'give each a name: {{"name": {part}}}'
    if plan.kind == "float" and is_array(value) and np.ndim(value):
        fix = (
            "one number; many at once are stacked configs, jax.tree.map(lambda *x: jnp.stack(x), *cfgs), under jax.vmap"
        )
    got = shortened(value) if is_config(value) or is_array(value) else f"{type(value).__name__} {shortened(value)}"
    return ConfigError(message(f"{path}: wrong kind of value", got=got, expected=spell(plan.annotation), fix=fix))


def _normalise_float(plan: Plan, value: Any, path: str) -> Any:
    if _is_float(value) or type(value) is int:
        return exact_float(value if type(value) is int else float(value), path)
    if is_array(value) and np.ndim(value) == 0:
        return float_array(value, path)
    raise _unfit(plan, value, path)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) and not isinstance(value, enum.Enum)


def _is_integers(value: Any) -> bool:
    return is_array(value) and jax.numpy.issubdtype(value.dtype, jax.numpy.integer)


def float_array(value: Any, path: str) -> Any:
    """A 0-d float array for a float field, with a fixed dtype; a tracer passes as it is."""
    if isinstance(value, Tracer):
        return value
    if not np.issubdtype(value.dtype, np.floating) and not jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
        raise ConfigError(message(f"{path}: wrong kind of array", got=f"{value.dtype}[]", expected="float"))
    if isinstance(value, np.ndarray):
        return exact_float(float(value), path)
    return jax.lax.convert_element_type(value, value.dtype) if value.weak_type else value


def _normalise_integer(plan: Plan, value: Any, path: str) -> Any:
    low, high = (0, 2**32) if plan.unsigned else (-(2**31), 2**31)
    if _is_integers(value) and np.ndim(value) == 0:
        if not isinstance(value, np.ndarray):
            return value
        value = value.item()  # a numpy array can be changed in place
    if type(value) is not int:
        raise _unfit(plan, value, path)
    if not low <= value < high:
        raise ConfigError(message(f"{path}: out of range", got=str(value), expected=f"{low} <= value < {high}"))
    return value


def _normalise_static(plan: Plan, value: Any, path: str) -> Any:
    annotation = bare(plan.annotation)
    value = _numbers(value)
    if type(value) is list and not fits(annotation, tuple(value)):  # or the advice were to write a tuple
        raise _unfit(plan, value, path)
    check_plain_deep(value, path)
    if annotation is float and type(value) is int:
        return whole_float(value, path)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [bare(part) for part in typing.get_args(annotation)]
        if float in kinds and type(value) is int and int not in kinds:
            return whole_float(value, path)
    if not fits(annotation, value):
        raise _unfit(plan, value, path)
    return value


def _numbers(value: Any) -> Any:
    """The value with all numpy scalars in it, in tuples and dicts too, as Python numbers."""
    if type(value) is tuple:
        return tuple(map(_numbers, value))
    if isinstance(value, dict):
        return FrozenDict((key, _numbers(part)) for key, part in value.items())
    return number(value)


def fits(annotation: Any, value: Any) -> bool:
    """Whether a static value fits an annotation; annotations that say nothing checkable fit everything."""
    annotation = bare(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_part(value) or annotation is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(argument, value) for argument in arguments)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in arguments)
    if annotation in (int, bool, float, complex):
        return type(value) is annotation
    if annotation is type(None) or annotation is None:
        return value is None
    if origin is tuple or annotation is tuple:
        if not isinstance(value, tuple) or not arguments:
            return isinstance(value, tuple)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(fits(arguments[0], part) for part in value)
        return len(arguments) == len(value) and all(map(fits, arguments, value))
    if origin is type:
        return isinstance(value, type)
    if annotation is Callable or origin is Callable:
        return callable(value)
    if isinstance(annotation, type) and (annotation in (str, bytes) or issubclass(annotation, enum.Enum)):
        return isinstance(value, annotation)
    return not is_config_class(annotation)


def check_plain_deep(value: Any, path: str) -> None:
    """Refuse built objects anywhere in a value."""
    if type(value) is tuple:
        for index, part in enumerate(value):
            check_plain_deep(part, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, part in value.items():
            check_plain_deep(part, f"{path}[{key!r}]")
    else:
        check_plain(value, path)


def _normalise_tuple(plan: Plan, value: Any, path: str) -> Any:
    if type(value) is not tuple:
        if not isinstance(value, dict):
            check_plain(value, path)
        raise _unfit(plan, value, path)
    members = plan.members * len(value) if plan.kind == "sequence" else plan.members
    if len(members) != len(value):
        raise _unfit(plan, value, path)
    return tuple(normalise(m, part, f"{path}[{i}]") for i, (m, part) in enumerate(zip(members, value, strict=True)))


def _normalise_dict(plan: Plan, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _unfit(plan, value, path)
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(message(f"{path}: dict keys are strings", got=repr(key), expected="str"))
    return FrozenDict((key, normalise(plan.members[0], part, f"{path}[{key!r}]")) for key, part in value.items())


def _normalise_union(plan: Plan, value: Any, path: str) -> Any:
    member = choose(plan, value)
    if member is not None:
        return normalise(member, value, path)
    if isinstance(value, dict) or (type(value) is list and choose(plan, tuple(value)) is None):
        raise _unfit(plan, value, path)
    check_plain_deep(value, path)
    if type(value) is int and any(m.kind == "float" for m in plan.members):
        return exact_float(value, path)
    raise _unfit(plan, value, path)


def choose(plan: Plan, value: Any) -> Plan | None:
    """The member of a union that a value belongs to."""
    for member in plan.members:
        exact = {
            "float": _is_float(value) or (is_array(value) and not _is_integers(value)),
            "integer": type(value) is int or _is_integers(value),
            "static": not is_array(value) and fits(member.annotation, value),
            "tuple": type(value) is tuple and len(value) == len(member.members),
            "sequence": type(value) is tuple,
            "dict": isinstance(value, dict),
            "any": not is_array(value) and (_is_instance(value, member.annotation) or is_config(value)),
        }.get(member.kind, False)
        if exact:
            return member
    loose = [m for m in plan.members if m.kind == "any" and m.annotation is Any]
    callables = [m for m in plan.members if m.kind == "any"] if callable(value) else []
    return next(iter(loose + callables), None)


def _is_instance(value: Any, annotation: Any) -> bool:
    try:
        return isinstance(annotation, type) and isinstance(value, annotation)
    except TypeError:  # Any, and a protocol that is not runtime-checkable
        return False


def _normalise_any(plan: Plan, value: Any, path: str) -> Any:
    if is_config_class(plan.annotation) and isinstance(value, tuple | list | dict):
        raise _unfit(plan, value, path)
    if type(value) is tuple:
        return tuple(normalise(plan, part, f"{path}[{index}]") for index, part in enumerate(value))
    if isinstance(value, dict):
        return _normalise_dict(Plan("dict", dict, (plan,)), value, path)
    if plan.kind == "argument":
        if _is_float(value):
            return exact_float(value, path)
        if is_array(value) and np.ndim(value) == 0 and jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
            return float_array(value, path)
    check_plain(value, path)
    if not fits(plan.annotation, value):
        raise _unfit(plan, value, path)
    return value


_NORMALISERS: dict[str, Callable[[Plan, Any, str], Any]] = {
    "float": _normalise_float,
    "integer": _normalise_integer,
    "static": _normalise_static,
    "tuple": _normalise_tuple,
    "sequence": _normalise_tuple,
    "dict": _normalise_dict,
    "union": _normalise_union,
    "any": _normalise_any,
    "argument": _normalise_any,
}
