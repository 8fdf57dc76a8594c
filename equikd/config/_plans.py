"""Roles: what the annotation of a field says about its place in the pytree.

| annotation | role | a change |
| --- | --- | --- |
| `float` | leaf | never recompiles |
| `int`, `bool`, `str`, enums, `Literal`, callables, tuples of these, frozen dataclasses | static | recompiles |
| `float | None` | static; `field(dynamic=True)`: only `None` <-> value recompiles | as said |
| configs, nodes, dicts and tuples with floats or configs, `float | Schedule` | child | as its members |
| anything else | child if the value is a node or config, else static | as its own |
| `field(static=True)`, `field(opaque=True)`, `field(dynamic=True)` on an int | static, opaque, leaf | as said |
| `field(dynamic=True)` on `tuple[int, ...]`, `tuple[tuple[int, float], ...]`: leaves | child | as its members |

Roles are fixed by annotations alone, so a config that holds tracers, `None` or axis numbers flattens as one that holds
floats. References, pins and nodes may stand in any field.
"""

import dataclasses
import enum
import re
import types
import typing
from collections import abc
from typing import Any, Literal

from equikd.errors import ConfigError, message

Kind = Literal["float", "integer", "static", "opaque", "tuple", "sequence", "dict", "union", "any", "argument"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How values of one annotation are checked and flattened."""

    kind: Kind
    annotation: Any
    members: tuple["Plan", ...] = ()
    unsigned: bool = False

    @property
    def role(self) -> str:
        """`leaf`, `static`, `opaque` or `child`, as `roles` shows it."""
        if self.kind == "union" and sorted(m.annotation is type(None) for m in self.members) == [False, True]:
            return "leaf" if any(m.kind in ("float", "integer") for m in self.members) else "child"
        if self.kind == "any" and not is_config_class(self.annotation):
            return "static"
        return {"float": "leaf", "integer": "leaf", "static": "static", "opaque": "opaque"}.get(self.kind, "child")

    @property
    def remark(self) -> str:
        """What the role does not say."""
        if self.kind == "any" and not is_config_class(self.annotation):
            return "; a node or config in it is a child"
        if self.kind == "static" and {*typing.get_args(self.annotation)} == {float, type(None)}:
            return "; field(dynamic=True) makes it a leaf"
        return ""


ARGUMENT = Plan("argument", Any)  # of a node: a float is always a leaf
ANY = Plan("any", Any)


def plan(
    annotation: Any, *, static: bool = False, dynamic: bool = False, opaque: bool = False, unsigned: bool = False
) -> Plan:
    """The plan of a field.

    Args:
        annotation: the evaluated annotation.
        static: `field(static=True)`.
        dynamic: `field(dynamic=True)`; in a container it holds for each int and each `float | None`.
        opaque: `field(opaque=True)`.
        unsigned: with `dynamic` on an int, stored as uint32.

    Raises:
        ConfigError: the options contradict each other, or mean nothing for this annotation.
    """
    given = [name for name, on in (("static", static), ("dynamic", dynamic), ("opaque", opaque)) if on]
    if len(given) > 1:
        raise ConfigError(message("a field has one role", got=" and ".join(f"{name}=True" for name in given)))
    if unsigned and not dynamic:
        raise ConfigError(
            message("unsigned=True is for ints that are leaves", fix="field(dynamic=True, unsigned=True)")
        )
    if opaque or static:
        return Plan("opaque" if opaque else "static", annotation)
    integer = Plan("integer", int, unsigned=unsigned) if dynamic else None
    made = _plan(annotation, integer)
    if dynamic and made == _plan(annotation, None):
        expected = "an int, or float | None, alone or in tuples and dicts"
        raise ConfigError(message("dynamic=True changes nothing here", got=spell(annotation), expected=expected))
    # As it was written: KeyPath, not str.
    return Plan("static", annotation) if made.kind == "static" else made


def _is_optional_float(plan: Plan) -> bool:
    return plan.kind == "union" and {m.annotation for m in plan.members} == {float, type(None)}


def bare(annotation: Any) -> Any:
    """The type behind `Annotated`, `Final`, a `NewType`, a `type X = ...` alias or a generic config class."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Annotated, typing.Final):
        return bare(typing.get_args(annotation)[0])
    if is_config_class(origin):
        return origin
    named = isinstance(annotation, typing.NewType) or type(annotation).__name__ == "TypeAliasType"
    return (
        bare(getattr(annotation, "__supertype__" if hasattr(annotation, "__supertype__") else "__value__"))
        if named
        else annotation
    )


def _plan(annotation: Any, integer: Plan | None) -> Plan:
    """The plan of an annotation; `integer`: that of an int, if ints (and `float | None`) are dynamic."""
    annotation = bare(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is float:
        return Plan("float", annotation)
    if annotation is int and integer is not None:
        return integer
    if annotation in (int, bool, str, bytes, complex, type(None)) or origin is Literal:
        return Plan("static", annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return Plan("static", annotation)
    if origin in (typing.Union, types.UnionType):
        members = tuple(_plan(argument, integer) for argument in arguments)
        made = Plan("union", annotation, members)
        static = all(m.kind == "static" for m in members) or (integer is None and _is_optional_float(made))
        return Plan("static", annotation) if static else made
    if origin in _SEQUENCES:
        arguments = (*arguments, Ellipsis)
    if (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis) or origin in _SEQUENCES:
        member = _plan(arguments[0], integer)
        return Plan("static" if member.kind == "static" else "sequence", annotation, (member,))
    if origin is tuple:
        members = tuple(_plan(argument, integer) for argument in arguments)
        return Plan("static" if all(m.kind == "static" for m in members) else "tuple", annotation, members)
    if annotation is tuple:
        return Plan("sequence", annotation, (ANY,))
    if annotation is dict or origin is dict or origin in _MAPPINGS:
        return Plan("dict", annotation, (_plan(arguments[1], integer) if arguments else ANY,))
    if annotation is list or origin is list:
        raise ConfigError(
            message(f"{spell(annotation)}: a config has no lists, which can be changed in place", fix="use tuple[...]")
        )
    return Plan("any", annotation)


_SEQUENCES = (abc.Sequence, abc.Iterable, abc.Collection)
_MAPPINGS = (abc.Mapping, abc.MutableMapping)


def spell(annotation: Any) -> str:
    """An annotation as it was written, near enough for messages."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    text = str(annotation)
    if "'" not in text:  # a dot in a Literal is no module's
        text = re.sub(r"\b[\w.]+\.(?=\w)", "", text)
    return text.replace("typing.", "").replace("Annotated[str, KeyPath]", "KeyPath")


def is_config_class(annotation: Any) -> bool:
    """Whether an annotation is a class made by `config`."""
    return isinstance(annotation, type) and "__equikd_config__" in annotation.__dict__
