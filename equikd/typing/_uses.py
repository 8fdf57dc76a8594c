"""Where each axis name of a call is used: what a message needs, and a passing check does not collect.

`occurrences` walks a value with its annotation and yields every array; `uses` lists the places of one name;
`fits_with` asks what would have happened if one array had another shape, which is how a hint is found.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from equikd.typing._accepts import accepts, dtype_name, is_array, items_of
from equikd.typing._annotation import ArrayRule
from equikd.typing._binder import fields_of, leaves_of
from equikd.typing._bindings import Bindings, Key, Mismatch
from equikd.typing._nodes import (
    ArrayNode,
    CollectionNode,
    DataclassNode,
    MappingNode,
    NamedTupleNode,
    Node,
    PyTreeNode,
    SequenceNode,
    TupleNode,
    TypedDictNode,
    UnionNode,
    walk,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Occurrence:
    """An array (or what stands where one should) with its rule."""

    path: str
    rule: ArrayRule
    value: Any
    owner: Any = None
    """The dataclass instance whose own scope its names belong to."""
    leaf: tuple[str, int] | None = None
    """In a structured PyTree: which leaf."""

    @property
    def fits(self) -> bool:
        """Whether it is an array of admitted rank, so that its axes have sizes."""
        return is_array(self.value) and self.rule.admits_rank(len(self.value.shape))


class Use(NamedTuple):
    """One place of an axis name."""

    occurrence: Occurrence
    position: int
    size: Any


def occurrences(
    node: Node,
    value: Any,
    path: str,
    owner: Any = None,
    leaf: tuple[str, int] | None = None,
    picks: Mapping[tuple[int, int], int] | None = None,
) -> Iterator[Occurrence]:
    """Every array of a value, in the order of the check; what is of a wrong type is passed over.

    Args:
        node: what it should be.
        value: any value.
        path: where it stands.
        owner: the dataclass instance whose scope it is in.
        leaf: in a structured PyTree: which leaf.
        picks: of unions, which member was taken, as `Bindings.picks`: of one that was not reached, nobody knows. None:
            the first that the value could be.
    """
    match node:
        case ArrayNode(rule=rule):
            yield Occurrence(path, rule, value, owner, leaf)
            return
        case UnionNode(members=members):
            picked = None if picks is None else picks.get((id(node), id(value)))
            likely = [one for one in members if accepts(one, value)] if picked is None else [members[picked]]
            if picked is None and picks is not None and len(likely) > 1:
                return
            for member in likely[:1] or _nearest(members, value):
                yield from occurrences(member, value, path, owner, leaf, picks)
            return
        case DataclassNode():
            owner = value
    for step, child, part in _parts(node, value):
        inner = leaf
        if isinstance(node, PyTreeNode) and node.structure is not None:
            inner = (node.structure, int(step.partition("\0")[2]))
        yield from occurrences(child, part, path + step.partition("\0")[0], owner, inner, picks)


def _nearest(members: Iterable[Node], value: Any) -> list[Node]:
    """Of an array that fits no member of a union, the member that it comes nearest to."""
    arrays = [one for one in members if isinstance(one, ArrayNode)]
    if not arrays or not is_array(value):
        return []
    dtype, rank = dtype_name(value.dtype), len(value.shape)
    closeness = lambda one: (
        accepts(one, value, whole=False), one.rule.admits_dtype(dtype), one.rule.admits_rank(rank)
    )  # fmt: skip
    return [max(arrays, key=closeness)]


def _parts(node: Node, value: Any) -> Iterator[tuple[str, Node, Any]]:
    match node:
        case SequenceNode(item=item) if isinstance(value, Iterable):
            yield from ((f"[{index}]", item, one) for index, one in enumerate(items_of(value)))
        case CollectionNode(item=item, origin=origin) if isinstance(value, origin):
            yield from (("[...]", item, one) for one in value)
        case TupleNode(items=items) if isinstance(value, tuple):
            yield from ((f"[{i}]", *pair) for i, pair in enumerate(zip(items, value, strict=False)))
        case MappingNode(value=item) if isinstance(value, Mapping):
            yield from ((f"[{key!r}]", item, one) for key, one in value.items())
        case TypedDictNode() if isinstance(value, Mapping):
            yield from ((f"[{k!r}]", child, value[k]) for k, child in node.fields.items() if k in value)
        case NamedTupleNode() if isinstance(value, node.cls):
            yield from ((f".{name}", child, getattr(value, name)) for name, child in node.fields.items())
        case DataclassNode() if isinstance(value, node.cls):
            yield from ((f".{name}", *pair) for name, pair in fields_of(node, value).items())
        case PyTreeNode(leaf=leaf) if any(True for _ in walk(leaf)):
            yield from ((f"{key}\0{index}", leaf, part) for index, (key, part) in enumerate(leaves_of(node, value)[0]))


def uses(found: Iterable[Occurrence], key: Key, *, group: bool, owner: Any) -> list[Use]:
    """The places of a name within one scope, sizes of 1 that broadcast left out."""
    listed = []
    for one in found:
        if one.owner is not owner or not one.fits:
            continue
        names = Bindings()
        names.leaf = one.leaf
        for axis, positions in one.rule.align(len(one.value.shape)):
            if axis.kind != ("variadic" if group else "named") or names.key(axis) != key:
                continue
            sizes = one.value.shape[positions]
            if group or not (axis.broadcast and sizes[0] == 1):
                listed.append(Use(one, positions.start, sizes if group else sizes[0]))
    return listed


class _Stand(NamedTuple):
    shape: tuple[int, ...]


def fits_with(
    found: Iterable[Occurrence],
    changed: Occurrence,
    shape: tuple[int, ...],
    arguments: Mapping[str, Any],
    known: Bindings,
) -> bool:
    """Whether the axes of all arrays of a scope would agree if `changed` had another shape."""
    bindings = Bindings(*known.shared_names(), arguments=arguments, scopes=known.scopes)
    if changed.owner is not None:
        bindings.arguments = {"self": changed.owner}
    try:
        for one in found:
            sizes = shape if one is changed else one.value.shape if is_array(one.value) else ()
            if one.owner is not changed.owner:
                continue
            if not one.rule.admits_rank(len(sizes)):
                return False
            bindings.leaf = one.leaf
            bindings.bind(one.rule, _Stand(sizes), sizes)
        bindings.settle()
    except Mismatch:
        return False
    return True
