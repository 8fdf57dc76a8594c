"""Names of importable things: `optax:adamw` is what `optax._src.alias.adamw` is called in public.

A name is written only if importing it gives back the same object, so a config that was written can be read. The
shortest public path wins (`optax:adamw`, `equinox.nn:MLP`), so files keep loading when a private module moves. Reading
a name imports its module: a config is code, see `from_json`.
"""

import enum
import functools
import importlib
import re
import sys
import types
from typing import Any

import jax
import numpy as np

from equikd._compat import Tracer
from equikd.errors import ConfigError, message, nearest


def public_name(thing: Any) -> str:
    """`"module:qualname"`: the shortest public path that imports back to the same object.

    Args:
        thing: a function, class, module, enum member or dtype.

    Returns:
        The name; a module's ends with a colon.

    Raises:
        ConfigError: it is a lambda, a local function or class, or defined in `__main__`, or does not import back.

    Example:
        >>> import optax
        >>> public_name(optax.adamw)
        'optax:adamw'
    """
    try:
        return _public_name(thing)
    except ConfigError:
        raise
    except TypeError:  # unhashable
        raise ConfigError(message(f"a {type(thing).__qualname__} has no importable name")) from None


@functools.lru_cache(maxsize=4096, typed=True)  # typed: members of two enums, np.float32 and jnp.float32 are equal
def _public_name(thing: Any) -> str:
    if isinstance(thing, types.ModuleType):
        return thing.__name__ + ":"
    if isinstance(thing, np.dtype):
        return f"{_DTYPE}{_dtype_name(thing)}"
    module, name = home(thing)
    found = [f"{candidate}:{name}" for candidate in _modules(module, name) if _same(_attribute(candidate, name), thing)]
    found = [] if module == "__main__" else found or _held(thing, [module] if "<" in name else _places(module))
    if found:
        return min(found, key=lambda path: ("._" in path or ":_" in path, path.count("."), len(path), path))
    if "<" in name:
        kind = "a lambda" if "<lambda>" in name else "a local function or class"
        raise ConfigError(
            message(f"{module}:{name} is {kind}", fix="move it to the top level of a module that can be imported")
        )
    if module == "__main__":
        raise ConfigError(
            message(f"{name} is defined in __main__, where no other process finds it", fix=f"move {name} to a module")
        )
    raise ConfigError(message(f"{module}:{name} does not import back to the same object"))


def _held(thing: Any, places: list[str]) -> list[str]:
    """Names of what claims none that leads back to it: by the variable that holds it, or holds what it is bound to.

    `g = jax.jit(f)` calls itself `f`, and `random.uniform` is a method of an object that has no name of its own.
    """
    if getattr(thing, "__name__", None) is None:
        return []
    found = [f"{place}:{name}" for place in places for name, value in _variables(place) if _same(value, thing)]
    owner, name = getattr(thing, "__self__", None), thing.__name__
    if owner is None or isinstance(owner, type | types.ModuleType) or found:
        return found
    owned = [f"{place}:{held}.{name}" for place in places for held, value in _variables(place) if value is owner]
    return [path for path in owned if _same(_attribute(*path.split(":")), thing)]


def _places(module: str) -> list[str]:
    """Loaded modules that may hold a thing of this module: its own package's public ones, and itself."""
    package = module.partition(".")[0]
    others = ("scipy",) if module == "numpy" else ()
    public = [
        name
        for name in list(sys.modules)
        if name.partition(".")[0] in (package, *others) and not any(part.startswith("_") for part in name.split("."))
    ]
    return list(dict.fromkeys([*public, module]))


def _variables(module: str) -> list[tuple[str, Any]]:
    held = getattr(sys.modules.get(module), "__dict__", {})
    return [(name, value) for name, value in list(held.items()) if name.isidentifier() and not name.startswith("__")]


_DTYPE = "numpy:dtype."  # numpy:float32 is the scalar class, numpy:dtype.float32 the dtype


def _dtype_name(dtype: np.dtype) -> str:
    text = f"{dtype.char}{dtype.itemsize // {'U': 4, 'S': 1}[dtype.char]}" if dtype.char in "US" else dtype.name
    if _dtype(text) == dtype:
        return text
    plain = dtype.names is None and dtype.subdtype is None and not dtype.isnative
    fix = "use a dtype of native byte order" if plain else "make it in the function that uses it"
    raise ConfigError(message(f"{dtype!r} has no name of its own", fix=fix))


def _dtype(name: str) -> np.dtype | None:
    if re.fullmatch(r"[US]\d{1,9}", name):
        return np.dtype(name)
    try:
        found = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):  # numpy parses names such as "(2,)f4"
        return None
    return found if found.name == name else None


def _same(found: Any, thing: Any) -> bool:
    bound = isinstance(thing, types.MethodType | types.BuiltinMethodType)  # a class method is bound anew at each access
    return found is thing or (bound and type(found) is type(thing) and found == thing)


def home(thing: Any) -> tuple[str, str]:
    """The module and qualified name that a thing itself claims."""
    if isinstance(thing, enum.Enum):
        return type(thing).__module__, f"{type(thing).__qualname__}.{thing.name}"
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    owner = getattr(thing, "__self__", None)
    if isinstance(owner, type):  # a class method, perhaps of a base class
        module, name = owner.__module__, f"{owner.__qualname__}.{thing.__name__}"
    described = getattr(thing, "__objclass__", None)
    if module is None and isinstance(described, type):  # a method such as str.upper
        module = described.__module__
    if isinstance(thing, np.ufunc):
        module = "numpy"
    if not isinstance(module, str) or not isinstance(name, str):
        raise ConfigError(message(f"a {type(thing).__qualname__} has no importable name"))
    return module, name


def display_name(thing: Any) -> str:
    """A name for messages: the public one, or what the thing claims, or its repr; never raises.

    Example:
        >>> display_name(display_name)
        'equikd.config._names:display_name'
    """
    try:
        return public_name(thing)
    except ConfigError:
        try:
            return ":".join(home(thing))
        except ConfigError:
            return repr(thing)


def spell(value: Any) -> str:
    """A value for messages and `repr`: as `repr`, with functions and classes by name, arrays by dtype and shape.

    Example:
        >>> import optax
        >>> spell({"rule": (optax.sgd, 0.1)})
        "{'rule': (optax.sgd, 0.1)}"
        >>> spell({"image": np.zeros((2, 8, 8), np.float32)})
        "{'image': float32[2,8,8]}"
    """
    if isinstance(value, np.ndarray | jax.Array) and value.ndim and not isinstance(value, Tracer):
        return array_spec(value)
    if type(value) is list:
        return f"[{', '.join(map(spell, value))}]" if len(value) <= _MOST_ITEMS else _long_list(value)
    if type(value) is tuple:
        return f"({', '.join(map(spell, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {spell(part)}" for key, part in value.items()) + "}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if callable(value) and not getattr(type(value), "tree_items", None):
        return display_name(value).replace(":", ".")
    text = repr(value)
    if "\n" in text:  # some object with arrays in it
        text = re.sub(r"\s+", " ", text)
        text = text if len(text) <= 200 else text[:197] + "..."
    return text


def array_spec(array: Any) -> str:
    """Dtype and shape of an array, such as `float32[32,64]`."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


_MOST_ITEMS = 12  # of a list, which no config holds, but data may


def _long_list(value: list[Any]) -> str:
    return f"[{', '.join(map(spell, value[:_MOST_ITEMS]))}, ... ({len(value) - _MOST_ITEMS} more)]"


def shortened(value: Any, limit: int = 100) -> str:
    """A value spelt on one line, cut after `limit` characters, without addresses.

    Example:
        >>> shortened("a" * 30, limit=10)
        "'aaaaaa..."
    """
    text = re.sub(r" at 0x[0-9A-Fa-f]+", "", re.sub(r"\s+", " ", spell(value)))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def portable(value: Any) -> Any:
    """A value for pickle and deepcopy, in which whatever has a public name is found again by that name.

    pickle itself looks for the private module, and fails on functions such as `jax.nn.relu`; deepcopy makes a copy of
    them that is not equal.
    """
    if type(value) is tuple:
        return tuple(map(portable, value))
    if isinstance(value, dict):
        return type(value)((key, portable(part)) for key, part in value.items())
    if callable(value) and not getattr(type(value), "tree_items", None):
        try:
            return _ByName(public_name(value), value)
        except ConfigError:
            return value
    return value


def from_portable(value: Any) -> Any:
    """The value that `portable` has wrapped."""
    if type(value) is tuple:
        return tuple(map(from_portable, value))
    if isinstance(value, dict):
        return type(value)((key, from_portable(part)) for key, part in value.items())
    return value.value if type(value) is _ByName else value


class _ByName:
    """Stands for a named thing in a pickle."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __reduce__(self) -> Any:
        return import_object, (self.name,)


def _modules(module: str, name: str) -> list[str]:
    """Loaded public modules of the same package that hold something of this name, and the thing's own module."""
    package, top = module.partition(".")[0], name.partition(".")[0]
    public = [
        candidate
        for candidate, loaded in list(sys.modules.items())
        if (candidate == package or candidate.startswith(package + "."))
        and not any(part.startswith("_") for part in candidate.split("."))
        and top in getattr(loaded, "__dict__", {})
    ]
    return [*public, module, *(["types"] if module == "builtins" else [])]  # type(None) is found in types alone


def _attribute(module: str, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def import_object(name: str) -> Any:
    """The object that a name of `public_name` stands for; imports its module.

    Args:
        name: `"module:qualname"`.

    Raises:
        ConfigError: the text is no such name, the module or the attribute does not exist; with near matches.

    Example:
        >>> import_object("optax:sgd").__name__
        'sgd'
    """
    module, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(message(f"{name!r} is not a name", expected="'module:attribute', such as 'optax:adamw'"))
    if name.startswith(_DTYPE):
        dtype = _dtype(name.removeprefix(_DTYPE))
        if dtype is None:
            raise ConfigError(message(f"{name!r}: numpy has no dtype {name.removeprefix(_DTYPE)!r}"))
        return dtype
    try:
        value = importlib.import_module(module)
    except Exception as error:  # whatever the module raises while it is imported
        raise ConfigError(
            message(f"{name!r}: cannot import {module}", got=f"{type(error).__name__}: {error}")
        ) from error
    for part in attribute.split(".") if attribute else ():
        if not hasattr(value, part):
            raise ConfigError(
                message(f"{name!r}: {module} has no {part!r}", near=nearest(part, dir(value)), where=f"module {module}")
            )
        value = getattr(value, part)
        if isinstance(value, types.ModuleType):  # one spelling; and an allowed package leads nowhere else
            raise ConfigError(
                message(f"{name!r} is a module", fix=f"write the module before the colon: {value.__name__}:...")
            )
    return value
