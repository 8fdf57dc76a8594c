"""Values of a config from the words of a command line: `--cfg.optimizer.learning_rate=1e-3`.

The text of a flag is read as what stands at its path is. Where a string stands it stays a string, even `1` or `none`;
for a float `1` is 1.0, for an int `1e5` is 100000, for a tuple `0.9,0.99` is a tuple, for a function `jax.nn.gelu` is
that function; for a config of a class that the annotation names, `SkipNonFinite(max_consecutive=3)` is one. For an
argument that is not written yet its default and its annotation tell. Where nothing tells, it is
a Python literal if it is one. The edit itself, and with it every check of paths and kinds, is `override`.
"""

import ast
import collections.abc
import enum
import functools
import inspect
import pathlib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from equikd.config._dataclass import hints
from equikd.config._edit import override
from equikd.config._names import import_object
from equikd.config._node import parts
from equikd.config._plans import is_config_class
from equikd.config._signatures import mentions, named_parameters, signature_of
from equikd.config._values import is_config, is_node
from equikd.errors import ConfigError, message, report
from equikd.tree import PathError, get, is_glob, matches, parse, walk

T = TypeVar("T")

BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def edited(cfg: T, changes: Mapping[str, str]) -> T:
    """A copy of a config with values from a command line.

    Args:
        cfg: a config, node or container; a trainer.
        changes: `{path: text}`; paths as in `override`.

    Returns:
        The edited copy.

    Raises:
        ConfigError: all wrong paths and values at once.

    Example:
        >>> edited({"rate": 0.1, "name": "a"}, {"rate": "1", "name": "1"})
        {'rate': 1.0, 'name': '1'}
    """
    errors = []
    for path, text in changes.items():
        try:
            cfg = _edit(cfg, path, text)
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError(report(f"{len(errors)} values are wrong", errors))
    return cfg


def _edit(cfg: T, path: str, text: str) -> T:
    """The edit with the first reading of the text that fits; its annotations decide."""
    try:
        first, *others = readings(text, *_guide(cfg, path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        return override(cfg, {path: first})
    except ConfigError:
        for value in others:
            try:
                return override(cfg, {path: value})
            except ConfigError:
                continue
        raise


def _guide(cfg: Any, path: str) -> tuple[Any, Any]:
    """What stands at a path (at the first match of a pattern), or would by default, and its annotation; or None."""
    try:
        if is_glob(path):
            keys = next((at for at, _ in walk(cfg) if at and matches(path, at)), ())
        else:
            keys = parse(path)
        if not keys:
            return None, None
        default, annotation = _declared(get(cfg, keys[:-1]), keys[-1])
    except PathError:  # a wrong path, of which `override` will tell
        return None, None
    try:
        return get(cfg, keys), annotation
    except PathError:  # an argument that is not written yet
        return default, annotation


def _declared(parent: Any, key: Any) -> tuple[Any, Any]:
    """Default and annotation of a field of a config or of an argument of a node."""
    if is_config(parent):
        return None, hints(type(parent)).get(key)
    function, arguments, _ = parts(parent) if is_node(parent) else (None, {}, "")
    if function is functools.partial:
        function = arguments.get(0)
    if function is None or is_node(function):
        return None, None
    parameter, annotation = named_parameters(function).get(key), signature_of(function)[1].get(str(key))
    default = None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
    if isinstance(default, str) and any(mentions(annotation, kind) for kind in (bool, int, float)):
        return None, annotation  # such as "auto" of an `int | str`
    return default, annotation


def readings(text: str, standing: Any = None, annotation: Any = None) -> list[Any]:
    """What a text may mean where a value stands, the likeliest first.

    Args:
        text: as the user wrote it.
        standing: the value that it is to replace; None where that says nothing.
        annotation: of the field or argument, which decides where no value does.

    Raises:
        ConfigError: it is to be a function, and there is none of that name; or it is the name of a function, and
            neither value nor annotation says whether a function or a text is wanted.

    Example:
        >>> readings("1", 0.5), readings("none", "a"), readings("a,b", ("c",)), readings("none", 3)[0]
        ([1.0], ['none'], [('a', 'b')], None)
    """
    literal = _literal(text)
    written = _instance(text, annotation)
    if written is not None:
        return [written]
    if isinstance(standing, enum.Enum):
        return [type(standing).__members__.get(text, text)]
    if isinstance(standing, str):
        return [literal, text] if isinstance(literal, tuple) else [text]
    if literal is None:
        return [None, text]
    if standing is None:
        return _by_annotation(text, literal, annotation)
    if isinstance(standing, bool):
        return [BOOLS.get(text.lower(), literal)]
    if isinstance(standing, float) and literal == text and not text.isidentifier() and asks_callable(annotation):
        return [named(text)]
    if isinstance(standing, float) or (isinstance(standing, int) and isinstance(literal, float)):
        return [_number(text, type(standing), literal)]
    if isinstance(standing, tuple):
        return [literal if text[:1] in ("(", "[") and isinstance(literal, tuple) else _tuple(text, standing)]
    if isinstance(standing, pathlib.PurePath):
        return [type(standing)(text)]
    if callable(standing) and hasattr(standing, "__name__"):
        return [literal if isinstance(literal, int | float) and asks_number(annotation) else named(text)]
    return [literal, text]


def _by_annotation(text: str, literal: Any, annotation: Any) -> list[Any]:
    """The readings where no value stands: by the one plain kind that the annotation names, or a function."""
    kinds = [kind for kind in (str, bool, int, float) if mentions(annotation, kind)]
    if isinstance(literal, str) and asks_callable(annotation):
        try:
            return [named(text)]
        except ConfigError:
            if str not in kinds:
                raise
    if kinds == [str]:
        return [literal, text] if isinstance(literal, tuple) else [text]
    if literal == text and str not in kinds and _is_function(text):
        what = "a function does not fit here" if kinds else "nothing says whether a function or a text is wanted"
        fix = None if kinds else "write some function there in the config first, or annotate the argument as Callable"
        expected = " or ".join(kind.__name__ for kind in kinds) or None
        raise ConfigError(message(what, got=repr(text), expected=expected, fix=fix))
    if len(kinds) == 1 and not isinstance(literal, tuple):
        return [*readings(text, kinds[0]()), text]
    return [literal, text]


def _instance(text: str, annotation: Any) -> Any:
    """A config of a class that an annotation names, as written in Python: `EarlyStop("test/loss", patience=3)`."""
    name = re.match(r"(\w+)\(", text)
    classes = {kind.__name__: kind for kind in _members(annotation) if isinstance(kind, type) and is_config_class(kind)}
    if name is None or name[1] not in classes:
        return None
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("one call, with values by name or in order")
        values = [_frozen(ast.literal_eval(value)) for value in call.args]
        named_values = {str(keyword.arg): _frozen(ast.literal_eval(keyword.value)) for keyword in call.keywords}
    except (ValueError, SyntaxError) as error:
        raise ConfigError(message(f"{text!r} cannot be read", got=str(error), expected="plain values")) from None
    try:
        return classes[name[1]](*values, **named_values)
    except ConfigError:
        raise
    except TypeError as error:  # a name or a number of arguments
        raise ConfigError(message(f"{text!r} cannot be made", got=str(error))) from None


def _members(annotation: Any) -> list[Any]:
    """The parts of a union."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    return list(typing.get_args(annotation)) if origin in (typing.Union, types.UnionType) else [annotation]


def named(text: str) -> Any:
    """The object of a name, `jax.nn:gelu` or `jax.nn.gelu`."""
    return import_object(text if ":" in text else ":".join(text.rsplit(".", 1)))


def _is_function(text: str) -> bool:
    """Whether a text is the name of something callable, as `module:name`."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text):
        return False
    try:
        return callable(import_object(text))
    except ConfigError:
        return False


def asks_callable(annotation: Any) -> bool:
    """Whether an annotation is a callable, or a union with one."""
    origin = typing.get_origin(annotation) or annotation
    if origin in (typing.Union, types.UnionType):
        return any(map(asks_callable, typing.get_args(annotation)))
    if origin is typing.Annotated:
        return asks_callable(typing.get_args(annotation)[0])
    protocol = isinstance(origin, type) and getattr(origin, "_is_protocol", False)
    return origin is collections.abc.Callable or (protocol and "__call__" in vars(origin))


def asks_number(annotation: Any) -> bool:
    """Whether an annotation is a number, or a union with one: a schedule may be a number too."""
    return mentions(annotation, float) or mentions(annotation, int)


def _number(text: str, kind: type, otherwise: Any) -> Any:
    """A float, or a whole number written as one (`1e5`)."""
    try:
        value = float(text)
    except ValueError:
        return otherwise
    return kind(value) if kind is float or value.is_integer() else otherwise


def _tuple(text: str, standing: tuple[Any, ...]) -> tuple[Any, ...]:
    """The parts between commas, each read as the one that stands in its place, or as the last one."""
    parts = [part.strip() for part in text.strip("()[]").split(",") if part.strip()]
    guides = [standing[min(index, len(standing) - 1)] if standing else None for index in range(len(parts))]
    return tuple(readings(part, guide)[0] for part, guide in zip(parts, guides, strict=True))


def _literal(text: str) -> Any:
    """A Python literal, `true`, `false`, `none`, `nan` or `inf` in any case, or else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return float(text) if text.lower().lstrip("+-") in ("nan", "inf") else _frozen(ast.literal_eval(text.strip()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(part) for key, part in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


__all__ = ["BOOLS", "asks_callable", "edited", "named", "readings"]
