"""Renaming paths by patterns: `{"old.**": "new.**"}`, where `*` and `**` carry over what they matched.

A pattern is a path with wildcards, as everywhere: `*` stands for one key, or for a part of a name (`block*`), `**` for
any number of keys. The first `**` of the old side is the first `**` of the new one, the second `*` the second `*`, and
so on, so both sides have equally many of each. What a part of a name has matched becomes an index where it stands for a
whole key: `{"block*.**": "blocks[*].**"}` makes `blocks[3].weight` of `block3.weight`. Of two `**` the first takes as
little as it can.

Dicts in configs are sorted, so order says nothing: a path that two patterns match is an error, but for the pattern `**`
alone, which means what no other matches. What none matches keeps its name.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from equikd.errors import CheckpointError, listing, message, nearest, report
from equikd.tree import Key, Path, PathError, Wildcard, join, parse

_REST = "**"


def rename_problems(rename: Mapping[str, str]) -> list[str]:
    """What is wrong with patterns by themselves, one text each.

    Args:
        rename: old pattern -> new pattern.

    Example:
        >>> rename_problems({"a.**": "b.**"}), rename_problems({"a.*": "b"})
        ([], ["rename: 'a.*' -> 'b': the sides have other wildcards: 1 * and 0 **, 0 * and 0 **"])
    """
    problems = []
    for old, new in rename.items():
        sides = []
        for side in (old, new):
            try:
                sides.append(parse(side))
                odd = [key for key in sides[-1] if not isinstance(key, str | int | Wildcard)]
                if odd or not side:
                    problems.append(f"rename: {side!r} is no path of an array")
            except PathError as error:
                problems.append(f"rename: {error}")
        counts = [_counts(side) for side in sides]
        if len(counts) == 2 and counts[0] != counts[1]:
            had = ", ".join(f"{one} * and {many} **" for one, many in counts)
            problems.append(f"rename: {old!r} -> {new!r}: the sides have other wildcards: {had}")
    return problems


def _counts(pattern: Path) -> tuple[int, int]:
    """The number of `*`, also inside names, and of `**`."""
    wildcards = [key.pattern for key in pattern if isinstance(key, Wildcard)]
    many = wildcards.count(_REST)
    return sum(len(re.findall(r"\*+", one)) for one in wildcards) - many, many


def renamed(paths: Collection[str], rename: Mapping[str, str], holder: str = "the source") -> dict[str, str]:
    """Old path -> new path, for each of the paths.

    Args:
        paths: of arrays.
        rename: old pattern -> new pattern, without `rename_problems`.
        holder: what has the paths, for messages.

    Returns:
        In the order of `paths`.

    Raises:
        CheckpointError: a pattern matches no path, two match one, or two paths would become one; all at once.

    Example:
        >>> renamed(["old.w", "old.b", "head.w"], {"old.**": "new.**"})
        {'old.w': 'new.w', 'old.b': 'new.b', 'head.w': 'head.w'}
    """
    keys = {path: parse(path) for path in paths}
    found: dict[str, dict[str, str]] = {path: {} for path in paths}
    for old, new in rename.items():
        pattern, target = parse(old), parse(new)
        for path in paths:
            captured = _captured(pattern, keys[path])
            if captured is not None:
                found[path][old] = join(_filled(target, captured))
    matched = {old for one in found.values() for old in one}
    problems = [
        message(f"rename: {old!r} matches no path of {holder}", near=near_paths(old, paths), expected=listing(paths, 6))
        for old in rename
        if old not in matched
    ]
    made: dict[str, str] = {}
    for path, news in found.items():
        own = {old: new for old, new in news.items() if old != _REST} or news
        if len(own) > 1:
            both = " and ".join(map(repr, sorted(own)))
            problems.append(message(f"rename: {path} is matched by {both}", fix="let one pattern match it"))
        made[path] = next(iter(own.values()), path)
    problems += _collisions(made)
    if problems:
        raise CheckpointError(report(f"{len(problems)} things are wrong with rename", problems))
    return made


def _collisions(made: Mapping[str, str]) -> list[str]:
    sources: dict[str, list[str]] = {}
    for old, new in made.items():
        sources.setdefault(new, []).append(old)
    return [
        message(f"rename: {' and '.join(olds[:3])} would be one: {new}", fix="rename one of them to another path")
        for new, olds in sources.items()
        if len(olds) > 1
    ]


_Captured = tuple[Any, ...]  # keys for `**`, a key for `*`, a `_Part` for a `*` inside a name


def _captured(pattern: Path, path: Path) -> _Captured | None:
    """What each wildcard of a pattern matched, in order; None where the path does not fit."""
    if not pattern:
        return None if path else ()
    first = pattern[0]
    if isinstance(first, Wildcard) and first.pattern == _REST:
        for end in range(len(path) + 1):
            rest = _captured(pattern[1:], path[end:])
            if rest is not None:
                return (path[:end], *rest)
        return None
    if not path:
        return None
    own: _Captured | None = () if first == path[0] and type(first) is type(path[0]) else None
    if isinstance(first, Wildcard):
        own = _inside(first.pattern, path[0])
    if own is None:
        return None
    rest = _captured(pattern[1:], path[1:])
    return None if rest is None else (*own, *rest)


class _Part(str):
    """What a `*` inside a name matched."""


def _inside(pattern: str, key: Key) -> _Captured | None:
    if pattern == "*":
        return (key,)
    if not isinstance(key, str):
        return None
    pieces = re.split(r"\*+", pattern)
    match = re.fullmatch("(.*?)".join(map(re.escape, pieces)), key, re.DOTALL)
    return None if match is None else tuple(map(_Part, match.groups()))


def _filled(pattern: Path, captured: _Captured) -> Iterable[Key]:
    """The keys of a pattern with what was captured in place of its wildcards."""
    many = iter([one for one in captured if isinstance(one, tuple)])
    single = iter([one for one in captured if not isinstance(one, tuple)])
    keys: list[Key] = []
    for key in pattern:
        if not isinstance(key, Wildcard):
            keys.append(key)
        elif key.pattern == _REST:
            keys += next(many)
        elif key.pattern == "*":
            one = next(single)
            plain = str(one) if isinstance(one, _Part) else one
            keys.append(int(plain) if isinstance(one, _Part) and plain.isdecimal() else plain)
        else:
            keys.append(re.sub(r"\*+", lambda _: str(next(single)), key.pattern))
    return keys


def near_paths(pattern: str, paths: Collection[str]) -> tuple[str, ...]:
    """Paths that are like a pattern; of one with `**` at an end, patterns of that kind that match.

    Example:
        >>> near_paths("encodr.**", ["encoder.layers[0].weight", "head.weight"])
        ('encoder.**',)
    """
    keys = parse(pattern)
    many = lambda key: isinstance(key, Wildcard) and key.pattern == _REST
    stem = tuple(key for key in keys if not many(key))
    size = len(stem)
    if not stem:
        return ()
    pieces: list[Path] = [parse(path) for path in paths]
    if size < len(keys):
        at_end = many(keys[0]) and not many(keys[-1])
        pieces = [piece[-size:] if at_end else piece[:size] for piece in pieces]
        found = nearest(join(stem), [join(piece) for piece in pieces])
        return tuple(join((keys[0], *parse(one)) if at_end else (*parse(one), Wildcard(_REST))) for one in found)
    return nearest(join(stem), paths)
