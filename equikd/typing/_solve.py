"""Symbolic axes backwards: `2*h == 10` makes `h` 5, `h*h == 9` makes it 3, and `h//2 == 3` leaves 6 and 7.

Three ways, the first that applies:

1. `+ - * //` around a single occurrence of the name are inverted.
2. An expression that only grows, or only falls, from some small size on is bisected. That it does is read off its
   structure (`h*h` grows since `h` does and is not negative), and every answer is computed once more.
3. Else (`100%h`) sizes are tried one by one, up to `_MOST_GUESSES`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from equikd.typing._expression import Tree, names_of, value_of

_STARTS = (0, 1, 2, 8, 64)  # from where an expression may be monotone: `h*(h-1)` is from 1 on
_LARGEST = 2**62
_MOST_GUESSES = 10_000


class Unsolvable(ArithmeticError):
    """There are too many sizes to try."""


def solve(tree: Tree, size: int, name: str) -> Sequence[int]:
    """All sizes of a name that make a tree, which holds no other, equal `size`.

    Returns:
        Sizes >= 0, ascending. Of sizes tried one by one, those up to `4 * size + 64`.

    Raises:
        Unsolvable: none was found, and not all were tried.

    Example:
        >>> from equikd.typing._expression import expression
        >>> solve(expression("h*h").tree, 10**12, "h"), solve(expression("10-h%4").tree, 9, "h")[:2]
        (range(1000000, 1000001), (1, 5))
    """
    interval = _invert(tree, size, size, name)
    if interval is not None:
        return range(max(interval[0], 0), max(interval[1], -1) + 1)
    gives = functools.partial(_gives, tree, size, name)
    for start in _STARTS:
        slope = _slope(tree, name, start)
        if slope is not None:
            return _joined([guess for guess in range(start) if gives(guess)],
                           _bisected(tree, size, name, start, slope[0]))  # fmt: skip
    wanted = 4 * abs(size) + 65
    found = tuple(guess for guess in range(min(wanted, _MOST_GUESSES)) if gives(guess))
    if not found and wanted > _MOST_GUESSES:
        raise Unsolvable(f"no {name} up to {_MOST_GUESSES} fits")
    return found


def common(some: Sequence[int], others: Sequence[int]) -> Sequence[int]:
    """What two answers of `solve` share."""
    if isinstance(some, range) and isinstance(others, range):
        return range(max(some.start, others.start), min(some.stop, others.stop))
    some, others = (others, some) if isinstance(some, range) else (some, others)
    return tuple(value for value in some if value in others)


def _gives(tree: Tree, size: int, name: str, guess: int) -> bool:
    try:
        return value_of(tree, {name: guess}) == size
    except ArithmeticError:
        return False


def _joined(before: list[int], found: range) -> Sequence[int]:
    if not before:
        return found
    if found and before == list(range(before[0], found.start)):
        return range(before[0], found.stop)
    return (*before, *found[:_MOST_GUESSES])


def _bisected(tree: Tree, size: int, name: str, start: int, direction: int) -> range:
    sign = -1 if direction < 0 else 1

    def value(guess: int) -> Any:
        try:
            return sign * value_of(tree, {name: guess})
        except OverflowError:
            return float("inf")

    first = _first(lambda guess: value(guess) >= sign * size, start)
    if not _gives(tree, size, name, first):
        return range(0)
    return range(first, _first(lambda guess: value(guess) > sign * size, first))


def _first(test: Callable[[int], bool], start: int) -> int:
    """The first number from `start` on that passes a test which all later ones pass, too."""
    low, high, step = start - 1, start, 1  # low fails
    while not test(high):
        low, high, step = high, start + step, 2 * step
        if high >= _LARGEST:
            return _LARGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if test(middle) else (middle, high)
    return high


def _slope(tree: Tree, name: str, start: int) -> tuple[int, bool] | None:
    """(1: grows, -1: falls, 0: constant; whether it is never negative), from `start` on; None: not known."""
    found = _structural_slope(tree, name, start)
    if found is None:
        return None
    direction, positive = found
    return direction, positive or (direction >= 0 and _least(tree, name, start) >= 0)


def _least(tree: Tree, name: str, start: int) -> Any:
    try:
        return value_of(tree, {name: start})
    except ArithmeticError:
        return -1


def _structural_slope(tree: Tree, name: str, start: int) -> tuple[int, bool] | None:
    if tree[0] in ("int", "name"):
        return int(tree[0] == "name"), tree[0] == "name"
    parts = [_slope(part, name, start) for part in (tree[2] if tree[0] == "call" else tree[1:])]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    ways, positive = [way for way, _ in known], [good for _, good in known]
    if not any(ways):
        return 0, False
    match tree:
        case ("call", "abs", _):
            return known[0] if positive[0] else None
        case ("call", kind, _):
            return _same(*ways, positive=all(positive) if kind == "min" else any(positive))
        case ("+", _, _):
            return _same(*ways, positive=all(positive))
        case ("-", _, _):
            return _same(ways[0], -ways[1], positive=False)
        case ("*", _, _):
            if all(positive):
                return _same(*ways, positive=True)
            if 0 in ways:  # a negative number, or something that may be negative times a number
                number = tree[1 + ways.index(0)]
                sign = 1 if value_of(number, {}) >= 0 else -1
                return sign * sum(ways), False
            return None
        case ("/" | "//", _, divisor):
            if ways[1] >= 0 and _least(divisor, name, start) > 0 and (positive[0] or not ways[1]):
                return _same(ways[0], -ways[1], positive=positive[0])
            return None
        case ("**", base, _):
            if ways[0] >= 0 and _least(base, name, start) >= 1 and positive[1]:
                return _same(*ways, positive=True)
            return (ways[0], True) if not ways[1] and all(positive) else None
    return None


def _same(*ways: int, positive: bool) -> tuple[int, bool] | None:
    moving = {way for way in ways if way}
    return (moving.pop(), positive) if len(moving) == 1 else None


def _invert(tree: Tree, low: int, high: int, name: str) -> tuple[int, int] | None:
    """The interval of `name` that puts `tree` into [low, high]; None where the tree is not simple enough."""
    if tree[0] == "name":
        return low, high
    if tree[0] not in ("+", "-", "*", "//"):
        return None
    kind, left, right = tree
    on_left, on_right = name in names_of(left), name in names_of(right)
    if on_left == on_right or (kind == "//" and on_right):
        return None
    known = value_of(right if on_left else left, {})
    if not isinstance(known, int):
        return None
    inner = functools.partial(_invert, left if on_left else right, name=name)
    match kind:
        case "+":
            return inner(low - known, high - known)
        case "-":
            return inner(low + known, high + known) if on_left else inner(known - high, known - low)
        case "*" if known > 0:
            return inner(-(-low // known), high // known)
        case "//" if known > 0:
            return inner(low * known, high * known + known - 1)
    return None
