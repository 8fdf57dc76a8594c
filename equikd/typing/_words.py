"""Values, annotations, sizes and repairs, as a message writes them."""

import re
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from equikd.typing._accepts import is_array

_PREFIXES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short(value: Any) -> str:
    """`f32[2,3]` of an array; the repr of anything else, cut.

    Example:
        >>> short(np.zeros((2, 3), np.int8)), short("text"), short([1, 2])
        ('i8[2,3]', "'text'", 'list of 2')
    """
    if is_array(value):
        named = re.fullmatch(r"([a-z]+)(\d+)", str(value.dtype))
        dtype = _PREFIXES.get(named[1], named[1]) + named[2] if named else str(value.dtype)
        kind = "" if isinstance(value, jax.Array | np.ndarray | np.generic) else f"{type(value).__name__} "
        return f"{kind}{dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, str | int | float | complex):
        text = repr(value)
        return text if len(text) <= 40 else text[:37] + "..."
    return f"a {type(value).__name__}"


def written(annotation: Any) -> str:
    """An annotation as the user writes it."""
    if isinstance(annotation, type) and annotation.__module__ != "jaxtyping" and not hasattr(annotation, "__args__"):
        return annotation.__name__
    text = re.sub(r"\b(?:typing|jaxtyping|jaxlib\._jax|collections\.abc)\.", "", str(annotation))
    text = re.sub(r"<class '(?:[\w<>]+\.)*(\w+\[.*?\]|\w+)'>", r"\1", text)
    text = re.sub(r"\b(?:\w+\.)+(?:<locals>\.)?(?=[A-Z])", "", text)
    if not text.startswith("Literal"):
        text = re.sub(r", '([^']*)'\]", r', "\1"]', text)
    return "PRNGKeyArray" if annotation == PRNGKeyArray else text


def axes_of(count: int) -> str:
    return f"{count} {'axis' if count == 1 else 'axes'}"


def size_of(size: Any) -> str:
    return f"({', '.join(map(str, size))}{',' * (len(size) == 1)})" if isinstance(size, tuple) else str(size)


def kind_of(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return "a numpy array"
    if isinstance(value, jax.Array):
        return f"a JAX array, {short(value)}"
    text, name = short(value), type(value).__name__
    if value is None or text.startswith((f"a {name}", f"{name} ")):
        return text if value is None or text.startswith("a ") else f"a {text}"
    return f"{text}, {'an' if name[0] in 'aeiou' else 'a'} {name}"


def array_kind(array_type: Any) -> str:
    return {jax.Array: "a JAX array", np.ndarray: "a numpy array", Any: "an array"}.get(
        array_type, getattr(array_type, "__name__", str(array_type))
    )


def type_fix(path: str, value: Any, array_type: Any) -> str | None:
    if array_type is jax.Array and isinstance(value, np.ndarray | np.generic | int | float | complex):
        return f"jnp.asarray({path}), or annotate it with ArrayLike"
    if array_type is np.ndarray and isinstance(value, jax.Array):
        return f"np.asarray({path}), outside of jit"
    return None


def dtype_fix(path: str, got: str, family: str) -> str | None:
    if got == "prng_key":
        return f"{path} is a PRNG key; annotate it with PRNGKeyArray"
    if family == "Key":
        return "make it with jax.random.key(seed)"
    to = {"Float": "float32", "Int": "int32", "Bool": "bool", "Integer": "int32", "Inexact": "float32"}.get(family)
    return None if to is None else f"{path}.astype({to!r}), if that is meant"


def cut(text: str, width: int = 90) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
