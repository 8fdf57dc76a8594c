"""The words for a mismatch: which axis, which sizes, who bound it first, and what would fit.

    attention: axis 'd' has two sizes, 4 and 5
      where:    model.py:12
        x     Float[Array, "b t d"]  f32[2,3,4]   d = 4 (axis 2), first
      > w     Float[Array, "d h"]    f32[10,4]    d = 10 (axis 0)
        mask  Bool[Array, "b t"]     bool[2,3]
      fix:      transpose w to (4, 10)

One row for each array argument (of a container: for what is wrong in it), `>` before the odd one out: the minority,
where there is one, else whoever came later. All of this happens on the failing path only.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from equikd.errors import listing, message, nearest
from equikd.typing._accepts import accepts, dtype_name, is_array
from equikd.typing._binder import checker
from equikd.typing._bindings import Bindings, Mismatch
from equikd.typing._nodes import ArrayNode, Node, UnionNode, holds_arrays, node_of
from equikd.typing._scope import new_bindings, shared_binder
from equikd.typing._uses import Occurrence, Use, fits_with, occurrences, uses
from equikd.typing._words import array_kind, axes_of, cut, dtype_fix, kind_of, short, size_of, type_fix, written

_MOST_ROWS = 16


@dataclasses.dataclass
class Call:
    """What was checked."""

    name: str
    where: str | None
    entries: Sequence[tuple[str, Node, Any]]
    """(argument, node, value), the result last."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    function: Any = None
    """What is called."""
    known: Bindings | None = None
    """What was bound before: for a `check` inside a call."""

    def fresh(self) -> Bindings:
        """Bindings as they were before the check."""
        return new_bindings(self.arguments, self.function) if self.known is None else self.known.copy()


@dataclasses.dataclass
class _Finding:
    """A mismatch, put into words."""

    headline: str
    marked: list[Occurrence] = dataclasses.field(default_factory=list)
    notes: dict[int, str] = dataclasses.field(default_factory=dict)  # id of an occurrence -> what stands in its row
    got: str | None = None
    expected: str | None = None
    fix: str | None = None


def explain(call: Call, failure: Mismatch) -> str:
    """The message of a failed check, under 30 lines."""
    gave_up = failure.gave_up
    label, failure, picks = _locate(call, failure)
    found = [one for name, node, value in call.entries for one in occurrences(node, value, name, picks=picks)]
    if failure.union is not None and failure.rule is not None:  # of its members, the one that came nearest
        there = [one.value is failure.value and one.path == label for one in found]
        found = [
            dataclasses.replace(one, rule=failure.rule) if at else one for one, at in zip(found, there, strict=True)
        ]
    culprit = next((one for one in found if one.value is failure.value and one.path == label), None)
    if culprit is None:  # a symbolic axis that waited: its path is not known, its array is
        culprit = next((one for one in found if one.value is failure.value and one.rule is failure.rule), None)
    finding = _finding(call, failure, label if culprit is None else culprit.path, culprit, found)
    if failure.union is not None and finding.expected is None:
        finding.expected = f"{label}: {written(failure.union)}"
    if finding.fix is None:
        finding.fix = _other_dtype(call, failure, culprit, found) or _hint(call, finding.marked[:1] or [culprit], found)
    if gave_up:
        finding.headline += f"; {gave_up} other choices of members of unions do not fit, and there are more"
    text = message(f"{call.name}: {finding.headline}", where=call.where)
    answers = message("", got=finding.got, expected=finding.expected, fix=finding.fix).removeprefix("\n")
    return "\n".join(part for part in (text, *_rows(call, finding, found, label), answers) if part)


def binder(call: Call, name: str, size: Any) -> str:
    """Who bound a name that a `Scope` shares: the call and the argument."""
    found = [one for label, node, value in call.entries for one in occurrences(node, value, label)]
    key, group = name.removeprefix("*"), name.startswith("*")
    for owner in {id(one.owner): one.owner for one in found}.values():
        for use in sorted(uses(found, key, group=group, owner=owner), key=lambda use: use.size != size):
            return f"{use.occurrence.path} of {call.name}, {short(use.occurrence.value)}"
    return call.name


def _locate(call: Call, failure: Mismatch) -> tuple[str, Mismatch, dict[tuple[int, int], int]]:
    """The argument in which it happened, with the path inside; the mismatch as it is seen in this order; the unions."""
    bindings = call.fresh()
    bindings.picks = {}
    for name, node, value in call.entries:
        try:
            checker(node)(value, bindings)
        except Mismatch as error:
            return name + "".join(error.path), error, bindings.picks
    return "", failure, bindings.picks


def _finding(call: Call, failure: Mismatch, path: str, culprit: Occurrence | None, found: list[Occurrence]) -> _Finding:
    value, rule, axis = failure.value, failure.rule, failure.axis
    marked = [] if culprit is None else [culprit]
    match failure.problem:
        case "named" | "variadic":
            return _conflict(call, failure, path, marked, found)
        case "fixed":
            return _Finding(
                f"axis {failure.index} of {path} is {failure.got}, and the annotation says {failure.expected}", marked
            )
        case "rank" if rule is not None:
            least = " or more" if rule.many is not None else ""
            return _Finding(f"{path} has {axes_of(failure.got)}, and the annotation says {rule.rank}{least}", marked)
        case "dtype" if rule is not None:
            return _Finding(f"{path} is {failure.got}, and the annotation says {rule.dtype}", marked,
                            fix=dtype_fix(path, failure.got, rule.dtype))  # fmt: skip
        case "type" if rule is not None:
            headline = f"{path} is {kind_of(value)}, and the annotation says {array_kind(rule.array_type)}"
            return _Finding(headline, marked, fix=type_fix(path, value, rule.array_type))  # fmt: skip
        case "symbolic" if axis is not None:
            return _symbolic(failure, path, marked, found)
        case "unsolved" if axis is not None:
            names = " and ".join(map(repr, failure.expected))
            headline = f"axis {failure.index} of {path}, {axis.text}, cannot be solved: {names} "
            if len(failure.expected) == 1:
                return _Finding(f"{headline}is unknown, and there are too many sizes to try", marked,
                                fix=f"name {names} as an axis of its own in some argument")  # fmt: skip
            return _Finding(f"{headline}are unknown", marked,
                            fix="name all but one of them as an axis of its own in some argument")  # fmt: skip
        case "braces" if axis is not None:
            headline = f"axis {failure.index} of {path}, {axis.text}, cannot be computed: {failure.expected}"
            return _Finding(headline, marked)
        case "structure":
            return _structure(failure, path)
        case "keys":
            parts = [f"lacks {', '.join(failure.expected)}"] if failure.expected else []
            parts += [f"has unknown {', '.join(failure.got)}"] if failure.got else []
            near = [one for key in failure.got for one in nearest(key.strip("'"), failure.key, 1)]
            return _Finding(f"{path} {' and '.join(parts)}", expected=f"the keys {listing(map(repr, failure.key))}",
                            fix=f"rename to {listing(map(repr, near))}" if near else None)  # fmt: skip
    expected = written(failure.expected)
    if len(expected) > 60:
        headline = f"{path} is {kind_of(value)}, and the annotation says something else"
        return _Finding(headline, marked, expected=expected)
    return _Finding(f"{path} is {kind_of(value)}, and the annotation says {expected}", marked)


def _conflict(call: Call, failure: Mismatch, path: str, marked: list[Occurrence], found: list[Occurrence]) -> _Finding:
    group = failure.problem == "variadic"
    assert failure.axis is not None
    name = "*" * group + failure.axis.name
    shared = shared_binder(name, call.fresh().scopes)
    owner = marked[0].owner if marked else None
    places = uses(found, failure.key, group=group, owner=owner)
    sizes = [use.size for use in places]
    odd = _odd_one_out(places, sizes, marked, None if shared is None else shared[0])
    notes: dict[int, str] = {}
    for use in places:
        first = ", first" if use is places[0] and shared is None and failure.expected == use.size else ""
        size = f"{name} = {size_of(use.size)}" + ("" if group else f" (axis {use.position})") + first
        key = id(use.occurrence)
        notes[key] = f"{notes[key]}, {size}" if key in notes else size
    distinct = list(dict.fromkeys([failure.expected, *sizes]))
    if group and any(axis.broadcast and axis.many for use in places for axis in use.occurrence.rule.axes):
        # Sizes that broadcast may differ from each other: who was checked last disagrees with all of them.
        odd = [use for use in places if use.occurrence in marked][-1:]
        distinct = [failure.expected, failure.got]
    *before, last = map(size_of, distinct[:4])
    listed = f"{', '.join(before)} and {last}" if before else last
    leaf = " of one leaf" if isinstance(failure.key, tuple) else ""
    count = {1: "one size", 2: "two sizes", 3: "three sizes"}.get(len(distinct), f"{len(distinct)} sizes")
    headline = f"axis {name!r}{leaf} has {count}, {listed}"
    if group:
        headline = f"axes {name!r}{leaf} differ: {listed}"
    expected = None
    if shared is not None:
        headline += f"; {size_of(shared[0])} is that of the open Scope"
        expected = f"{name} = {size_of(shared[0])}, bound by {shared[1]}"
    elif failure.expected not in sizes:
        expected = f"{name} = {size_of(failure.expected)}, as bound before"
    if not any(use.occurrence.path == path for use in places) and not marked:
        headline += f", in {path}"
    return _Finding(headline, [use.occurrence for use in odd] or marked, notes, expected=expected)


def _odd_one_out(places: list[Use], sizes: list[Any], marked: list[Occurrence], given: Any) -> list[Use]:
    """Those that disagree with the majority; without one, the later of two, or all but the first.

    Args:
        places: where the name is used.
        sizes: theirs.
        marked: the array that was checked when it happened.
        given: the size that an open scope gives, which is right.
    """
    if given is not None:
        return [use for use in places if use.size != given]
    counts = {size: sizes.count(size) for size in sizes}
    most = [size for size, count in counts.items() if count == max(counts.values())]
    if len(counts) > 1 and len(most) == 1:
        return [use for use in places if use.size != most[0]]
    if len(counts) > 2:
        return [use for use in places if use.size != places[0].size]
    last = [use for use in places if use.occurrence in marked]
    return last[-1:]


def _symbolic(failure: Mismatch, path: str, marked: list[Occurrence], found: list[Occurrence]) -> _Finding:
    axis, owner = failure.axis, marked[0].owner if marked else None
    assert axis is not None
    assert axis.expression is not None
    text, notes = axis.expression.text, {}
    for name in sorted(axis.expression.names):
        for use in uses(found, name, group=False, owner=owner)[:1]:
            key, note = id(use.occurrence), f"{name} = {use.size} (axis {use.position})"
            notes[key] = f"{notes[key]}, {note}" if key in notes else note
    here = f"axis {failure.index} of {path} is {failure.got}, and "
    if isinstance(failure.expected, str):
        if failure.expected.isidentifier():  # the unknown; else what went wrong
            return _Finding(f"{here}no {failure.expected} makes {text} = {failure.got}", marked, notes)
        return _Finding(f"{here}{text} cannot be computed: {failure.expected}", marked, notes)
    return _Finding(f"{here}{text} = {failure.expected}", marked, notes)


def _structure(failure: Mismatch, path: str) -> _Finding:
    if failure.expected is None:
        return _Finding(f"{path}: structure {failure.key!r} is not known yet",
                        fix=f'annotate an earlier argument with PyTree[..., "{failure.key}"]')  # fmt: skip
    return _Finding(f"{path} has another structure than {failure.key!r}", got=cut(str(failure.got)),
                    expected=cut(str(failure.expected)))  # fmt: skip


def _other_dtype(call: Call, failure: Mismatch, culprit: Occurrence | None, found: list[Occurrence]) -> str | None:
    """Of an array that fits no member of a union: the member that it would fit with another dtype."""
    union = None if failure.union is None else node_of(failure.union)
    if not isinstance(union, UnionNode) or culprit is None or not is_array(culprit.value):
        return None
    value = culprit.value
    for member in union.members:
        if isinstance(member, ArrayNode) and accepts(member, value, whole=False):
            changed = dataclasses.replace(culprit, rule=member.rule)
            others = [changed if one is culprit else one for one in found]
            cast = dtype_fix(culprit.path, dtype_name(value.dtype), member.rule.dtype)
            known = call.fresh()
            if (
                cast is not None
                and not member.rule.admits_dtype(dtype_name(value.dtype))
                and fits_with(others, changed, tuple(value.shape), call.arguments, known)
            ):
                return f"as {member.rule.text} it would fit: {cast}"
    return None


def _hint(call: Call, candidates: Sequence[Occurrence | None], found: list[Occurrence]) -> str | None:
    """A transpose, a missing or surplus axis, a squeeze: the first change of one array with which all would fit."""
    for one in candidates:
        if one is None or not is_array(one.value):
            continue
        shape, rank = tuple(one.value.shape), len(one.value.shape)
        known = call.fresh()
        fits = lambda new, one=one, known=known: fits_with(found, one, new, call.arguments, known)
        if rank <= 4:
            for order in itertools.permutations(range(rank)):
                if tuple(order) != tuple(range(rank)) and fits(tuple(shape[axis] for axis in order)):
                    new = tuple(shape[axis] for axis in order)
                    how = f"{one.path}.T" if rank == 2 else f"jnp.transpose({one.path}, {order})"
                    return f"transposed to {size_of(new)} it would fit: {how}"
        for axis in range(rank):
            if shape[axis] == 1 and fits(shape[:axis] + shape[axis + 1 :]):
                return f"without its axis {axis} of size 1 it would fit: {one.path}.squeeze({axis})"
        if one.rule.many is None and rank + 1 == len(one.rule.axes) and fits((1, *shape)):
            return f"its first axis {one.rule.axes[0].text!r} is missing; for a single one: {one.path}[None]"
        if one.rule.many is None and rank == len(one.rule.axes) + 1 and fits(shape[1:]):
            return f"it has one more axis in front, of {shape[0]}: map over it with jax.vmap"
        if one.rule.many is None and rank + 1 == len(one.rule.axes) and fits((*shape, 1)):
            return f"its last axis {one.rule.axes[-1].text!r} is missing: {one.path}[..., None]"
    return None


def _rows(call: Call, finding: _Finding, found: list[Occurrence], label: str) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for name, node, value in call.entries:
        inside = [one for one in found if one.path == name or one.path.startswith((f"{name}[", f"{name}."))]
        told = [one for one in inside if one in finding.marked or id(one) in finding.notes]
        here = label == name or label.startswith((f"{name}[", f"{name}."))
        source = call.sources.get(name, "")
        if len(inside) == 1 and inside[0].path == name:
            rows.append(_row(name, inside[0], finding, source))
        elif told:
            shown = sorted(told, key=lambda one: one not in finding.marked)[:3]
            rows += [_row(one.path, one, finding, source) for one in sorted(shown, key=found.index)]
        elif holds_arrays(node) or here:
            annotation = node.annotation
            rows.append(
                (">" if here and not finding.marked else " ", name, cut(written(annotation), 48), short(value), source)
            )
    if len(rows) > _MOST_ROWS:
        first = [row for row in rows if row[0] == ">" or row[4]][:_MOST_ROWS]
        kept = [row for row in rows if row in first or rows.index(row) < _MOST_ROWS - len(first)]
        rows = [*kept, (" ", f"... {len(rows) - len(kept)} more", "", "", "")]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    return [
        "  " + "  ".join(part.ljust(width) for part, width in zip(row, [*widths, 0], strict=True)).rstrip()
        for row in rows
    ]


def _row(path: str, one: Occurrence, finding: _Finding, source: str) -> tuple[str, ...]:
    notes = [note for note in (finding.notes.get(id(one)), source and f"from {source}") if note]
    value = short(one.value)
    return ">" if one in finding.marked else " ", path, one.rule.text, value, ", ".join(notes)
