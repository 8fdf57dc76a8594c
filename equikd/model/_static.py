"""What a model holds outside its leaves: static fields, and what functions close over.

Both are part of the compiled program. An array there would be frozen into it, a traced float would leak out of its
trace, so both are looked for and refused with the path, also inside objects of ordinary classes, which JAX does not
look into. Only a Python float that a module keeps in a static field as it was given is taken as what it is: a float
that is static by the class's declaration.
"""

import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from equikd._compat import Tracer
from equikd.config._values import float_dtype, typed_key
from equikd.errors import ConfigError, message, report
from equikd.tree import items, join, named_leaves


class Place(NamedTuple):
    """A static field, or a leaf that is no array.

    Attributes:
        path: in the model.
        name: how a message names it.
        value: what it holds.
        static: whether it is a static field.
    """

    path: str
    name: str
    value: Any
    static: bool


def places(model: Any) -> Iterator[Place]:
    """All static fields of the modules in a model, and its leaves that are functions or objects of ordinary classes."""
    for at, module in _modules(model):
        for f in dataclasses.fields(module):
            if f.metadata.get("static") and hasattr(module, f.name):
                path = join((*at, f.name))
                yield Place(path, f"{path} ({type(module).__name__}.{f.name})", getattr(module, f.name), True)
    for path, leaf in named_leaves(model).items():
        if (callable(leaf) or _is_object(leaf)) and not _is_array(leaf):
            yield Place(path, path or "the function", leaf, False)


def _modules(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, eqx.Module):
        yield at, value
    if not _is_array(value) and not isinstance(value, str):
        for key, part in items(value).items():
            yield from _modules(part, (*at, key))


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def contents(place: Place) -> Iterator[tuple[Any, bool]]:
    """`(part, whether it is hidden)` of what a place holds, containers, functions and objects opened.

    Hidden is what a function closes over or an object of an ordinary class holds, and all inside a leaf.
    """
    seen: set[int] = set()
    pending = [(place.value, False)]  # a list, since objects may be linked deeper than Python recurses
    while pending:
        value, hidden = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        parts = [] if _is_array(value) else list(items(value).values())
        if not parts:
            yield value, hidden
        held = [] if _is_array(value) else _closed_over(value)
        held += _attributes(value) if not parts and _is_object(value) else []
        inside = hidden or not place.static
        pending += reversed([(part, inside) for part in parts] + [(part, True) for part in held])


_LEFT_SHUT = ("builtins", "jax", "jaxlib", "numpy", "jaxtyping")


def _is_object(value: Any) -> bool:
    """Whether a value is an object of an ordinary class, which may hold anything."""
    if isinstance(value, type | types.ModuleType | functools.partial) or is_plain(value) or _is_array(value):
        return False
    return type(value).__module__.partition(".")[0] not in _LEFT_SHUT


def _attributes(value: Any) -> list[Any]:
    """The values of an object's attributes, in its `__dict__` and in slots."""
    found = list(getattr(value, "__dict__", {}).values())
    for cls in type(value).__mro__:
        for slot in vars(cls).values() if "__slots__" in vars(cls) else ():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found.append(slot.__get__(value, type(value)))
                except AttributeError:  # not set
                    continue
    return found


def _closed_over(value: Any) -> list[Any]:
    """What a function holds: its closure, its defaults, the arguments of a partial, the object of a method."""
    if isinstance(value, set | frozenset | collections.deque):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.BuiltinMethodType):
        return [] if isinstance(value.__self__, types.ModuleType) else [value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    wrapped = getattr(value, "__wrapped__", None) if callable(value) and not isinstance(value, type) else None
    return [] if wrapped is None else [wrapped]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def misplaced_arrays(model: Any) -> Iterator[str]:
    """Messages for arrays in static fields, and for arrays made in the construction that a function closes over."""
    for place in places(model):
        parts = list(contents(place))
        arrays = [part for part, hidden in parts if _is_array(part) and not hidden]
        if place.static and arrays:
            yield message(
                f"model: the static field {place.name} holds an array, which would be frozen into the program",
                got=_spec(arrays[0]),
                fix="drop static=True, or keep a Python value in it",
            )
        elif any(isinstance(part, Tracer) for part, hidden in parts if hidden):
            ordinary = _owner(place) is not None
            yield message(
                f"model: {place.name} is {_holder(place)} an array made with the model",
                got=_spec(next(part for part, _ in parts if isinstance(part, Tracer))),
                expected="a module, or an object without arrays" if ordinary else "a function of its arguments alone",
                fix="derive its class from eqx.Module"
                if ordinary
                else "keep the array in a field of the module, and write the function as a method",
            )
        elif place.static and not _is_hashable(place.value):
            yield message(
                f"model: the static field {place.name} holds what cannot be hashed",
                got=f"a {type(place.value).__name__}",
                expected="a hashable value, since it is part of the program",
                fix="write a tuple, or drop static=True",
            )


def _owner(place: Place) -> Any:
    """The object of an ordinary class that a place is or, in containers, begins with; None where it is a function."""
    if _is_object(place.value) and not isinstance(place.value, tuple):
        return place.value
    openable = (part for part, _ in contents(place) if _is_object(part) or isinstance(part, _FUNCTIONS))
    first = next(openable, None)
    return None if isinstance(first, _FUNCTIONS) else first


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)


def _holder(place: Place) -> str:
    owner = _owner(place)
    if owner is not None:
        return f"an object ({type(owner).__name__}, no module) that holds"
    return "a function that closes over"


def _spec(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def traced_places(model: Any) -> dict[str, str]:
    """Path -> message, of the places outside a model's leaves that hold tracers."""
    found = {}
    for place in places(model):
        parts = [hidden for part, hidden in contents(place) if isinstance(part, Tracer)]
        if parts:
            what = _holder(place) if any(parts) else "static, and holds a number computed from"
            found[place.path] = f"model: {place.name} is {what} a traced float of the config"
    return found


def given_floats(model: Any, floats: dict[int, str]) -> dict[str, str]:
    """Config path -> `Class.field`, of floats that modules keep in a static field as they were given.

    Args:
        model: a model built with Python floats.
        floats: `id` of each float object -> its config path.
    """
    found = {}
    for place in places(model):
        for part, hidden in contents(place):
            if not hidden and id(part) in floats:
                found[floats[id(part)]] = place.name.rpartition("(")[2].rstrip(")")
    return found


_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype)


def plain_parts(model: Any) -> dict[str, tuple[str, Any]]:
    """Place -> (its name, value) of the static values that are alike in two builds of one model: numbers and names."""
    found = {}
    for place in places(model):
        for index, (part, hidden) in enumerate(contents(place)):
            if not hidden and (is_plain(part) or _is_named(part)):
                found[f"{place.path}#{index}"] = (place.name, part)
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or the like, which compares by value."""
    return value is None or isinstance(value, _PLAIN)


def _is_named(value: Any) -> bool:
    return callable(value) and "<" not in getattr(value, "__qualname__", "<")


def same(first: Any, second: Any) -> bool:
    """Whether two plain values are the same, floats to the precision of a leaf."""
    if type(first) is float and type(second) is float:
        dtype = float_dtype().type
        return typed_key(float(dtype(first))) == typed_key(float(dtype(second)))
    if _is_named(first) and _is_named(second):
        names = [(getattr(value, "__module__", None), value.__qualname__) for value in (first, second)]  # pyright: ignore
        return first is second or names[0] == names[1]
    return typed_key(first) == typed_key(second)


def refuse(headline: str, errors: list[str]) -> None:
    """Raise a report of at most twenty messages, if there are any.

    Raises:
        ConfigError: there are.
    """
    if errors:
        more = [f"... and {len(errors) - 20} more"] if len(errors) > 20 else []
        raise ConfigError(report(headline, [*errors[:20], *more]))
