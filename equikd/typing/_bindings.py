"""What the names of a call stand for, and how a name is bound: axis sizes, groups of axes, tree structures.

`Bindings` is the memory of one call (or of one dataclass instance, see `_nodes`). The first array that has an axis
binds its name, every later one must agree; a disagreement is a `Mismatch`, which knows the place but not yet the words:
`_report` finds those, on the failing path only.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import AnnotationError

from equikd.typing._annotation import ArrayRule, Axis
from equikd.typing._expression import UnboundName
from equikd.typing._solve import Unsolvable, common

Key = str | tuple[str, int, str]
"""The name of an axis; for an axis marked `?`: (structure, number of the leaf, name)."""

Problem = Literal[
    "type",
    "plain",
    "union",
    "dtype",
    "rank",
    "fixed",
    "named",
    "variadic",
    "symbolic",
    "unsolved",
    "braces",
    "structure",
    "keys",
]


class Mismatch(Exception):
    """A value does not fit; `path` grows from the inside out while it travels up through containers."""

    def __init__(
        self,
        problem: Problem,
        value: Any,
        *,
        rule: ArrayRule | None = None,
        axis: Axis | None = None,
        index: int | None = None,
        got: Any = None,
        expected: Any = None,
        key: Any = None,
    ) -> None:
        super().__init__(problem)
        self.problem: Problem = problem
        self.value, self.rule, self.axis, self.index = value, rule, axis, index
        self.got, self.expected, self.key = got, expected, key
        self.path: list[str] = []
        self.owner: Any = None  # the dataclass instance in whose own scope it happened
        self.union: Any = None  # the annotation, where other members of a union might have been meant
        self.gave_up = 0  # after how many attempts with other members of unions, if there were more


class Deferred(NamedTuple):
    """A symbolic axis that waits for the size of a name."""

    rule: ArrayRule
    axis: Axis
    position: int
    size: int
    value: Any


class Script:
    """The choices to make at unions in an attempt, and those that it has made; see `_search`."""

    def __init__(self, path: tuple[int, ...]) -> None:
        self.path = path
        self.choices: list[tuple[int, int]] = []
        """(member taken, number of members) at each union."""
        self.taken: dict[Any, int] = {}
        """What a value looks like -> member taken."""
        self.visits = 0


class Bindings:
    """Names and what they stand for, in one scope."""

    __slots__ = (
        "ambiguous", "arguments", "deferred", "given", "groups", "leaf", "picks", "scopes", "script", "sizes", "trees",
    )  # fmt: skip

    def __init__(
        self,
        sizes: Mapping[Any, int] = {},  # read only
        groups: Mapping[Any, tuple[bool, tuple[int, ...]]] = {},
        arguments: Mapping[str, Any] = {},
        scopes: tuple[Any, ...] = (),
    ) -> None:
        self.scopes = scopes
        """The open `Scope`s that this call shares names with, the innermost last."""
        self.given = sizes, groups
        """What was known before."""
        self.sizes: dict[Any, int] = dict(sizes)
        self.groups: dict[Any, tuple[bool, tuple[int, ...]]] = dict(groups)
        self.trees: dict[str, Any] = {}
        self.deferred: list[Deferred] = []
        self.arguments = arguments
        self.leaf: tuple[str, int] | None = None
        self.ambiguous = False
        """Whether more than one member of a union could fit."""
        self.script: Script | None = None
        """Which members of unions to take; None: the first that fits so far."""
        self.picks: dict[tuple[int, int], int] | None = None
        """(union, value) -> member taken without a script, for a message."""

    def save(self) -> tuple[Any, ...]:
        """A copy for `restore`."""
        return dict(self.sizes), dict(self.groups), dict(self.trees), list(self.deferred)

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Forget what was bound since `save`."""
        self.sizes, self.groups, self.trees, self.deferred = saved

    def again(self) -> "Bindings":
        """Bindings that know what these knew in the beginning."""
        return Bindings(*self.given, self.arguments, self.scopes)

    def copy(self) -> "Bindings":
        """The same, to be bound further."""
        other = Bindings(self.sizes, self.groups, self.arguments, self.scopes)
        other.trees, other.deferred, other.leaf = dict(self.trees), list(self.deferred), self.leaf
        return other

    def adopt(self, other: "Bindings") -> None:
        """Know what a copy has bound."""
        self.sizes, self.groups, self.trees, self.deferred = other.sizes, other.groups, other.trees, other.deferred

    @property
    def shared(self) -> frozenset[str]:
        """Names that an open `Scope` declares (`b`, `*n`): those of a dataclass instance within the call, too."""
        return frozenset().union(*(scope.declared for scope in self.scopes))

    def shared_names(self) -> tuple[dict[Any, int], dict[Any, tuple[bool, tuple[int, ...]]]]:
        """The sizes and groups of the names that a `Scope` declares."""
        if not self.scopes:
            return {}, {}
        shared = self.shared
        sizes = {name: size for name, size in self.sizes.items() if name in shared}
        return sizes, {name: group for name, group in self.groups.items() if f"*{name}" in shared}

    def key(self, axis: Axis) -> Key:
        """Under which an axis is bound: its name, or one name for each leaf."""
        if not axis.tree:
            return axis.name
        structure, index = self.leaf if self.leaf is not None else ("", -1)
        return structure, index, axis.name

    def bind(self, rule: ArrayRule, value: Any, shape: tuple[int, ...]) -> None:
        """Bind the axes of an array of admitted rank.

        Raises:
            Mismatch: an axis disagrees.
        """
        later = []
        for axis, positions in rule.align(len(shape)):
            if axis.many:
                later.append((axis, positions))  # as jaxtyping does: single axes first
            else:
                self._single(rule, value, axis, positions.start, shape[positions.start])
        for axis, positions in later:
            if axis.kind == "variadic" and not self._group(axis, shape[positions]):
                known = self.groups[self.key(axis)][1]
                raise Mismatch("variadic", value, rule=rule, axis=axis, index=positions.start, got=shape[positions],
                               expected=known, key=self.key(axis))  # fmt: skip

    def _single(self, rule: ArrayRule, value: Any, axis: Axis, index: int, size: int) -> None:
        if axis.kind == "anonymous" or (axis.broadcast and size == 1):
            return
        if axis.kind == "symbolic":
            self._symbolic(Deferred(rule, axis, index, size, value))
            return
        key = self.key(axis)
        expected = axis.size if axis.kind == "fixed" else self.sizes.setdefault(key, size)
        if expected != size:
            raise Mismatch(axis.kind, value, rule=rule, axis=axis, index=index, got=size, expected=expected, key=key)  # pyright: ignore[reportArgumentType]  # fixed or named

    def _symbolic(self, item: Deferred) -> None:
        assert item.axis.expression is not None
        try:
            expected: Any = item.axis.expression.evaluate(self.sizes, self.arguments)
        except UnboundName:
            self.deferred.append(item)
            return
        except ArithmeticError as error:
            expected = str(error)
        except AnnotationError as error:
            raise self._braces(item, error) from None
        if expected != item.size:
            raise Mismatch("symbolic", item.value, rule=item.rule, axis=item.axis, index=item.position, got=item.size,
                           expected=expected)  # fmt: skip

    def _braces(self, item: Deferred, error: AnnotationError) -> Mismatch:
        """What stands in braces is not there, or no number."""
        why = str(error).partition(": ")[2]
        return Mismatch("braces", item.value, rule=item.rule, axis=item.axis, index=item.position, got=item.size,
                        expected=why)  # fmt: skip

    def _group(self, axis: Axis, shape: tuple[int, ...]) -> bool:
        key = self.key(axis)
        loose, known = self.groups.setdefault(key, (axis.broadcast, shape))
        if not loose and not axis.broadcast:
            return known == shape
        try:
            joint = np.broadcast_shapes(shape, known)
        except ValueError:
            return False
        if (not axis.broadcast and joint != shape) or (not loose and joint != known):
            return False
        if loose:
            self.groups[key] = (axis.broadcast, joint)
        return True

    def settle(self) -> None:
        """Solve the symbolic axes that waited for a name, where one unknown remains.

        Raises:
            Mismatch: no size of the unknown fits, or two are unknown.
        """
        free: dict[str, Any] = {}
        while self.deferred:
            waiting, self.deferred = self.deferred, []
            free = {}
            for item in waiting:
                self._symbolic(item)  # defers again what still lacks a name
            for item in self.deferred:
                self._solve(item, free)
            found = {name: values[0] for name, values in free.items() if len(values) == 1}
            self.sizes.update(found)
            if not found:
                break
        for item in self.deferred:
            unknowns = self._unknowns(item)
            if len(unknowns) != 1 or unknowns[0] not in free:  # of one unknown, several sizes fit: satisfied
                raise Mismatch("unsolved", item.value, rule=item.rule, axis=item.axis, index=item.position,
                               got=item.size, expected=unknowns)  # fmt: skip

    def _unknowns(self, item: Deferred) -> tuple[str, ...]:
        assert item.axis.expression is not None
        try:
            return item.axis.expression.unknowns(self.sizes, self.arguments)
        except AnnotationError as error:
            raise self._braces(item, error) from None

    def _solve(self, item: Deferred, free: dict[str, Any]) -> None:
        parsed = item.axis.expression
        assert parsed is not None
        unknowns = self._unknowns(item)
        if len(unknowns) != 1:
            return
        name = unknowns[0]
        try:
            values = parsed.solve(item.size, self.sizes, self.arguments)
        except (Unsolvable, ZeroDivisionError):
            return  # another axis may tell
        if name in free:
            values = common(values, free[name])
        if not values:
            raise Mismatch("symbolic", item.value, rule=item.rule, axis=item.axis, index=item.position, got=item.size,
                           expected=name)  # fmt: skip
        free[name] = values

    def structure(self, value: Any, tree: Any, pattern: str) -> None:
        """Bind or compare the structure of a tree with `"T"`, `"S T"`, `"... T"` or `"T ..."`.

        Raises:
            Mismatch: it differs, or a name of a composite is not bound yet.
        """
        names = pattern.split()
        if len(names) == 1 and names[0] != "...":
            known = self.trees.setdefault(pattern, tree)
            if known != tree:
                raise Mismatch("structure", value, got=tree, expected=known, key=pattern)
            return
        top, bottom = names[0] == "...", names[-1] == "..."
        composite: Any = 0
        for name in names[top : len(names) - bottom]:
            if name not in self.trees:
                raise Mismatch("structure", value, got=tree, expected=None, key=name)
            part = jax.tree.unflatten(self.trees[name], [0] * self.trees[name].num_leaves)
            composite = jax.tree.map(lambda _, part=part: part, composite)
        if not _composed(tree, jax.tree.structure(composite), top, bottom):
            raise Mismatch("structure", value, got=tree, expected=jax.tree.structure(composite), key=pattern)


def _composed(tree: Any, composite: Any, top: bool, bottom: bool) -> bool:
    dummy = jax.tree.unflatten(tree, [0] * tree.num_leaves)
    if top:  # anything above, the composite below
        is_composite = lambda part: jax.tree.structure(part) == composite
        return all(is_composite(part) for part in jax.tree.leaves(dummy, is_leaf=is_composite))
    if bottom:  # the composite above, anything below
        try:
            jax.tree.map(lambda _, __: 0, jax.tree.unflatten(composite, [0] * composite.num_leaves), dummy)
        except ValueError:
            return False
        return True
    return tree == composite
