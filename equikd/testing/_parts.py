"""Arguments as plans: which arrays stand where, decided before any array exists.

A drawn call is a tree of parts. A `Leaf` is an array that is not made yet (its rule, shape and dtype), a `Fixed` any
other value, a `Group` a container. From the same parts come shapes for `jax.eval_shape`, real arrays, the text of the
call, and, with one leaf replaced, a call that is broken in exactly one place.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import EquikdError, message, nearest
from equikd.typing._annotation import ArrayRule
from equikd.typing._nodes import Node

_PREFIXES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


class DrawError(EquikdError, TypeError):
    """Annotations, or options, from which no arguments can be drawn."""


class Undrawable(Exception):
    """One annotation that says too little; `path` is where it stands."""

    def __init__(self, path: str, annotation: Any, why: str) -> None:
        super().__init__(path)
        self.path, self.annotation, self.why = path, annotation, why


@dataclasses.dataclass(eq=False)
class Scope:
    """The axis names of a call, or of one dataclass instance in it."""

    arguments: dict[str, Any]
    """For what stands in braces: `{heads}`, `{self.dim}`."""
    sizes: dict[Any, int] = dataclasses.field(default_factory=dict)
    groups: dict[Any, tuple[int, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """An array to be made."""

    rule: ArrayRule
    shape: tuple[int, ...]
    dtype: str
    path: str

    @property
    def concrete(self) -> bool:
        """Whether it must be real even where shapes are enough: NumPy knows no tracers."""
        return self.rule.array_type is np.ndarray

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype."""
        if self.dtype == "prng_key":
            return jax.ShapeDtypeStruct(self.shape, jax.random.key(0).dtype)
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def make(self, seed: int) -> Any:
        """A real array: small numbers, both signs where the dtype has them."""
        if self.dtype == "prng_key":
            return jax.random.split(jax.random.key(seed), self.shape)
        numbers = np.random.default_rng(seed).normal(size=self.shape)
        if self.dtype.startswith(("int", "uint", "bool")):
            numbers = np.abs(numbers * 2).astype(int) % 4
        array = numbers.astype(jnp.dtype(self.dtype))
        return array if self.concrete else jnp.asarray(array)


@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """A value without arrays to draw."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """A container, or a tree."""

    node: Node
    """What it was drawn for."""
    kind: type
    """`list`, `tuple`, `dict`, or the class of the fields; `object` for a tree."""
    keys: tuple[Any, ...]
    """Of the children: positions, keys, or fields."""
    children: tuple["Part", ...]
    make: Callable[[list[Any]], Any]
    scope: Scope | None = None
    """Of a dataclass instance."""


Part = Leaf | Fixed | Group


def leaves(parts: Iterable[Part]) -> Iterator[Leaf]:
    """All leaves, in order."""
    for part in parts:
        if isinstance(part, Leaf):
            yield part
        elif isinstance(part, Group):
            yield from leaves(part.children)


def replaced(part: Part, old: Leaf, new: Leaf) -> Part:
    """The part with another leaf in the place of one."""
    if part is old:
        return new
    if isinstance(part, Group):
        return dataclasses.replace(part, children=tuple(replaced(child, old, new) for child in part.children))
    return part


def built(part: Part, make: Callable[[Leaf], Any]) -> Any:
    """The value that a part stands for.

    Args:
        part: what was drawn.
        make: leaf -> array, or what takes its place.
    """
    if isinstance(part, Leaf):
        return make(part)
    if isinstance(part, Fixed):
        return part.value
    return part.make([built(child, make) for child in part.children])


def shaped(leaf: Leaf) -> Any:
    """What takes the place of an array where shapes are enough."""
    return leaf.make(0) if leaf.concrete else leaf.spec


def written(value: Any) -> str:
    """A value as it stands in the text of a call: `f32[2,3]`, `[i32[3]]`, `Weights(w=f32[2])`.

    Example:
        >>> written({"x": jax.ShapeDtypeStruct((2, 3), "bfloat16"), "n": (1,)})
        "{'x': bf16[2,3], 'n': (1,)}"
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _array(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        named = dict(zip(typing.cast(Any, value)._fields, value, strict=True))
        return f"{type(value).__name__}({_fields(named)})"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(written, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value) if field.repr}
        return f"{type(value).__name__}({_fields(shown)})"
    return getattr(value, "__qualname__", None) or repr(value)


def _array(value: Any) -> str:
    name = str(value.dtype)
    if name.startswith("key<"):
        name = "key"
    else:
        letters = name.rstrip("0123456789")
        name = _PREFIXES.get(letters, letters) + name[len(letters) :]
    return f"{name}[{','.join(map(str, value.shape))}]"


def _fields(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={written(value)}" for name, value in values.items())


def known_choices(option: str, chosen: Iterable[str], choices: Sequence[str], owner: str) -> None:
    """Refuse a choice that an option does not have.

    Raises:
        DrawError: the first such choice, with near matches.
    """
    for one in chosen:
        if one not in choices:
            expected = ", ".join(map(repr, choices))
            what = f"{option}: there is no {one!r}"
            raise DrawError(message(what, where=owner, expected=expected, near=nearest(str(one), choices)))


def known_names(what: str, names: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Refuse names that stand nowhere.

    Raises:
        DrawError: the first such name, with near matches.
    """
    known = sorted(set(known))
    for name in names:
        if name not in known:
            raise DrawError(
                message(
                    f"{what}: {owner} has no axis or argument {name!r}",
                    expected=", ".join(known) or "nothing to choose here",
                    near=nearest(name, known),
                )
            )
