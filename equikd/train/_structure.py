"""A model's structure as plain JSON: what is left when the arrays are taken out.

    {"module": "equinox.nn:Linear", "fields": {"weight": {"array": "layers[0].weight"}, "in_features": 64, ...}}

JSON's own values stand for themselves, and an array of JSON for a list. Everything else is an object whose first key
says what it is: `tuple`, `dict`, `module`, `object` (a function or class, by the name it is imported under), and so on.
Arrays stand under their path, and are kept elsewhere.

Objects are rebuilt as a pytree is unflattened: `object.__new__`, then the fields, static ones too. No constructor runs,
so none can draw new parameters, convert a value twice, or refuse. Names are imported, so a file from somebody else is
code. A part that has no plain form (a lambda, a local class, a thread) is marked, and listed when all is asked for.
"""

import collections
import dataclasses
import enum
import functools
import math
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import numpy as np

from equikd.config._dataclass import fields_of, raw
from equikd.config._names import import_object, public_name
from equikd.config._node import Node, parts
from equikd.config._validate import host
from equikd.config._values import FrozenDict, is_config, is_node
from equikd.errors import ConfigError
from equikd.train._leaves import is_array
from equikd.tree import Path, join

_PLAIN = (type(None), bool, int, str)
_METHOD = {"__func__", "__self__"}  # the fields of the module that equinox makes of a bound method


class Writer:
    """Plain forms of the parts of one model.

    Attributes:
        arrays: `{path: array}`, filled while writing.
        blocked: `{path: why}` of the parts that have no plain form.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.blocked: dict[str, str] = {}
        self._markers: dict[int, int] = {}

    def write(self, value: Any, at: Path = ()) -> Any:
        """The plain form of `value`, which stands at path `at`."""
        if type(value) in _PLAIN:
            return value
        if is_array(value):
            self.arrays[join(at)] = value
            return {"array": join(at)}
        for kind, write in _WRITERS:
            if kind(value):
                return write(self, value, at)
        return self.name("object", value, at)

    def name(self, mark: str, thing: Any, at: Path, /, **more: Any) -> dict[str, Any]:
        """A named thing, with what else belongs to it."""
        try:
            return {mark: importable_name(thing), **more}
        except ConfigError:
            return self.block(_why_unnamed(thing), at)

    def block(self, why: str, at: Path) -> dict[str, Any]:
        """Marks a part that has no plain form."""
        self.blocked[join(at)] = why
        return {"blocked": why}

    def items(self, values: Iterable[Any], at: Path) -> list[Any]:
        """Plain forms of numbered parts."""
        return [self.write(value, (*at, index)) for index, value in enumerate(values)]

    def fields(self, values: dict[str, Any], at: Path) -> dict[str, Any]:
        """Plain forms of named parts."""
        return {name: self.write(value, (*at, name)) for name, value in values.items()}

    def marker(self, marker: Any) -> Any:
        """A state's marker: a string, or an `object()`, of which only the identity counts."""
        return marker if isinstance(marker, str) else self._markers.setdefault(id(marker), len(self._markers))


def importable_name(thing: Any) -> str:
    """`public_name`, and two cases more, in which a name gives back the same object.

    A lambda that a module holds under a name has that name, as `MLP`'s last activation has in equinox. What a script or
    notebook defines at its top level is found again by that script or notebook alone, under `__main__`.

    Raises:
        ConfigError: nothing can be imported that gives back the same object.

    Example:
        >>> importable_name(eqx.nn.MLP)
        'equinox.nn:MLP'
    """
    try:
        return public_name(thing)
    except ConfigError:
        module = getattr(thing, "__module__", None)
        held = vars(sys.modules[module]) if module in sys.modules else {}
        own = getattr(thing, "__qualname__", "")
        names = [own] if module == "__main__" else [name for name in held if name.isidentifier()]
        found = [name for name in names if held.get(name) is thing]
        if not found:
            raise
        return f"{module}:{found[0]}"


def _why_unnamed(thing: Any) -> str:
    """Why nothing can be imported that gives back the same object, in few words."""
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", None)
    if isinstance(thing, np.ndarray):
        return f"an array of {thing.dtype}, which is no number"
    if name is None:
        return f"a value of type {type(thing).__qualname__}, which has no plain form"
    if "<lambda>" in name:
        return f"a lambda of {module}"
    if "<locals>" in name:
        return f"{module}:{name} is local to a function"
    return f"{module}:{name} does not import back to the same object"


def _write_float(writer: Writer, value: float, at: Path) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}


def _write_dict(writer: Writer, value: dict[Any, Any], at: Path) -> Any:
    return {
        _DICTS[type(value)]: [
            [writer.write(key, at), writer.write(part, (*at, _step(key)))] for key, part in value.items()
        ]
    }


_DICTS = {dict: "dict", collections.OrderedDict: "ordered", FrozenDict: "frozen"}


def _step(key: Any) -> str | int:
    """A dict's key in a path."""
    return key if isinstance(key, str | int) else str(key)


def _write_set(writer: Writer, value: set[Any] | frozenset[Any], at: Path) -> Any:
    return {type(value).__name__: writer.items(sorted(value, key=repr), at)}


def _write_named_tuple(writer: Writer, value: Any, at: Path) -> Any:
    return writer.name("namedtuple", type(value), at, fields=writer.fields(value._asdict(), at))


def _write_enum(writer: Writer, value: enum.Enum, at: Path) -> Any:
    if value.name not in type(value).__members__:
        return writer.block(f"{value!r} is no single member", at)
    return writer.name("enum", type(value), at, member=value.name)


def _write_index(writer: Writer, value: eqx.nn.StateIndex, at: Path) -> Any:
    init = {} if _is_deleted(value) else {"init": writer.write(value.init, (*at, "init"))}
    return {"state_index": writer.marker(value.marker), **init}


def _is_deleted(index: eqx.nn.StateIndex) -> bool:
    """Whether `make_with_state` has moved the initial value out; what it leaves there has a class of its own."""
    return type(index.init) is type(_deleted_index().init)


def _deleted_index() -> eqx.nn.StateIndex:
    return eqx.nn.delete_init_state(eqx.nn.StateIndex(0))


def _write_state(writer: Writer, value: eqx.nn.State, at: Path) -> Any:
    values, markers = value.tree_flatten()
    return {"state": [[writer.marker(m), part] for m, part in zip(markers, writer.items(values, at), strict=True)]}


def _write_node(writer: Writer, value: Node, at: Path) -> Any:
    function, arguments, _ = parts(host(value))
    items = [[key, writer.write(part, (*at, key))] for key, part in arguments.items()]
    return {"node": writer.write(function, (*at, "__call__")), "arguments": items}


def _write_config(writer: Writer, value: Any, at: Path) -> Any:
    return writer.name("config", type(value), at, fields=writer.fields(fields_of(host(value)), at))


def _write_module(writer: Writer, value: eqx.Module, at: Path) -> Any:
    names = [f.name for f in dataclasses.fields(value)]
    held = dict(vars(value))
    if set(names) == _METHOD:
        return _write_method(writer, value, at)
    fields = {name: held.pop(name) for name in names if name in held}
    if held:
        return writer.block(f"{type(value).__name__} holds {', '.join(held)} besides its fields, as wrappers do", at)
    unset = [name for name in names if name not in fields]
    more = {"unset": unset} if unset else {}
    return writer.name("module", type(value), at, fields=writer.fields(fields, at), **more)


def _write_method(writer: Writer, value: Any, at: Path) -> Any:
    name, owner = value.__func__.__name__, value.__self__
    if getattr(getattr(owner, name, None), "__func__", None) is not value.__func__:
        return writer.block(f"method {name} is not an attribute of {type(owner).__name__}", at)
    return {"method": name, "self": writer.write(owner, (*at, "__self__"))}


def _write_partial(writer: Writer, value: functools.partial, at: Path) -> Any:
    # The path of the arguments is that of jax.tree_util.Partial's leaves.
    args = writer.items(value.args, (*at, 0))
    return writer.name(
        "partial",
        type(value),
        at,
        function=writer.write(value.func, (*at, "func")),
        args=args,
        keywords=writer.fields(value.keywords, (*at, 1)),
    )


def _write_dataclass(writer: Writer, value: Any, at: Path) -> Any:
    held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return writer.name("dataclass", type(value), at, fields=writer.fields(held, at))


_WRITERS: tuple[tuple[Callable[[Any], bool], Callable[[Writer, Any, Path], Any]], ...] = (
    (lambda value: type(value) is float, _write_float),
    (lambda value: type(value) is complex, lambda w, v, at: {"complex": [w.write(v.real, at), w.write(v.imag, at)]}),
    (lambda value: type(value) is bytes, lambda w, v, at: {"bytes": v.hex()}),
    (lambda value: type(value) is list, lambda w, v, at: w.items(v, at)),
    (lambda value: type(value) is tuple, lambda w, v, at: {"tuple": w.items(v, at)}),
    (lambda value: type(value) in (set, frozenset), _write_set),
    (lambda value: type(value) in _DICTS, _write_dict),
    (lambda value: isinstance(value, tuple) and hasattr(value, "_fields"), _write_named_tuple),
    (lambda value: isinstance(value, enum.Enum), _write_enum),
    (lambda value: isinstance(value, np.dtype), lambda w, v, at: {"dtype": v.name if v.kind == "V" else v.str}),
    (lambda value: type(value) is eqx.nn.State, _write_state),
    (lambda value: type(value) is eqx.nn.StateIndex, _write_index),
    (is_node, _write_node),
    (is_config, _write_config),
    (lambda value: isinstance(value, eqx.Module), _write_module),
    (lambda value: isinstance(value, functools.partial), _write_partial),
    (lambda value: isinstance(value, types.MethodType), _write_method),
    (lambda value: dataclasses.is_dataclass(value) and not isinstance(value, type), _write_dataclass),
)


class Reader:
    """Values from their plain forms.

    Args:
        arrays: `{path: array}` as the `Writer` filled it.

    Attributes:
        problems: one line for each part that cannot be rebuilt, filled while reading.
    """

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays
        self.problems: list[str] = []
        self._markers: dict[int, object] = {}

    def read(self, plain: Any, at: Path = ()) -> Any:
        """The value of a plain form; None, and a line in `problems`, where it cannot be rebuilt."""
        if isinstance(plain, list):
            return self.items(plain, at)
        if not isinstance(plain, dict):
            return plain
        mark = next(iter(plain), "")
        try:
            return _READERS[mark](self, plain, at)
        except ConfigError as error:
            why = str(error).partition("\n")[0]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{mark or 'an empty object'} is malformed ({type(error).__name__}: {error})"
        return self.problem(why, at)

    def problem(self, why: str, at: Path) -> None:
        """Notes a part that cannot be rebuilt."""
        self.problems.append(f"{join(at) or 'the root'}: {why}")

    def items(self, plain: Iterable[Any], at: Path) -> list[Any]:
        """Values of numbered parts."""
        return [self.read(part, (*at, index)) for index, part in enumerate(plain)]

    def fields(self, plain: dict[str, Any], at: Path) -> dict[str, Any]:
        """Values of named parts."""
        return {name: self.read(part, (*at, name)) for name, part in plain.items()}

    def marker(self, plain: Any) -> Any:
        """A state's marker again; equal numbers give one object."""
        return plain if isinstance(plain, str) else self._markers.setdefault(plain, object())


def _read_instance(reader: Reader, plain: dict[str, Any], at: Path) -> Any:
    """A module, config or dataclass: `object.__new__` and its fields, as a pytree is unflattened."""
    mark = next(iter(plain))
    cls = import_object(plain[mark])
    if not dataclasses.is_dataclass(cls) or not isinstance(cls, type):
        raise ConfigError(f"{plain[mark]} is not a class with fields any more")
    values = reader.fields(plain["fields"], at)
    expected = {f.name for f in dataclasses.fields(cls)} - set(plain.get("unset", ()))
    if mark != "dataclass" and expected != values.keys():
        gone, new = sorted(values.keys() - expected), sorted(expected - values.keys())
        changes = [f"{', '.join(names)} {what}" for names, what in ((gone, "is gone"), (new, "is new")) if names]
        raise ConfigError(f"the fields of {plain[mark]} have changed since: {'; '.join(changes)}")
    if mark == "config":
        return raw(cls, values)
    made = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _read_index(reader: Reader, plain: dict[str, Any], at: Path) -> Any:
    index = eqx.nn.StateIndex(reader.read(plain["init"], (*at, "init"))) if "init" in plain else _deleted_index()
    object.__setattr__(index, "marker", reader.marker(plain["state_index"]))
    return index


def _read_state(reader: Reader, plain: dict[str, Any], at: Path) -> Any:
    markers = [reader.marker(marker) for marker, _ in plain["state"]]
    return eqx.nn.State.tree_unflatten(tuple(markers), reader.items((part for _, part in plain["state"]), at))


def _read_dict(reader: Reader, plain: dict[str, Any], at: Path) -> dict[Any, Any]:
    made = {}
    for plain_key, part in next(iter(plain.values())):
        key = reader.read(plain_key, at)
        made[key] = reader.read(part, (*at, _step(key)))
    return made


def _read_named_tuple(reader: Reader, plain: dict[str, Any], at: Path) -> Any:
    cls, values = import_object(plain["namedtuple"]), reader.fields(plain["fields"], at)
    if tuple(values) != cls._fields:
        raise ConfigError(f"the fields of {plain['namedtuple']} have changed since")
    return tuple.__new__(cls, values.values())


def _read_node(reader: Reader, plain: dict[str, Any], at: Path) -> Node:
    arguments = {key: reader.read(part, (*at, key)) for key, part in plain["arguments"]}
    return Node(reader.read(plain["node"], (*at, "__call__")), arguments, "model.json")


def _read_partial(reader: Reader, plain: dict[str, Any], at: Path) -> Any:
    keywords = reader.fields(plain["keywords"], (*at, 1))
    args = reader.items(plain["args"], (*at, 0))
    function = reader.read(plain["function"], (*at, "func"))
    return import_object(plain["partial"])(function, *args, **keywords) if function is not None else None


def _read_method(reader: Reader, plain: dict[str, Any], at: Path) -> Any:
    owner = reader.read(plain["self"], (*at, "__self__"))
    return None if owner is None else getattr(owner, plain["method"])


_READERS: dict[str, Callable[[Reader, dict[str, Any], Path], Any]] = {
    "array": lambda reader, plain, at: reader.arrays[plain["array"]],
    "blocked": lambda reader, plain, at: reader.problem(plain["blocked"], at),
    "bytes": lambda reader, plain, at: bytes.fromhex(plain["bytes"]),
    "complex": lambda reader, plain, at: complex(*(reader.read(part, at) for part in plain["complex"])),
    "config": _read_instance,
    "dataclass": _read_instance,
    "dict": _read_dict,
    "dtype": lambda reader, plain, at: np.dtype(plain["dtype"]),
    "enum": lambda reader, plain, at: import_object(plain["enum"])[plain["member"]],
    "float": lambda reader, plain, at: float(plain["float"]),
    "frozenset": lambda reader, plain, at: frozenset(reader.items(plain["frozenset"], at)),
    "method": _read_method,
    "module": _read_instance,
    "namedtuple": _read_named_tuple,
    "node": _read_node,
    "object": lambda reader, plain, at: import_object(plain["object"]),
    "frozen": lambda reader, plain, at: FrozenDict(_read_dict(reader, plain, at)),
    "ordered": lambda reader, plain, at: collections.OrderedDict(_read_dict(reader, plain, at)),
    "partial": _read_partial,
    "set": lambda reader, plain, at: set(reader.items(plain["set"], at)),
    "state": _read_state,
    "state_index": _read_index,
    "tuple": lambda reader, plain, at: tuple(reader.items(plain["tuple"], at)),
}
