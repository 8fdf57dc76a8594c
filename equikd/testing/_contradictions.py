"""Whether annotations admit some arrays, judged a second time: from the sizes alone, without the binder.

A test of the binder must not ask the binder. Here a call is read by its annotations into occurrences (an array, the
rule that it stands under, whose names), one *reading* for each way to choose members of unions. A reading is
contradicted if a fixed axis has another size, a name has two, groups do not broadcast, or an expression gives something
else. A call is broken only if every reading is. Where it is hard to say, the answer is "not contradicted".
"""

import enum
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_origin

import jax
import numpy as np
from jaxtyping import AnnotationError

from equikd.testing._parts import Fixed, Group, Leaf, Part, Scope
from equikd.typing._annotation import ArrayRule, Axis
from equikd.typing._nodes import (
    ArrayNode,
    DataclassNode,
    FieldsNode,
    MappingNode,
    Node,
    PlainNode,
    PyTreeNode,
    SequenceNode,
    TupleNode,
    UnionNode,
    children,
)

_MOST_READINGS = 256
_LARGEST_UNKNOWN = 400


class Occurrence(NamedTuple):
    """An array under a rule."""

    leaf: Leaf
    rule: ArrayRule
    scope: Scope
    tree: tuple[str, int] | None

    def key(self, axis: Axis) -> Any:
        """The name of an axis, which `?` makes one for each leaf."""
        return (*(self.tree or ("", -1)), axis.name) if axis.tree else axis.name


Reading = tuple[Occurrence, ...]


class TooMany(Exception):
    """There are more ways to read a call than can be tried."""


def contradiction(parts: Mapping[str, Part], nodes: Mapping[str, Node], scope: Scope) -> str | None:
    """What is contradictory in every reading of a call, said of the first one; None where one may be right.

    Args:
        parts: argument -> what was drawn, or changed.
        nodes: argument -> annotation.
        scope: of the call.
    """
    try:
        found = _product([list(_readings(nodes[name], part, scope)) for name, part in parts.items() if name in nodes])
    except TooMany:
        return None
    texts = [contradicted(reading) for reading in found]
    if not texts:
        return "an argument is of another kind"
    return None if None in texts else texts[0]


def undetermined(parts: Mapping[str, Part], nodes: Mapping[str, Node], scope: Scope) -> str | None:
    """An expression that no reading can determine, because two of its names are bound nowhere."""
    try:
        found = _product([list(_readings(nodes[name], part, scope)) for name, part in parts.items() if name in nodes])
    except TooMany:
        return None
    texts = [next(_undetermined(reading), None) for reading in found]
    return texts[0] if texts and None not in texts else None


def possible(node: Node | None, scope: Scope, chosen: Collection[str]) -> bool:
    """Whether some array can have the shapes that a node says, as far as these are expressions of what is known.

    Args:
        node: of the result.
        scope: of the call.
        chosen: axis names whose sizes the user draws; an expression of others is not 0.
    """
    match node:
        case ArrayNode(rule=rule):
            return all(_has_a_value(axis, scope, chosen) for axis in rule.axes if axis.kind == "symbolic")
        case UnionNode(members=members):
            return any(possible(member, scope, chosen) for member in members)
        case None | DataclassNode():  # an instance has names of its own
            return True
    return all(possible(child, scope, chosen) for child in children(node).values())


def _has_a_value(axis: Axis, scope: Scope, chosen: Collection[str]) -> bool:
    assert axis.expression is not None
    if axis.expression.unknowns(scope.sizes):
        return True
    try:
        value = axis.expression.evaluate(scope.sizes, scope.arguments)
    except ArithmeticError:
        return False
    except AnnotationError:  # of the annotation itself, which the check will say
        return True
    return is_size(value, axis, chosen)


def is_size(value: float, axis: Axis, chosen: Collection[str]) -> bool:
    """Whether an expression's value is a size; 0 is one where the user draws all of its axes."""
    assert axis.expression is not None
    return value == int(value) and (value > 0 or (value == 0 and not axis.expression.names - {*chosen}))


def _product(columns: Sequence[list[Reading]]) -> list[Reading]:
    total = 1
    for column in columns:
        total *= len(column)
    if total > _MOST_READINGS:
        raise TooMany
    return [tuple(itertools.chain.from_iterable(row)) for row in itertools.product(*columns)]


def _readings(node: Node, part: Part, scope: Scope, tree: tuple[str, int] | None = None) -> Iterator[Reading]:
    """Ways in which a part may stand under a node; an empty reading says nothing against it."""
    match node:
        case ArrayNode(rule=rule):
            if isinstance(part, Leaf) and _admits(rule, part):
                yield (Occurrence(part, rule, scope, tree),)
        case UnionNode(members=members):
            for member in members:
                yield from _readings(member, part, scope, tree)
        case PlainNode(annotation=annotation):
            if isinstance(part, Fixed) or not _never_an_array(annotation, part):
                yield ()
        case PyTreeNode():
            if isinstance(part, Group) and part.node == node:
                trees = [None if node.structure is None else (node.structure, index) for index in part.keys]
                yield from _product(
                    [
                        list(_readings(node.leaf, child, scope, one))
                        for child, one in zip(part.children, trees, strict=True)
                    ]
                )
            else:  # a tree of something: hard to say
                yield ()
        case _ if isinstance(part, Group):
            yield from _container(node, part, scope)


def _container(node: Node, part: Group, scope: Scope) -> Iterator[Reading]:
    if isinstance(part.node, PyTreeNode):
        yield ()
        return
    match node:
        case SequenceNode(origin=origin, item=item) if issubclass(part.kind, origin):
            nodes = [item] * len(part.children)
        case TupleNode(items=items) if part.kind is tuple and len(items) == len(part.children):
            nodes = list(items)
        case MappingNode(value=value) if part.kind is dict:
            nodes = [value] * len(part.children)
        case FieldsNode() if part.kind is node.cls:
            nodes = [node.fields[key] for key in part.keys]
            if isinstance(node, DataclassNode):
                assert part.scope is not None
                scope = part.scope
        case _:
            return
    yield from _product([list(_readings(one, child, scope)) for one, child in zip(nodes, part.children, strict=True)])


def _admits(rule: ArrayRule, leaf: Leaf) -> bool:
    kind = np.ndarray if leaf.concrete else jax.Array
    right_type = rule.array_type is Any or issubclass(kind, rule.array_type)
    return right_type and rule.admits_dtype(leaf.dtype) and rule.admits_rank(len(leaf.shape))


def _never_an_array(annotation: Any, part: Part) -> bool:
    if annotation is float:
        return not (isinstance(part, Leaf) and part.shape == () and "float" in part.dtype)
    if annotation in (None, type(None), int, bool, str, bytes, complex) or get_origin(annotation) is Literal:
        return True
    return isinstance(annotation, type) and issubclass(annotation, enum.Enum)


def contradicted(reading: Reading) -> str | None:
    """What is contradictory in one reading."""
    for scope in {id(one.scope): one.scope for one in reading}.values():
        inside = [one for one in reading if one.scope is scope]
        text = _one_scope(inside, scope)
        if text is not None:
            return text
    return None


def _one_scope(reading: Sequence[Occurrence], scope: Scope) -> str | None:
    sizes: dict[Any, tuple[int, str]] = {}
    groups: dict[Any, list[tuple[bool, tuple[int, ...], Occurrence]]] = {}
    symbols: list[tuple[Occurrence, Axis, int]] = []
    for one in reading:
        shape = one.leaf.shape
        for axis, at in one.rule.align(len(shape)):
            if axis.kind == "variadic":
                groups.setdefault(one.key(axis), []).append((axis.broadcast, shape[at], one))
            if axis.kind in ("ellipsis", "variadic", "anonymous") or (axis.broadcast and shape[at.start] == 1):
                continue
            size = shape[at.start]
            if axis.kind == "fixed" and size != axis.size:
                return f"axis {at.start} of {one.leaf.path} is {size}, and the annotation says {axis.size}"
            if axis.kind == "symbolic":
                symbols.append((one, axis, at.start))
            elif axis.kind == "named":
                known = sizes.setdefault(one.key(axis), (size, one.leaf.path))
                if known[0] != size:
                    where = one.leaf.path if one.leaf.path != known[1] else "the same array"
                    return f"axis {axis.name} of {known[1]} is {known[0]}, of {where} it is {size}"
    return _wrong_group(groups) or _wrong_symbol(symbols, {key: size for key, (size, _) in sizes.items()}, scope)


def _wrong_group(groups: Mapping[Any, list[tuple[bool, tuple[int, ...], Occurrence]]]) -> str | None:
    for key, found in groups.items():
        name = key if isinstance(key, str) else key[-1]
        exact = [(shape, one) for loose, shape, one in found if not loose]
        joint: tuple[int, ...] = exact[0][0] if exact else ()
        for shape, one in exact:
            if shape != joint:
                return f"axes *{name} of {exact[0][1].leaf.path} are {joint}, of {one.leaf.path} they are {shape}"
        for loose, shape, one in found:
            try:
                wider = np.broadcast_shapes(joint, shape)
            except ValueError:
                wider = None
            if wider is None or (loose and exact and wider != joint):
                return f"axes *{name} of {one.leaf.path} are {shape}, which do not broadcast with {joint}"
            joint = wider
    return None


def _wrong_symbol(
    symbols: Sequence[tuple[Occurrence, Axis, int]], sizes: Mapping[Any, int], scope: Scope
) -> str | None:
    waiting: dict[str, list[tuple[Occurrence, Axis, int]]] = {}
    for one, axis, index in symbols:
        assert axis.expression is not None
        unknown = axis.expression.unknowns(sizes)
        if len(unknown) == 1:
            waiting.setdefault(unknown[0], []).append((one, axis, index))
        elif not unknown and _evaluated(axis, sizes, scope) != one.leaf.shape[index]:
            what = f"axis {index} of {one.leaf.path} is {one.leaf.shape[index]}"
            return f"{what}, and {axis.text} is {_evaluated(axis, sizes, scope)}"
    if any(len(axis.expression.unknowns(sizes)) > 1 for _, axis, _ in symbols if axis.expression is not None):
        return None  # one name after the other: hard to say
    for name, found in waiting.items():
        fits = any(
            all(_evaluated(axis, {**sizes, name: guess}, scope) == one.leaf.shape[index] for one, axis, index in found)
            for guess in range(_LARGEST_UNKNOWN)
        )
        if not fits:
            told = ", ".join(f"{axis.text} = {one.leaf.shape[index]} in {one.leaf.path}" for one, axis, index in found)
            return f"no {name} fits: {told}"
    return None


def _evaluated(axis: Axis, sizes: Mapping[Any, int], scope: Scope) -> Any:
    assert axis.expression is not None
    try:
        return axis.expression.evaluate(sizes, scope.arguments)
    except (ArithmeticError, AnnotationError):
        return None


def _undetermined(reading: Reading) -> Iterator[str]:
    """Expressions with two names or more that are bound nowhere, even after those with one are solved."""
    for scope in {id(one.scope): one.scope for one in reading}.values():
        inside = [one for one in reading if one.scope is scope]
        known: set[str] = set()
        symbols: list[tuple[Occurrence, Axis]] = []
        for one in inside:
            for axis, at in one.rule.align(len(one.leaf.shape)):
                if axis.kind == "named" and not axis.tree and not (axis.broadcast and one.leaf.shape[at.start] == 1):
                    known.add(axis.name)
                elif axis.kind == "symbolic" and not (axis.broadcast and one.leaf.shape[at.start] == 1):
                    symbols.append((one, axis))
        while solved := [axis for _, axis in symbols if len(axis.names - known) == 1]:
            known |= frozenset().union(*(axis.names for axis in solved))
        yield from (f"{axis.text} of {one.leaf.path}" for one, axis in symbols if axis.names - known)
