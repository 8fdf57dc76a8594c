"""Reading JSON: the config that a text describes, or a `ConfigError` that says what is wrong with it, and where.

The form is that of `equikd.config._json`, which writes it. A text may come from anybody: each name is looked up once,
must be a public one, and of an allowed package where `allow` says so; nothing is called but config classes, enums and
frozen dataclasses.
"""

import base64
import dataclasses
import enum
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

from equikd.config._lazy import check_target, pin, ref
from equikd.config._names import display_name, import_object, public_name, shortened
from equikd.config._node import build
from equikd.config._validate import check_names
from equikd.config._values import is_frozen
from equikd.errors import ConfigError, EquikdError, listing, message
from equikd.tree import Path, join

FORMAT = 1
_POSITION = re.compile(r"\[(\d+)\]")


def from_json(text: str, *, allow: Iterable[str] | None = None) -> Any:
    """The config that a JSON text describes. Imports the names in it: a config is code.

    Args:
        text: what `to_json` wrote, or the same form written by hand.
        allow: packages that names may come from, such as `("optax", "equinox", "equikd")`; all by default. Of equikd
            only config classes and the examples are then admitted. It is no sandbox: what those packages can do, a
            config can call.

    Returns:
        The config.

    Raises:
        ConfigError: the text is no JSON, of another format version, names something that does not exist or is not
            allowed, or does not fit a signature; with the path.

    Example:
        >>> from_json('{"__qualname__": "optax:sgd", "learning_rate": 1}')
        optax.sgd(learning_rate=1.0)
    """
    if isinstance(text, pathlib.PurePath) or (isinstance(text, str) and re.fullmatch(r"[^\n{\[\"]*\.jsonl?", text)):
        fix = f"give its text: from_json(Path({str(text)!r}).read_text())"
        raise ConfigError(
            message("this is the path of a file", got=repr(text), expected="the text of a config", fix=fix)
        )
    if not isinstance(text, str | bytes | bytearray):
        got = f"{type(text).__name__} {shortened(text)}"
        raise ConfigError(message("from_json takes a text", got=got, expected="str"))
    try:
        plain = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ConfigError(message("the text is not JSON", got=str(error))) from None
    if isinstance(plain, dict):
        version = plain.pop("__format__", FORMAT)
        if version != FORMAT:
            raise ConfigError(
                message(
                    "unknown format of a config",
                    got=f"__format__ {version!r}",
                    expected=str(FORMAT),
                    fix="update equikd",
                )
            )
    try:
        return _Reader(None if allow is None else (allow,) if isinstance(allow, str) else tuple(allow)).read(plain, ())
    except RecursionError:
        raise ConfigError(message("the text is nested too deeply for a config")) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; JSON itself would let the last of two equal keys win in silence."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"the key {next(key for key in made if [k for k, _ in pairs].count(key) > 1)!r} stands twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f'{name} is not JSON; write {{"__float__": "{name.lower().replace("infinity", "inf")}"}}')


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f'{digits} is beyond every float; write {{"__float__": "inf"}}')
    return number


class _Reader:
    """Values from their plain forms."""

    def __init__(self, allow: tuple[str, ...] | None) -> None:
        self.allow = allow
        self.allowed = f"one of {listing(allow or ())}"

    def read(self, plain: Any, at: Path) -> Any:
        if isinstance(plain, list):
            return tuple(self.read(part, (*at, index)) for index, part in enumerate(plain))
        if not isinstance(plain, dict):
            return plain
        if "__qualname__" in plain:
            return self._call(plain, at)
        marks = [key for key in plain if key.startswith("__")]
        known = [mark for mark in marks if mark in _MARKS]
        if marks and not known:
            raise ConfigError(message(f"{join(at) or 'the config'}: unknown mark", got=repr(marks[0])))
        if known:
            others = [key for key in plain if key != known[0]]
            if known[0] != "__dataclass__" and others and (known[0], others) not in _COMPANIONS:
                what = f"{join(at) or 'the config'}: {known[0]} stands alone"
                raise ConfigError(message(what, got=f"beside it: {listing(others)}"))
            return self._marked(known[0], _MARKS[known[0]], plain, at)
        return {key: self.read(part, (*at, key)) for key, part in plain.items()}

    def _marked(self, mark: str, read: Callable[..., Any], plain: dict[str, Any], at: Path) -> Any:
        try:
            return read(self, plain[mark], plain, at)
        except ConfigError:
            raise
        except (EquikdError, TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise ConfigError(
                message(f"{join(at) or 'the config'}: malformed {mark}", got=repr(plain[mark])[:100])
            ) from error

    def name(self, name: Any, at: Path) -> Any:
        """The object of a name, if its package is allowed."""
        where = join(at) or "the config"
        if isinstance(name, dict) and "__unloadable__" in name:
            raise ConfigError(
                message(
                    f"{where}: {name['__unloadable__']} exists only in the process that wrote this config",
                    fix="move it to the top level of a module, and write the config again",
                )
            )
        if not isinstance(name, str):
            raise ConfigError(message(f"{where}: malformed name", got=repr(name)[:100], expected="'module:attribute'"))
        if not self._allows(name):
            raise ConfigError(message(f"{where}: {name} is not from an allowed package", expected=self.allowed))
        try:
            thing = import_object(name)
            origin = public_name(thing)  # refuses what could not be written again: constants, names of __main__
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if not self._allows(origin):  # a package may hold what it has imported from elsewhere
            raise ConfigError(
                message(
                    f"{where}: {name} is {origin}, not from an allowed package",
                    expected=self.allowed,
                )
            )
        if self.allow is not None and not _describes(thing, origin):
            raise ConfigError(
                message(
                    f"{where}: {name} is a function of equikd itself, which might import or write",
                    expected="a config class of equikd",
                )
            )
        return thing

    def _allows(self, name: str) -> bool:
        return self.allow is None or name.partition(":")[0].partition(".")[0] in self.allow

    def _call(self, plain: dict[str, Any], at: Path) -> Any:
        head = plain["__qualname__"]
        nested = isinstance(head, dict) and "__qualname__" in head
        function = self.read(head, (*at, "__call__")) if nested else self.name(head, at)
        where = join(at) or "the config"
        given = {key: self.read(part, (*at, key)) for key, part in plain.items() if key != "__qualname__"}
        if isinstance(function, type) and "__equikd_config__" in function.__dict__:
            check_names(function, given, where)
            try:
                return function(**given)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
        if not callable(function):
            raise ConfigError(message(f"{where}: {head} cannot be called", got=type(function).__name__))
        positions = {int(found.group(1)): key for key in given if (found := _POSITION.fullmatch(key))}
        if sorted(positions) != list(range(len(positions))):
            raise ConfigError(message(f"{where}: positions are missing", got=str(sorted(positions))))
        args = tuple(given.pop(positions[index]) for index in range(len(positions)))
        try:
            check_target(function)
            return build(function, args, given, where="config.json")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def _describes(thing: Any, origin: str) -> bool:
    """Whether a name is fit for a config of somebody else: of equikd, only config classes and the examples."""
    module = origin.partition(":")[0]
    ours = module == "equikd" or module.startswith("equikd.")
    is_class = isinstance(thing, type) and "__equikd_config__" in thing.__dict__
    return not ours or is_class or module.startswith("equikd.examples")


def _read_dataclass(reader: _Reader, name: Any, plain: dict[str, Any], at: Path) -> Any:
    cls = reader.name(name, at)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and is_frozen(cls)):
        raise ConfigError(
            message(f"{join(at) or 'the config'}: {name} is not a frozen dataclass", got=display_name(cls))
        )
    fields = {key: reader.read(part, (*at, key)) for key, part in plain.items() if key != "__dataclass__"}
    try:
        return cls(**fields)
    except Exception as error:  # whatever its own checks raise
        raise ConfigError(message(f"{join(at) or 'the config'}: {name} refuses its fields", got=str(error))) from error


def _read_opaque(reader: _Reader, arrays: Any, plain: dict[str, Any], at: Path) -> Any:
    del reader, plain
    raise ConfigError(
        message(
            f"{join(at) or 'the config'}: the arrays are not in the text",
            got=", ".join(f"{key}: {spec['dtype']}{spec['shape']}" for key, spec in arrays.items()),
            fix="make the config in Python with the same arrays, or describe them by a node that loads them",
        )
    )


def _read_flag(reader: _Reader, name: Any, plain: dict[str, Any], at: Path) -> Any:
    cls = reader.name(name, at)
    if not (isinstance(cls, type) and issubclass(cls, enum.Flag)):
        raise ConfigError(message(f"{join(at) or 'the config'}: {name} is not a class of flags", got=display_name(cls)))
    value = plain["value"]
    if type(value) is not int:
        raise ConfigError(
            message(f"{join(at) or 'the config'}: malformed __flag__", got=repr(value)[:100], expected="int")
        )
    return cls(value)


def _read_dict(reader: _Reader, pairs: Any, plain: dict[str, Any], at: Path) -> Any:
    del plain
    if odd := [key for key, _ in pairs if not isinstance(key, str)]:
        what = f"{join(at) or 'the config'}: dict keys are strings"
        raise ConfigError(message(what, got=repr(odd[0])[:100], expected="str"))
    return _once([(key, reader.read(part, (*at, key))) for key, part in pairs])


_PATHS = {
    "Path": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}

_COMPANIONS = (("__path__", ["pure"]), ("__flag__", ["value"]))

_MARKS: dict[str, Callable[..., Any]] = {
    "__float__": lambda reader, value, plain, at: float(value),
    "__complex__": lambda reader, value, plain, at: complex(*[reader.read(part, at) for part in value]),
    "__bytes__": lambda reader, value, plain, at: base64.b64decode(value, validate=True),
    "__path__": lambda reader, value, plain, at: _PATHS[plain.get("pure", "Path")](value),
    "__ellipsis__": lambda reader, value, plain, at: {True: Ellipsis}[value],
    "__ref__": lambda reader, value, plain, at: ref(value),
    "__pin__": lambda reader, value, plain, at: pin(reader.read(value, at)),
    "__name__": lambda reader, value, plain, at: reader.name(value, at),
    "__unloadable__": lambda reader, value, plain, at: reader.name(plain, at),
    "__dict__": _read_dict,
    "__flag__": _read_flag,
    "__int__": lambda reader, value, plain, at: int(value, 16),
    "__dataclass__": _read_dataclass,
    "__opaque__": _read_opaque,
}
