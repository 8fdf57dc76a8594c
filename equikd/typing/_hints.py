"""Annotations evaluated, each for itself: one that cannot be costs no other its check.

A name that exists for type checkers only (`if TYPE_CHECKING: ...`), or in a function only, leaves its annotation
unchecked.
"""

import collections.abc
import inspect
import sys
import types
import typing
from typing import Any

from jaxtyping import PyTree


def hints_of(function: Any) -> dict[str, Any]:
    """Parameter (and `return`) -> evaluated annotation of a function, of those that can be.

    Example:
        >>> def f(x: "int", y: "NotThere") -> "list[int]": ...
        >>> hints_of(f)
        {'x': <class 'int'>, 'return': list[int]}
    """
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # whatever an annotation raises
        names = getattr(function, "__globals__", {})
        parts = {
            name: types.SimpleNamespace(
                __annotations__={name: hint}, __type_params__=getattr(function, "__type_params__", ())
            )
            for name, hint in getattr(function, "__annotations__", {}).items()
        }
        return _each(parts, names, _closure(function))


def class_hints(annotation: Any) -> dict[str, Any]:
    """Field -> evaluated annotation of a class and its bases, of those that can be.

    Type variables are what `annotation` (`Box[int]`) and the bases (`class Ints(Box[int])`) say. What Equinox calls
    `AbstractVar` is no field, but what subclasses must have.

    Example:
        >>> T = typing.TypeVar("T")
        >>> class Box(typing.Generic[T]):
        ...     x: list[T]
        >>> class_hints(Box[int])
        {'x': list[int]}
    """
    cls = typing.get_origin(annotation) or annotation
    meant = _meanings(annotation)
    hints = {name: hint for name, hint in _evaluated(cls).items() if not _is_abstract(hint)}
    if not any(meant.values()):
        return hints
    owners = {name: base for base in reversed(cls.__mro__) for name in inspect.get_annotations(base)}
    return {name: _filled(hint, meant.get(owners.get(name, cls), {})) for name, hint in hints.items()}


def _meanings(annotation: Any) -> dict[Any, dict[Any, Any]]:
    """Class -> what its type variables stand for, of a class and its bases."""
    cls = typing.get_origin(annotation) or annotation
    own = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(annotation), strict=False))
    found = {cls: own}
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        if typing.get_origin(base) not in (typing.Generic, typing.Protocol) and base is not object:
            found = {**_meanings(_filled(base, own)), **found} if isinstance(_origin(base), type) else found
    return found


def _origin(annotation: Any) -> Any:
    return typing.get_origin(annotation) or annotation


def _filled(hint: Any, meant: dict[Any, Any]) -> Any:
    """An annotation with type variables replaced."""
    if isinstance(hint, typing.TypeVar):
        return meant.get(hint, hint)
    if isinstance(hint, type(PyTree)) and hasattr(hint, "leaftype"):
        tree: Any = PyTree
        leaf = _filled(hint.leaftype, meant)
        return hint if leaf is hint.leaftype else tree[leaf] if hint.structure is None else tree[leaf, hint.structure]
    origin = typing.get_origin(hint)
    if origin in (collections.abc.Callable, typing.Literal):  # of which nothing is checked
        return hint
    parts = typing.get_args(hint)
    filled = tuple(_filled(part, meant) for part in parts)
    if all(one is other for one, other in zip(parts, filled, strict=True)):
        return hint
    if origin in (typing.Union, types.UnionType):
        return typing.Union[filled]  # noqa: UP007  # a tuple of them
    if origin is typing.Annotated:
        return typing.Annotated[filled]
    return hint.copy_with(filled) if hasattr(hint, "copy_with") else origin[filled]


def _evaluated(cls: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception:
        hints = {}
        for base in reversed(cls.__mro__):
            parts = {
                name: type(base.__name__, (), {"__annotations__": {name: hint}, "__module__": base.__module__,
                                               "__type_params__": getattr(base, "__type_params__", ())})
                for name, hint in inspect.get_annotations(base).items()
            }  # fmt: skip
            hints |= _each(parts, vars(sys.modules.get(base.__module__, types)), dict(vars(base)))
    return hints


def _each(parts: dict[str, Any], names: Any, more: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts.values():
        try:
            found |= typing.get_type_hints(part, names, more, include_extras=True)
        except Exception:  # this one is left out
            continue
    return found


def _closure(function: Any) -> dict[str, Any]:
    """The names of enclosing functions that the body uses."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    found: dict[str, Any] = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return found


def _is_abstract(hint: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and typing.get_origin(hint) in (equinox.AbstractVar, equinox.AbstractClassVar)
