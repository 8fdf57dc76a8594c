"""JSON: the plain form of a config, exact in both directions.

    {"__format__": 1, "__qualname__": "optax:adamw", "learning_rate": 0.0003}

Configs and nodes are objects that name their class or function; arguments by position stand under `"[0]"`. A tuple is
an array. What JSON cannot hold has a marked form: `{"__float__": "nan"}`, `{"__name__": "jax.nn:relu"}`,
`{"__flag__": "module:Access", "value": 3}`, `{"__ref__": ...}`, `{"__pin__": ...}`. Reading a config (in
`_json_read.py`) imports the names in it and calls nothing but config classes, enums and frozen dataclasses; still, a
config from somebody else is code, since `resolve` makes its calls. `allow` restricts the packages.
"""

import base64
import dataclasses
import enum
import hashlib
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np

from equikd._compat import Tracer
from equikd.config._dataclass import fields_of, plans
from equikd.config._json_read import FORMAT as FORMAT
from equikd.config._json_read import from_json as from_json
from equikd.config._names import array_spec, display_name, public_name, shortened
from equikd.config._node import Node, parts
from equikd.config._roles import is_uncalled
from equikd.config._validate import host
from equikd.config._values import Pin, Ref, is_config, is_node, typed_key
from equikd.errors import ConfigError, message, report
from equikd.tree import Path, join


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


_MOST_BITS = 2000  # of an int in decimal digits; Python refuses to write and to read those of very long ones


class _Writer:
    """Plain forms, with the reasons why some of them cannot be read again."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def write(self, value: Any, at: Path) -> Any:
        if type(value) is int and value.bit_length() > _MOST_BITS:
            return {"__int__": hex(value)}
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
        if isinstance(value, enum.Flag) and value.name not in type(value).__members__:  # several, none, or unnamed bits
            return {"__flag__": self._name(type(value), at), "value": value.value}
        if isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
            return self._array(value, at)
        if is_uncalled(value):
            return self.write(value.__equikd_target__, at)  # pyright: ignore[reportAttributeAccessIssue]
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "__qualname__"):
            return self._dataclass(value, at)
        name = self._name(value, at)
        return {"__name__": name} if isinstance(name, str) else name

    def _array(self, value: Any, at: Path) -> Any:
        """A leaf of a tree-mapped config: a number, if it is one."""
        number = host(np.asarray(value)) if isinstance(value, np.generic) else host(value)
        if type(number) in (bool, int, float, complex):
            return self.write(number, at)
        if isinstance(value, Tracer):
            got, fix = f"a tracer of {array_spec(value)}", "write the config outside the trace"
        elif isinstance(value, jax.ShapeDtypeStruct):
            got, fix = f"the shape {array_spec(value)}", "write the config that it was made from"
        else:
            got = f"an array {array_spec(value)}"
            fix = "write one of the configs that are stacked here: jax.tree.map(lambda leaf: leaf[0], cfg)"
        self.errors.append(
            message(f"{join(at) or 'the config'}: no number stands here", got=got, expected="a number", fix=fix)
        )
        return {"__unloadable__": got}

    def _dataclass(self, value: Any, at: Path) -> Any:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        try:
            same = typed_key(type(value)(**fields)) == typed_key(value)
        except Exception:  # whatever its constructor raises
            same = False
        if not same:
            kind = type(value).__qualname__
            what = f"{join(at) or 'the config'}: the fields of {kind} do not make it again, given to its constructor"
            fix = f"decorate {kind} with @ek.config.config, or let its constructor take all its fields as they are"
            self.errors.append(message(what, got=shortened(value), fix=fix))
        written = {name: self.write(part, (*at, name)) for name, part in fields.items()}
        return {"__dataclass__": self._name(type(value), at), **written}


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


__all__ = ["FORMAT", "from_json", "to_json", "typed_key"]
