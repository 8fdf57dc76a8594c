"""What a callable's signature says of its arguments: their names, and which of them may be floats."""

import functools
import inspect
import types
import typing
from typing import Any

from equikd.config._plans import bare


def signature_of(function: Any) -> tuple[inspect.Signature | None, dict[str, Any]]:
    """The signature of a callable and the evaluated annotations of its arguments; None where it has none."""
    try:
        return _signature_of(function)
    except TypeError:  # it cannot be hashed
        return None, {}


@functools.lru_cache(maxsize=4096)
def _signature_of(function: Any) -> tuple[inspect.Signature | None, dict[str, Any]]:
    target = function
    try:
        if not isinstance(function, type | types.MethodType):
            target = inspect.unwrap(function, stop=_has_own_parameters)
        signature = inspect.signature(target, follow_wrapped=isinstance(target, type | types.MethodType))
    except (TypeError, ValueError):
        return None, {}
    code = target.__init__ if isinstance(target, type) else inspect.unwrap(target) if target is function else target
    found = {name: p.annotation for name, p in signature.parameters.items() if p.annotation is not p.empty}
    space = getattr(code, "__globals__", {})
    return signature, {name: _evaluated(annotation, space) for name, annotation in found.items()}


def _has_own_parameters(function: Any) -> bool:
    """Whether a wrapper takes other arguments than what it wraps: it names some that are not handed over."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
        wrapped = inspect.signature(function.__wrapped__).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    variadic = [p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    named = {p.name for p in parameters if not p.name.startswith("__")}.difference(variadic)  # __: beartype's own
    return not variadic or not named <= wrapped.keys()


def _evaluated(annotation: Any, space: dict[str, Any]) -> Any:
    """An annotation that may be a string; one by one, so that a name only for type checkers spoils no other."""
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}), space)["it"]
    except Exception:  # an annotation that cannot be evaluated says nothing; any exception may come out of it
        return Any


def named_parameters(function: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a callable that can be given by name."""
    signature, _ = signature_of(function)
    return {} if signature is None else {name: p for name, p in signature.parameters.items() if p.kind in _BY_NAME}


def parameter_of(function: Any, key: Any) -> tuple[inspect.Parameter | None, Any]:
    """The parameter that takes an argument given by name or position, and its annotation; None where none is known."""
    signature, found = signature_of(function)
    if signature is None:
        return None, inspect.Parameter.empty
    parameters = signature.parameters
    if isinstance(key, int):
        places = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        rest = inspect.Parameter.VAR_POSITIONAL
        parameter = places[key] if key < len(places) else next((p for p in parameters.values() if p.kind is rest), None)
    else:
        parameter, rest = parameters.get(key), inspect.Parameter.VAR_KEYWORD
        if parameter is None or parameter.kind not in _BY_NAME:
            parameter = next((p for p in parameters.values() if p.kind is rest), None)
    return parameter, inspect.Parameter.empty if parameter is None else found.get(parameter.name, parameter.empty)


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def admits_float(parameter: inspect.Parameter | None, annotation: Any) -> bool:
    """Whether an argument may be a float, by annotation or default."""
    return (parameter is not None and type(parameter.default) is float) or mentions(annotation, float)


def admits_none(parameter: inspect.Parameter | None, annotation: Any) -> bool:
    """Whether an argument may be None: unless the signature asks for a float, and neither names None nor has it."""
    if parameter is None or parameter.default is None or not admits_float(parameter, annotation):
        return True
    return mentions(annotation, type(None))


def admits_text(parameter: inspect.Parameter | None, annotation: Any) -> bool:
    """Whether the annotation of an argument leaves room for a string; one that says nothing checkable does."""
    if annotation is inspect.Parameter.empty:  # its default alone tells
        return parameter is None or type(parameter.default) is not float
    return _may_be_text(annotation)


def _may_be_text(annotation: Any) -> bool:
    annotation = bare(annotation)
    origin = typing.get_origin(annotation) or annotation
    if origin is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(map(_may_be_text, typing.get_args(annotation)))
    try:
        return not isinstance(origin, type) or issubclass(str, origin)
    except TypeError:  # a protocol that is not runtime-checkable, which describes what can be called
        return "__call__" not in vars(origin)


def mentions(annotation: Any, kind: type) -> bool:
    """Whether an annotation is a type, or a union with it."""
    annotation = bare(annotation)
    if annotation is kind:
        return True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(mentions(part, kind) for part in typing.get_args(annotation))
    return False


def needs_key(function: Any) -> bool:
    """Whether a callable has a required argument named `key`, which `resolve` fills below a model."""
    signature, _ = signature_of(function)
    parameter = signature.parameters.get("key") if signature is not None else None
    return parameter is not None and parameter.default is inspect.Parameter.empty
