"""Key path fields of configs and modules, and the arguments that they fill."""

import builtins
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

from equikd.config._dataclass import hints as config_hints
from equikd.errors import WiringError, listing, message, report
from equikd.wiring._context import Context, place_of
from equikd.wiring._lookup import lookup


class _KeyPathMark:
    """Marks `KeyPath` and `KeyPaths` among the annotations of a class."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


_ONE, _MANY = _KeyPathMark("KeyPath"), _KeyPathMark("KeyPaths")

KeyPath = Annotated[str, _ONE]
"""A field of this type holds a path into the context. `KeyPath | None` may be left unconnected."""

KeyPaths = Annotated[str, _MANY]
"""As `KeyPath`, or a pattern of many: `"grads.**.weight"` gives a dict, `{"layers[0].weight": array, ...}`."""


@functools.lru_cache(maxsize=1024)
def key_path_fields(cls: type) -> tuple[str, ...]:
    """Names of the fields of a config or module class that are annotated `KeyPath`, `KeyPaths`, or `... | None`."""
    return tuple(_marks(cls))


@functools.lru_cache(maxsize=1024)
def _marks(cls: type) -> dict[str, _KeyPathMark]:
    found = config_hints(cls) if "__equikd_config__" in cls.__dict__ else _module_hints(cls)
    marks = {name: _mark_of(annotation) for name, annotation in found.items()}
    return {name: mark for name, mark in marks.items() if mark is not None}


def _module_hints(cls: type) -> dict[str, Any]:
    """Annotations one by one, so that one that only a type checker can evaluate hides no key path."""
    found = {}
    for base in reversed(cls.__mro__):
        space = vars(sys.modules.get(base.__module__, builtins))
        for name, annotation in inspect.get_annotations(base).items():
            holder = types.SimpleNamespace(__annotations__={name: annotation})
            try:
                found |= typing.get_type_hints(holder, space, include_extras=True)
            except Exception:  # any exception may come out of an annotation
                found[name] = None
    return found


def _mark_of(annotation: Any) -> _KeyPathMark | None:
    if typing.get_origin(annotation) is Annotated:
        return next((mark for mark in annotation.__metadata__ if isinstance(mark, _KeyPathMark)), None)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(filter(None, map(_mark_of, typing.get_args(annotation))), None)
    return None


def key_paths(owner: Any) -> dict[str, str]:
    """Field -> key path of an object; fields that hold `None` are left out.

    Example:
        >>> from equikd.config import config
        >>> @config
        ... class Error:
        ...     preds: KeyPath
        ...     mask: KeyPath | None = None
        >>> key_paths(Error("preds.logits"))
        {'preds': 'preds.logits'}
    """
    named = {name: getattr(owner, name) for name in key_path_fields(type(owner))}
    return {name: path for name, path in named.items() if path is not None}


@functools.lru_cache(maxsize=1024)
def arguments_of(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All and required argument names of a function, `self` left out."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return tuple(p.name for p in named), tuple(p.name for p in named if p.default is inspect.Parameter.empty)


def fill(owner: Any, function: Callable[..., Any], context: Context) -> dict[str, Any]:
    """The arguments of `function` that are named as key path fields of `owner`, looked up in the context.

    Args:
        owner: a config with `KeyPath` fields.
        function: its method, unbound.
        context: what the step has computed so far.

    Raises:
        WiringError: all key paths that lead nowhere, and required arguments that no field fills, at once.
    """
    names, required = arguments_of(function)
    paths = {name: path for name, path in key_paths(owner).items() if name in names}
    values, errors = {}, []
    for name, path in paths.items():
        try:
            values[name] = lookup(context, path, many=_marks(type(owner))[name] is _MANY)
        except WiringError as error:
            errors.append((name, str(error)))
    unfilled = [name for name in required if name not in paths]
    if errors or unfilled:
        raise Unwired(owner, errors, unfilled)
    return values


class Unwired(WiringError):
    """Key paths of one owner that cannot be followed; the trainer's check adds where the owner stands.

    Attributes:
        owner: whose they are.
        errors: name of a field and message, of each that leads nowhere.
        unfilled: arguments that no field fills.
        below: where the owner stands in what wraps it, such as `.metric`.
    """

    def __init__(self, owner: Any, errors: list[tuple[str, str]], unfilled: list[str], below: str = "") -> None:
        self.owner, self.errors, self.unfilled, self.below = owner, errors, unfilled, below
        super().__init__(report("key paths lead nowhere", self.lines(place_of(owner))))

    def lines(self, where: str) -> list[str]:
        """One message for each wrong key path, the owner, or what wraps it, standing at `where`."""
        lines, where = [], where + self.below
        for name, text in self.errors:
            path = key_paths(self.owner).get(name)
            about = f" = {text}" if path and text.startswith(repr(path)) else f" = {path!r}: {text}"
            lines.append(f"{where}.{name}{about}")
        fields = listing(key_path_fields(type(self.owner))) or "none"
        lines += [
            message(
                f"{where}: nothing fills the argument {name!r} of {type(self.owner).__qualname__}",
                got=f"key path fields: {fields}",
                fix=f"connect it: a field `{name}: ek.KeyPath` that is not None",
            )
            for name in self.unfilled
        ]
        return lines
