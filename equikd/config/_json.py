"""JSON: the plain form of a config, exact in both directions.

    {"__format__": 1, "__qualname__": "optax:adamw", "learning_rate": 0.0003}

Configs and nodes are objects that name their class or function; arguments by position stand under `"[0]"`. A tuple is
an array. What JSON cannot hold has a marked form: `{"__float__": "nan"}`, `{"__name__": "jax.nn:relu"}`, `{"__ref__":
...}`, `{"__pin__": ...}`. Reading a config imports the names in it and calls nothing but config classes and frozen
dataclasses; still, a config from somebody else is code, since `resolve` makes its calls. `allow` restricts the
packages.
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

import jax
import numpy as np

from equikd._compat import Tracer
from equikd.config._dataclass import fields_of, plans
from equikd.config._lazy import pin, ref
from equikd.config._names import display_name, import_object, public_name, shortened
from equikd.config._node import Node, build, parts
from equikd.config._roles import is_uncalled
from equikd.config._validate import check_names
from equikd.config._values import Pin, Ref, is_config, is_frozen, is_node, typed_key
from equikd.errors import ConfigError, EquikdError, listing, message, report
from equikd.tree import Path, join

FORMAT = 1
_POSITION = re.compile(r"\[(\d+)\]")


def to_json(cfg: Any, *, indent: int | None = None, unloadable: bool = False) -> str:
    """The JSON text of a config.

    Args:
        cfg: a config, node or container; a trainer.
        indent: as in `json.dumps`.
        unloadable: write a lambda, a local function or a class of `__main__` as a mark that says why the text cannot be
            loaded, instead of refusing.

    Returns:
        Strict JSON, from which `from_json` makes an equal config.

    Raises:
        ConfigError: names that no other process could import, all at once with their config paths.

    Example:
        >>> import optax
        >>> from equikd.config import lazy
        >>> to_json(lazy(optax.sgd)(0.1))
        '{"__format__": 1, "__qualname__": "optax:sgd", "learning_rate": 0.1}'
    """
    writer = _Writer()
    try:
        plain = writer.write(cfg, ())
        text = json.dumps({"__format__": FORMAT, **plain} if isinstance(plain, dict) else plain, indent=indent)
    except RecursionError:
        raise ConfigError(message("the config is nested too deeply to be written")) from None
    if writer.errors and not unloadable:
        raise ConfigError(report(f"{len(writer.errors)} parts of the config cannot be written", writer.errors))
    return text


class _Writer:
    """Plain forms, with the reasons why some of them cannot be read again."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def write(self, value: Any, at: Path) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float) and not isinstance(value, enum.Enum):
            return value if math.isfinite(value) else {"__float__": repr(float(value))}
        if type(value) is tuple:
            return [self.write(part, (*at, index)) for index, part in enumerate(value)]
        if isinstance(value, dict):
            return self._dict(value, at)
        if is_node(value):
            return self._node(value, at)  # pyright: ignore[reportArgumentType]  # is_node says so
        if is_config(value):
            return {"__qualname__": self._name(type(value), at)} | self._fields(value, at)
        return self._marked(value, at)

    def _dict(self, value: dict[str, Any], at: Path) -> Any:
        if odd := [key for key in value if not isinstance(key, str)]:
            self.errors.append(message(f"{join(at) or 'the config'}: dict keys are strings", got=repr(odd[0])))
            return None
        written = {key: self.write(part, (*at, key)) for key, part in value.items()}
        return {"__dict__": list(map(list, written.items()))} if any(k.startswith("__") for k in value) else written

    def _node(self, node: Node, at: Path) -> dict[str, Any]:
        function, arguments, _ = parts(node)
        head = self._node(function, (*at, "__call__")) if is_node(function) else self._name(function, at)
        keys = {key: f"[{key}]" if isinstance(key, int) else key for key in arguments}
        return {"__qualname__": head} | {keys[k]: self.write(v, (*at, k)) for k, v in arguments.items()}

    def _fields(self, value: Any, at: Path) -> dict[str, Any]:
        made = {}
        for name, part in fields_of(value).items():
            opaque = plans(type(value))[name].kind == "opaque" and not is_node(part)
            made[name] = self._spec(part, (*at, name)) if opaque else self.write(part, (*at, name))
        return made

    def _spec(self, value: Any, at: Path) -> Any:
        """What identifies opaque arrays: dtype, shape and hash of each; a config with them needs them given again."""
        arrays = {}
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            array = np.asarray(leaf)
            digest = _digest(array)
            arrays[jax.tree_util.keystr(keys)] = {"dtype": array.dtype.name, "shape": list(array.shape), "hash": digest}
        self.errors.append(
            message(
                f"{join(at)}: holds arrays, which JSON does not", fix="write a node that loads them: ek.lazy(load)(...)"
            )
        )
        return {"__opaque__": arrays}

    def _name(self, thing: Any, at: Path) -> Any:
        try:
            return public_name(thing)
        except ConfigError as error:
            self.errors.append(f"{join(at) or 'the config'}: {error}")
            return {"__unloadable__": display_name(thing)}

    def _marked(self, value: Any, at: Path) -> Any:
        if isinstance(value, Ref):
            return {"__ref__": value.path}
        if isinstance(value, Pin):
            return {"__pin__": self.write(value.value, at)}
        if isinstance(value, bytes):
            return {"__bytes__": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {"__complex__": [self.write(value.real, at), self.write(value.imag, at)]}
        if isinstance(value, pathlib.PurePath):
            return {"__path__": str(value)} | (
                {} if isinstance(value, pathlib.Path) else {"pure": type(value).__name__}
            )
        if value is Ellipsis:
            return {"__ellipsis__": True}
        if isinstance(value, jax.Array | np.ndarray) and not isinstance(value, Tracer) and value.ndim == 0:
            return self.write(float(str(np.asarray(value)[()])), at)
        if is_uncalled(value):
            return self.write(value.__equikd_target__, at)  # pyright: ignore[reportAttributeAccessIssue]
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "__qualname__"):
            fields = {f.name: self.write(getattr(value, f.name), (*at, f.name)) for f in dataclasses.fields(value)}
            return {"__dataclass__": self._name(type(value), at), **fields}
        name = self._name(value, at)
        return {"__name__": name} if isinstance(name, str) else name


def _digest(array: np.ndarray) -> str:
    import hashlib

    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


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
            if known[0] != "__dataclass__" and others and (known[0], others) != ("__path__", ["pure"]):
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
            raise ConfigError(message(f"{join(at)}: malformed {mark}", got=repr(plain[mark])[:100])) from error

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
        raise ConfigError(message(f"{join(at)}: {name} is not a frozen dataclass", got=display_name(cls)))
    fields = {key: reader.read(part, (*at, key)) for key, part in plain.items() if key != "__dataclass__"}
    try:
        return cls(**fields)
    except Exception as error:  # whatever its own checks raise
        raise ConfigError(message(f"{join(at)}: {name} refuses its fields", got=str(error))) from error


def _read_opaque(reader: _Reader, arrays: Any, plain: dict[str, Any], at: Path) -> Any:
    del reader, plain
    raise ConfigError(
        message(
            f"{join(at)}: the arrays are not in the text",
            got=", ".join(f"{key}: {spec['dtype']}{spec['shape']}" for key, spec in arrays.items()),
            fix="make the config in Python with the same arrays, or describe them by a node that loads them",
        )
    )


_PATHS = {
    "Path": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}

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
    "__dict__": lambda reader, value, plain, at: _once([(key, reader.read(part, (*at, key))) for key, part in value]),
    "__dataclass__": _read_dataclass,
    "__opaque__": _read_opaque,
}

__all__ = ["FORMAT", "from_json", "to_json", "typed_key"]
