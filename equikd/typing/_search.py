"""Which members of unions are meant: the search through their combinations, on the failing path only.

`tuple[X | Y, X] | tuple[X, Z]` can be read in several ways, and which one is right may only show in a later argument,
or in the result. An attempt follows a *script*, the choices to make at the unions in the order in which they are met,
and takes the first member from there on; the next script changes the latest choice that has a next one.
"""

from collections.abc import Callable
from typing import Any

from equikd.typing._accepts import is_array
from equikd.typing._bindings import Bindings, Mismatch, Script
from equikd.typing._nodes import UnionNode

_MOST_ATTEMPTS = 500  # with other members of unions, and
_MOST_CHOICES = 20_000  # members taken in all of them, before the first mismatch is reported


def search(attempt: Callable[[Bindings], None], fresh: Callable[[], Bindings]) -> Bindings:
    """Run `attempt` with fresh bindings; where it fails, again with other members of unions.

    The first attempt takes, at each union, the first member that fits so far. If that leads nowhere, all combinations
    are gone through in order, the innermost and latest choice changing first.

    Args:
        attempt: binds values, and raises where they do not fit.
        fresh: new bindings, with what is known from outside.

    Returns:
        The bindings of the attempt that succeeded.

    Raises:
        Mismatch: of the first attempt, if all fail; `gave_up` if there would have been more to try.
    """
    bindings = fresh()
    try:
        attempt(bindings)
        return bindings
    except Mismatch as error:
        first = error
    path: tuple[int, ...] | None = () if bindings.ambiguous else None
    made = attempts = 0
    while path is not None:
        if attempts >= _MOST_ATTEMPTS or made > _MOST_CHOICES:
            first.gave_up = attempts
            break
        bindings = fresh()
        bindings.script = script = Script(path)
        try:
            attempt(bindings)
            return bindings
        except Mismatch:
            attempts, made = attempts + 1, made + script.visits
            path = _next(script.choices)
    raise first


def _next(choices: list[tuple[int, int]]) -> tuple[int, ...] | None:
    """The choices to make in the next attempt; None: all have been made."""
    while choices and choices[-1][0] + 1 >= choices[-1][1]:
        choices = choices[:-1]
    return (*(taken for taken, _ in choices[:-1]), choices[-1][0] + 1) if choices else None


def chosen(node: UnionNode, value: Any, count: int, bindings: Bindings) -> int:
    """Which of the fitting members the script says; new choices start with the first."""
    script = bindings.script
    assert script is not None
    script.visits += 1
    # What looks the same is the same member: with another one, the names of both would be bound.
    same = (id(node), value.dtype, value.shape, bindings.leaf) if is_array(value) else None
    index = script.taken.get(same)
    if index is None:
        position = len(script.choices)
        index = script.path[position] if position < len(script.path) else 0
        script.choices.append((index, count))
        if same is not None:
            script.taken[same] = index
    return index


def depth(error: Mismatch) -> int:
    """How far a check came; 0: the value is something else altogether."""
    order = ("dtype", "rank", "structure", "braces", "unsolved", "fixed", "symbolic", "variadic", "named")
    if error.problem not in order:
        return 1 if error.path else 0
    return 2 + order.index(error.problem)
