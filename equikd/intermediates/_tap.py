"""Tapping a model: chosen submodules mark what they return, and stay in every other way what they are.

A submodule is replaced by the same object with another class: a subclass whose method puts its output through a mark.
No wrapper, so attributes, `isinstance`, other methods and other modules that read its weights work as before. The
subclass is made once for each class and what is marked of it, since each new one would be a new kind of pytree, and
everything would be traced again.

A model is tapped inside of the function that is differentiated, never outside: gradients then have the structure of the
model that the user knows.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax

from equikd.intermediates._inputs import Inputs
from equikd.intermediates._mark import Name, mark
from equikd.tree import Key, Path, keys_of


def children(node: Any) -> tuple[dict[Key, Any], Any]:
    """The parts of one level of a pytree by key, and the treedef that puts them together again."""
    parts, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda part: part is not node)
    return {keys_of(path)[0]: part for path, part in parts if path}, treedef


def nodes(node: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every node of a pytree with its path, parents before children, leaves included."""
    yield at, node
    for key, part in children(node)[0].items():
        yield from nodes(part, (*at, key))


def tapped(model: Any, names: Iterable[Name]) -> Any:
    """The model, in which what `names` says is marked.

    Args:
        model: any pytree.
        names: of submodules and functions that are there.
    """
    wanted: dict[Path, list[Name]] = {}
    for name in dict.fromkeys(names):
        wanted.setdefault(name.at, []).append(name)
    above = {at[:depth] for at in wanted for depth in range(len(at))}
    return _replaced(model, (), {at: tuple(of_node) for at, of_node in wanted.items()}, above)


def _replaced(node: Any, at: Path, wanted: dict[Path, tuple[Name, ...]], above: set[Path]) -> Any:
    if at in above:
        parts, treedef = children(node)
        node = treedef.unflatten([_replaced(part, (*at, key), wanted, above) for key, part in parts.items()])
    return _tapped_node(node, wanted[at]) if at in wanted else node


def untapped(tree: Any, names: frozenset[Name]) -> Any:
    """A tree without the marks of `names`: a function may return parts of its model, or gradients that look like it."""

    def is_tapped(node: Any) -> bool:
        return not names.isdisjoint(_names_of(node))

    def plain(node: Any) -> Any:
        if not is_tapped(node):
            return node
        if not isinstance(node, eqx.Module) or isinstance(node, _TappedPartial):
            return node.function
        cls: Any = type(node)
        new = object.__new__(cls.__equikd_tapped__[0])
        new.__dict__.update({key: untapped(part, names) for key, part in node.__dict__.items()})
        return new

    return jax.tree.map(plain, tree, is_leaf=is_tapped)


def _names_of(node: Any) -> tuple[Name, ...]:
    if isinstance(node, _TappedFunction | _TappedPartial):
        return node.names
    return getattr(type(node), "__equikd_tapped__", (None, ()))[1] if isinstance(node, eqx.Module) else ()


def _tapped_node(node: Any, names: tuple[Name, ...]) -> Any:
    if isinstance(node, eqx.Module):
        new = object.__new__(_tapped_class(type(node), names))
        new.__dict__.update(node.__dict__)
        return new
    return _TappedPartial(node, names) if children(node)[0] else _TappedFunction(node, names)


def _marking(function: Callable[..., Any], names: tuple[Name, ...], args: Any, kwargs: Any) -> Any:
    for name in names:
        if name.part == "inputs":
            given = mark(Inputs(args, kwargs), name)
            args, kwargs = given.args, given.kwargs
    out = function(*args, **kwargs)
    for name in names:
        if name.part == "output":
            out = mark(out, name)
    return out


@functools.lru_cache(maxsize=4096)
def _tapped_class(cls: Any, names: tuple[Name, ...]) -> Any:
    """A class like `cls` whose methods mark; made anew for a class that is one of these already."""
    by_method: dict[str, list[Name]] = {}
    for name in names:
        by_method.setdefault(name.method, []).append(name)

    def method_of(method: str, of_method: tuple[Name, ...]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _marking(getattr(super(made, self), method), of_method, args, kwargs)

        return call

    class Quiet:
        """First among the bases, so that an `__init_subclass__` of the user's (a registry) sees no subclass."""

        def __init_subclass__(cls, **kwargs: Any) -> None:
            pass

    space = {attribute: getattr(cls, attribute) for attribute in ("__module__", "__qualname__", "__doc__")}
    space |= {method: method_of(method, tuple(of_method)) for method, of_method in by_method.items()}
    space |= {"__equikd_tapped__": (cls, names)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Equinox says to a user who overrides a method
        made = type(cls)(cls.__name__, (Quiet, cls), space)
    return made


class _TappedFunction:
    """A function among the leaves of a model, such as an activation; it stays a leaf."""

    def __init__(self, function: Callable[..., Any], names: tuple[Name, ...]) -> None:
        self.function, self.names = function, names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _marking(self.function, self.names, args, kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("function", "names"):  # while an instance is being made
            raise AttributeError(attribute)
        return getattr(self.function, attribute)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TappedFunction) and (self.function, self.names) == (other.function, other.names)

    def __hash__(self) -> int:
        return hash((self.function, self.names))


class _TappedPartial(eqx.Module):
    """A callable that has parts and is no module, such as `jax.tree_util.Partial`."""

    function: Callable[..., Any]
    names: tuple[Name, ...] = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _marking(self.function, self.names, args, kwargs)
