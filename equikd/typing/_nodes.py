"""Annotations as trees: what holds arrays, and how, as plain data.

    >>> import jax
    >>> from jaxtyping import Float
    >>> node = node_of(dict[str, tuple[Float[jax.Array, "b d"], int]])
    >>> [(path, rule.text) for path, rule in walk(node)]
    [('[...][0]', 'Float[Array, "b d"]')]

`node_of(annotation)` is cached and touches no value. The binder walks a node together with a value; a test's strategy
walks it alone and builds a value. A part without arrays anywhere in it is one `PlainNode`, which beartype judges whole.

Axis names inside a dataclass or `eqx.Module` are that instance's own, as in a constructor that jaxtyping checks: two
layers may use the same letters for different sizes. Everywhere else (list, dict, TypedDict, NamedTuple, ...) they are
those of the call.
"""

import collections
import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from jaxtyping import PyTree

from equikd.typing._annotation import ArrayRule, array_rule
from equikd.typing._hints import class_hints

SEQUENCES = (
    list,
    collections.deque,
    collections.abc.Sequence,
    collections.abc.MutableSequence,
    collections.abc.Collection,
    collections.abc.Reversible,
    collections.abc.Container,
    collections.abc.Iterable,
)
COLLECTIONS = (
    set,
    frozenset,
    collections.abc.Set,
    collections.abc.MutableSet,
    collections.abc.KeysView,
    collections.abc.ValuesView,
    collections.abc.ItemsView,
)
MAPPINGS = (
    dict,
    collections.OrderedDict,
    collections.defaultdict,
    collections.ChainMap,
    types.MappingProxyType,
    collections.abc.Mapping,
    collections.abc.MutableMapping,
)
_WRAPPERS = tuple(
    getattr(typing, name)
    for name in ("Annotated", "Required", "NotRequired", "ReadOnly", "Final", "ClassVar")
    if hasattr(typing, name)
)


@dataclass(frozen=True)
class Node:
    """A part of an annotation."""

    annotation: Any


@dataclass(frozen=True)
class PlainNode(Node):
    """Holds no arrays; or a kind of container that is not looked into, of which only the outer type counts."""


@dataclass(frozen=True)
class CollectionNode(PlainNode):
    """`set[X]`, `ValuesView[X]`, ...: items without places, which are checked, but cannot be drawn for a test."""

    origin: type
    item: Node


@dataclass(frozen=True)
class ArrayNode(Node):
    """`Float[Array, "b d"]`."""

    rule: ArrayRule


@dataclass(frozen=True)
class SequenceNode(Node):
    """`list[X]`, `Sequence[X]`, `Iterable[X]`, and `tuple[X, ...]`; `origin` is list, tuple, ..."""

    origin: type
    item: Node


@dataclass(frozen=True)
class TupleNode(Node):
    """`tuple[X, Y]`."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class MappingNode(Node):
    """`dict[K, X]`, `Mapping[K, X]`."""

    origin: type
    key: Node
    value: Node


@dataclass(frozen=True)
class UnionNode(Node):
    """`X | Y`, `Optional[X]`; members in the order written."""

    members: tuple[Node, ...]


@dataclass(frozen=True)
class PyTreeNode(Node):
    """`PyTree[X]`, `PyTree[X, "S T"]`."""

    leaf: Node
    structure: str | None


@dataclass(frozen=True)
class FieldsNode(Node):
    """Named fields, which are evaluated at first use: a class may hold itself."""

    cls: type

    @functools.cached_property
    def fields(self) -> dict[str, Node]:
        """Field -> node, in order."""
        return {name: node_of(hint) for name, hint in _hints(self.annotation).items() if name in self.names}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        raise NotImplementedError


@dataclass(frozen=True)
class TypedDictNode(FieldsNode):
    """A `TypedDict`: a key that is required or not, and no others."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_hints(self.cls))

    @property
    def required(self) -> frozenset[str]:
        """Keys that must exist."""
        return typing.cast(Any, self.cls).__required_keys__


@dataclass(frozen=True)
class NamedTupleNode(FieldsNode):
    """A `NamedTuple`."""

    @property
    def names(self) -> tuple[str, ...]:
        return typing.cast(Any, self.cls)._fields


@dataclass(frozen=True)
class DataclassNode(FieldsNode):
    """A dataclass or `eqx.Module`: a scope of axis names of its own, in which `{self.x}` is the instance's."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(self.cls))


ANYTHING = PlainNode(Any)


def node_of(annotation: Any) -> Node:
    """The node of an annotation (already evaluated: no string).

    Raises:
        AnnotationError: a symbolic axis is no arithmetic.
    """
    try:
        return _cached_node_of(annotation)
    except TypeError:  # unhashable, as `Annotated[X, []]` is
        return _node_of(annotation)


def is_pytree(annotation: Any) -> bool:
    """Whether it is `PyTree[...]`; plain `PyTree` is `Any`."""
    return isinstance(annotation, type(PyTree)) and hasattr(annotation, "leaftype")


def holds_arrays(node: Node) -> bool:
    """Whether it has to be walked: an array annotation, a `PyTree` or a `TypedDict` stands somewhere in it."""
    return not isinstance(node, PlainNode) or isinstance(node, CollectionNode)


def children(node: Node) -> dict[str, Node]:
    """The parts of a node, each under what is appended to the path: `.field`, `['key']`, `[0]`, `[...]`, ``."""
    match node:
        case SequenceNode(item=item) | CollectionNode(item=item):
            return {"[...]": item}
        case TupleNode(items=items):
            return {f"[{index}]": item for index, item in enumerate(items)}
        case MappingNode(value=value):
            return {"[...]": value}
        case PyTreeNode(leaf=leaf):
            return {"[...]": leaf}
        case TypedDictNode():
            return {f"[{name!r}]": child for name, child in node.fields.items()}
        case FieldsNode():
            return {f".{name}": child for name, child in node.fields.items()}
        case UnionNode(members=members):
            return {f"|{index}": member for index, member in enumerate(members)}
    return {}


def walk(node: Node, path: str = "", seen: frozenset[type] = frozenset()) -> Iterator[tuple[str, ArrayRule]]:
    """Every array rule of a node, with its path; `[...]` for each item, and nothing for the members of a union."""
    if isinstance(node, ArrayNode):
        yield path, node.rule
    if isinstance(node, FieldsNode):
        if node.cls in seen:
            return
        seen |= {node.cls}
    for step, child in children(node).items():
        yield from walk(child, path if isinstance(node, UnionNode) else path + step, seen)


@functools.lru_cache(maxsize=4096)
def _cached_node_of(annotation: Any) -> Node:
    return _node_of(annotation)


def _node_of(annotation: Any) -> Node:
    annotation = _unwrapped(annotation)
    return _structure(annotation) if _mentions_array(annotation) else PlainNode(annotation)


def _structure(annotation: Any) -> Node:
    origin, arguments = get_origin(annotation), get_args(annotation)
    rule = array_rule(annotation)
    if rule is not None:
        return ArrayNode(annotation, rule)
    if origin is Union or origin is types.UnionType:
        return UnionNode(annotation, tuple(node_of(member) for member in arguments))
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return SequenceNode(annotation, tuple, node_of(arguments[0]))
        return TupleNode(annotation, tuple(node_of(item) for item in arguments))
    if origin in SEQUENCES and arguments:
        return SequenceNode(annotation, origin, node_of(arguments[0]))
    if origin is collections.abc.ItemsView and len(arguments) == 2:
        return CollectionNode(annotation, origin, TupleNode(tuple[arguments], tuple(map(node_of, arguments))))
    if origin in COLLECTIONS and arguments:
        return CollectionNode(annotation, origin, node_of(arguments[0]))
    if origin is type:
        return PlainNode(annotation)  # of the class of an array, not of an array
    if origin in MAPPINGS and len(arguments) == 2:
        return MappingNode(annotation, origin, node_of(arguments[0]), node_of(arguments[1]))
    if is_pytree(annotation):
        return PyTreeNode(annotation, node_of(annotation.leaftype), annotation.structure)
    return _class(annotation, origin if isinstance(origin, type) else annotation)


def _class(annotation: Any, cls: Any) -> Node:
    if isinstance(cls, type):
        for kind, applies in (
            (TypedDictNode, typing.is_typeddict(cls)),
            (NamedTupleNode, issubclass(cls, tuple) and hasattr(cls, "_fields")),
            (DataclassNode, dataclasses.is_dataclass(cls)),
        ):
            if applies and _hints(annotation):
                return kind(annotation, cls)
    # `Iterator[Float[...]]`, `Callable[[Float[...]], ...]`: what is inside cannot be seen without using it up.
    return PlainNode(cls if isinstance(cls, type) else Any)


def _mentions_array(annotation: Any, seen: frozenset[type] = frozenset()) -> bool:
    """As `holds_arrays`, of an annotation; `seen` are the classes that it stands in: a class may hold itself."""
    if isinstance(annotation, list):  # the arguments of a Callable
        return any(_mentions_array(one, seen) for one in annotation)
    annotation = _unwrapped(annotation)
    cls = get_origin(annotation) or annotation
    if array_rule(annotation) is not None or is_pytree(annotation) or typing.is_typeddict(cls):
        return True
    parts = list(get_args(annotation))
    named_tuple = isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    if isinstance(cls, type) and (named_tuple or dataclasses.is_dataclass(cls)) and cls not in seen:
        seen |= {cls}
        parts += _hints(annotation).values()
    return any(_mentions_array(one, seen) for one in parts)


def _unwrapped(annotation: Any) -> Any:
    """Without `Annotated`, `NotRequired`, ..., and with type variables and aliases replaced by what they stand for."""
    inner: Any = annotation
    while True:
        annotation = inner
        if hasattr(annotation, "__metadata__") and get_origin(annotation) is Annotated:
            if array_rule(annotation.__origin__) is None and not get_args(annotation.__origin__):
                return annotation  # beartype knows validators
            inner = annotation.__origin__
        elif get_origin(annotation) in _WRAPPERS:
            inner = get_args(annotation)[0]
        elif isinstance(annotation, TypeVar) and (annotation.__bound__ is not None or annotation.__constraints__):
            inner = annotation.__bound__ or Union[annotation.__constraints__]  # noqa: UP007  # a tuple of them
        elif hasattr(annotation, "__supertype__"):  # NewType
            inner = annotation.__supertype__  # pyright: ignore[reportAttributeAccessIssue]
        elif hasattr(annotation, "__value__") and hasattr(annotation, "__type_params__"):  # type X = ...
            inner = annotation.__value__  # pyright: ignore[reportAttributeAccessIssue]
        else:
            return annotation


@functools.lru_cache(maxsize=1024)
def _hints(annotation: Any) -> dict[str, Any]:
    return class_hints(annotation)
