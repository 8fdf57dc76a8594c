"""What a callable's signature says of its arguments: their names, and which of them may be floats."""

import functools
import inspect
import types
import typing
from typing import Any


@functools.lru_cache(maxsize=4096)
def signature_of(function: Any) -> tuple[inspect.Signature | None, dict[str, Any]]:
    """The signature of a callable and the evaluated annotations of its arguments; None where it has none."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None, {}
    target = function.__init__ if isinstance(function, type) else inspect.unwrap(function)
    found = {name: p.annotation for name, p in signature.parameters.items() if p.annotation is not p.empty}
    space = getattr(target, "__globals__", {})
    return signature, {name: _evaluated(annotation, space) for name, annotation in found.items()}


def _evaluated(annotation: Any, space: dict[str, Any]) -> Any:
    """An annotation that may be a string; one by one, so that a name only for type checkers spoils no other."""
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}), space)["it"]
    except Exception:  # an annotation that cannot be evaluated says nothing; any exception may come out of it
        return Any


def named_parameters(function: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a callable that can be given by name."""
    signature, _ = signature_of(function)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {} if signature is None else {name: p for name, p in signature.parameters.items() if p.kind in named}


def admits_float(function: Any, name: Any) -> bool:
    """Whether the signature says that an argument may be a float, by annotation or default."""
    signature, found = signature_of(function)
    parameter = signature.parameters.get(str(name)) if signature is not None else None
    if parameter is not None and type(parameter.default) is float:
        return True
    return mentions(found.get(str(name)), float)


def admits_none(function: Any, name: Any) -> bool:
    """Whether an argument may be None: unless the signature asks for a float, and neither names None nor has it."""
    signature, found = signature_of(function)
    parameter = signature.parameters.get(str(name)) if signature is not None else None
    if parameter is None or parameter.default is None or not admits_float(function, name):
        return True
    return str(name) in found and mentions(found[str(name)], type(None))


def admits_text(function: Any, name: Any) -> bool:
    """Whether the annotation of an argument leaves room for a string; one that says nothing checkable does."""
    signature, found = signature_of(function)
    parameter = signature.parameters.get(str(name)) if signature is not None else None
    if str(name) not in found:  # no annotation: its default alone tells
        return parameter is None or type(parameter.default) is not float
    return _may_be_text(found[str(name)])


def _may_be_text(annotation: Any) -> bool:
    origin = typing.get_origin(annotation) or annotation
    if origin is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(map(_may_be_text, typing.get_args(annotation)))
    if origin is typing.Annotated:
        return _may_be_text(typing.get_args(annotation)[0])
    try:
        return not isinstance(origin, type) or issubclass(str, origin)
    except TypeError:  # a protocol that is not runtime-checkable, which describes what can be called
        return "__call__" not in vars(origin)


def mentions(annotation: Any, kind: type) -> bool:
    """Whether an annotation is a type, or a union with it."""
    if annotation is kind:
        return True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return any(mentions(part, kind) for part in typing.get_args(annotation))
    return False


def needs_key(function: Any) -> bool:
    """Whether a callable has a required argument named `key`, which `resolve` fills below a model."""
    signature, _ = signature_of(function)
    parameter = signature.parameters.get("key") if signature is not None else None
    return parameter is not None and parameter.default is inspect.Parameter.empty
