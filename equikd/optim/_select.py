"""Patterns: which leaves of a tree of parameters somebody means.

A pattern is a glob over parameter paths (`"encoder.**"`, `"**.bias"`; paths as `equikd.tree.named_leaves` spells them),
a predicate `(path, leaf) -> bool`, a class (every parameter held by a module of it, `eqx.nn.LayerNorm`), or a tuple of
these, any of which may match. The leaf that a predicate is given has shape and dtype, no value: it stands in a trace.

A pattern that matches nothing is a slip, and would freeze or decay something else than was meant: it is refused, with
near paths. Masks are made deep inside optimizers, one after the other; `collecting_problems` collects what they find
wrong while an optimizer's state is made, so that one report names it all, before anything is computed.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from equikd.errors import ConfigError, listing, message, nearest
from equikd.tree import PathError, keys_of, matches, named_leaves, parse

REST = "**"
"""In `{pattern: ...}`: whatever no other pattern matches."""

_problems: "contextvars.ContextVar[tuple[str, list[str]] | None]" = contextvars.ContextVar("problems", default=None)


@contextlib.contextmanager
def collecting_problems(where: str, problems: list[str]) -> Iterator[None]:
    """Inside, wrong patterns are added to `problems`, each under the config path `where`, and none raises."""
    token = _problems.set((where, problems))
    try:
        yield
    finally:
        _problems.reset(token)


def _tell(problem: str) -> None:
    open_now = _problems.get()
    if open_now is None:
        raise ConfigError(problem)
    where, problems = open_now
    problem = problem if problem.startswith(where) else f"{where}: {problem}"
    if problem not in problems:  # an optimizer that makes several masks of one pattern
        problems.append(problem)


def select(pattern: Any, tree: Any, what: str, *, optional: bool = False) -> tuple[bool, ...]:
    """Which leaves of a tree a pattern matches.

    Args:
        pattern: a glob, a predicate, a class, or a tuple of these.
        tree: parameters, leaves that are none of them being None.
        what: what the pattern is for, which messages begin with.
        optional: classes and predicates may match nothing.

    Returns:
        One verdict for each of `jax.tree.leaves(tree)`.

    Raises:
        ConfigError: a pattern is no pattern, or it, or a member of a tuple, matches no leaf though there are some.

    Example:
        >>> select("**.bias", {"layer": {"weight": 1.0, "bias": 2.0}}, "trainable")
        (True, False)
    """
    leaves = named_leaves(tree)
    found = [False] * len(leaves)
    for member in members(pattern):
        verdicts = _matched(member, tree, leaves, what)
        needed = verdicts is not None and (not optional or isinstance(member, str))
        if verdicts and needed and not any(verdicts):
            _tell(_unmatched(member, tree, list(leaves), what))
        found = [one or other for one, other in zip(found, verdicts or found, strict=True)]
    return tuple(found)


def members(pattern: Any) -> tuple[Any, ...]:
    """The patterns in a pattern."""
    return tuple(inner for one in pattern for inner in members(one)) if isinstance(pattern, tuple) else (pattern,)


def _matched(pattern: Any, tree: Any, leaves: dict[str, Any], what: str) -> list[bool] | None:
    """Verdicts of one pattern; None where it is wrong in itself, which has then been told."""
    if isinstance(pattern, str):
        try:
            wanted = parse(pattern)
        except PathError as error:
            _tell(f"{what}: {error}")
            return None
        return [matches(wanted, path) for path in leaves]
    if isinstance(pattern, type):
        held = jax.tree.map(
            lambda part: jax.tree.map(lambda _: isinstance(part, pattern), part),
            tree,
            is_leaf=lambda part: isinstance(part, pattern),
        )
        return jax.tree.leaves(held)
    if callable(pattern):
        return [bool(pattern(path, leaf)) for path, leaf in leaves.items()]
    expected = "a glob such as '**.bias', a function (path, leaf) -> bool, a class, or a tuple of these"
    _tell(message(f"{what}: this is no pattern", got=repr(pattern)[:100], expected=expected))
    return None


def _unmatched(pattern: Any, tree: Any, paths: list[str], what: str) -> str:
    if isinstance(pattern, type):
        classes = _classes(tree)
        near, expected = nearest(pattern.__qualname__, classes), f"classes of its modules: {listing(classes)}"
    else:
        near = nearest(pattern, paths) if isinstance(pattern, str) else ()
        expected = f"parameters: {listing(paths)}"
    return message(f"{what}: {spell(pattern)} matches no parameter", near=near, expected=expected)


def spell(pattern: Any) -> str:
    """A pattern as it was written, nearly."""
    if isinstance(pattern, tuple):
        return f"({', '.join(map(spell, pattern))})"
    return repr(pattern) if isinstance(pattern, str) else getattr(pattern, "__qualname__", repr(pattern))


def _classes(tree: Any) -> list[str]:
    """The classes of the modules in a tree, by their names."""
    found: dict[str, None] = {}
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        part = tree
        for entry, key in zip(path, keys_of(path), strict=True):
            found[type(part).__qualname__] = None
            part = getattr(part, key) if isinstance(entry, jax.tree_util.GetAttrKey) else _item(part, key)
    return [name for name in found if name not in ("tuple", "list", "dict", "NoneType")]


def _item(part: Any, key: Any) -> Any:
    try:
        return part[key]
    except (TypeError, LookupError):  # a container of somebody else
        return None


def assign(patterns: Sequence[Any], tree: Any, what: str, *, whole: bool = True) -> tuple[int | None, ...]:
    """Which one of several patterns matches each leaf of a tree; "**" means what no other matches.

    Args:
        patterns: among them, "**" at most once.
        tree: parameters.
        what: what the patterns are for, which messages begin with.
        whole: each leaf must be matched.

    Returns:
        For each leaf the position of its pattern; None where there is none.

    Raises:
        ConfigError: patterns that match nothing, leaves that two patterns match, leaves that none matches; all of them
            under `collecting_problems`.
    """
    paths = list(named_leaves(tree))
    rest = next((index for index, one in enumerate(patterns) if one == REST), None)
    verdicts = {i: select(one, tree, what) for i, one in enumerate(patterns) if i != rest}
    owners = [[i for i, found in verdicts.items() if found[at]] for at in range(len(paths))]
    twice: dict[tuple[int, ...], list[str]] = {}
    for path, found in zip(paths, owners, strict=True):
        if len(found) > 1:
            twice.setdefault(tuple(found), []).append(path)
    for found, both in twice.items():
        names = " and ".join(spell(patterns[i]) for i in found)
        fix = 'let one pattern match each parameter; "**" is for what no other matches'
        _tell(message(f"{what}: {names} match the same parameters", got=listing(both), fix=fix))
    lost = [path for path, found in zip(paths, owners, strict=True) if not found]
    if lost and rest is None and whole:
        _tell(message(f"{what}: no pattern matches {listing(lost)}", fix='add "**", for what no other matches'))
    return tuple(found[0] if found else rest for found in owners)
