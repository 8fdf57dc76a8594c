"""Arithmetic of symbolic axes: `2*h`, `t-1`, `{self.dim}//{heads}`, `max(a,b)`.

An axis of an annotation may be an expression of other axes and, in braces, of the call's arguments. The text is parsed
once into a small tree (nothing is ever executed as Python), which can be run in both directions:

    >>> halves = expression("2*h")
    >>> halves.evaluate({"h": 5})
    10
    >>> list(halves.solve(10, {})), list(halves.solve(7, {}))
    ([5], [])

`evaluate` goes from sizes to a size; `solve` goes back where one name is unknown. What is understood: ints, axis names,
`+ - * / // % **`, parentheses, `min max abs`, and in braces also attributes and constant items of arguments.
"""

import ast
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import AnnotationError

Tree = tuple[Any, ...]
"""("int", 2), ("name", "h"), ("argument", "self", (("attribute", "dim"), ("item", 0))), ("call", "min", trees) or
(operator, left, right)."""

_OPERATORS: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
}
_MOST_BITS = 4096  # of a power: sizes need 63
_DEEPEST = 8  # how often a text in braces may stand for another one


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        if base.bit_length() * exponent > _MOST_BITS:
            raise OverflowError("the number is too large")
    return base**exponent


_APPLY = {**dict(_OPERATORS.values()), "**": _power}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}


class UnboundName(LookupError):
    """An axis name of an expression has no size yet; `name` says which."""

    def __init__(self, name: str) -> None:
        super().__init__(f"axis {name!r} has no size yet")
        self.name = name


@dataclass(frozen=True)
class Expression:
    """A parsed symbolic axis."""

    text: str
    tree: Tree
    names: frozenset[str]
    """Axis names that it reads."""
    arguments: frozenset[str]
    """Arguments of the call that it reads, `self` among them."""

    def evaluate(self, sizes: Mapping[str, int], arguments: Mapping[str, Any] | None = None) -> int:
        """The size of the axis.

        Args:
            sizes: axis name -> size.
            arguments: argument name -> value, for what stands in braces.

        Raises:
            UnboundName: an axis name has no size.
            ArithmeticError: division by zero, or a number with thousands of digits.
            AnnotationError: an argument does not exist, lacks the attribute, or is no number.
        """
        return _evaluate(self.tree, sizes, arguments or {}, self.text)

    def unknowns(self, sizes: Mapping[str, int], arguments: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Names without a size, sorted; with arguments, those that a text among them stands for, too."""
        names = self.names if arguments is None or not self.arguments else names_of(self.filled({}, arguments))
        return tuple(sorted(name for name in names if name not in sizes))

    def filled(self, sizes: Mapping[str, int], arguments: Mapping[str, Any]) -> Tree:
        """The tree with numbers in the place of what is known.

        Raises:
            AnnotationError: as `evaluate`.
        """
        return _filled(self.tree, sizes, arguments, self.text)

    def solve(self, size: int, sizes: Mapping[str, int], arguments: Mapping[str, Any] | None = None) -> Sequence[int]:
        """All values of the one unknown name that make the expression equal `size`; see `_solve`.

        Args:
            size: what the expression should be.
            sizes: axis name -> size of all names but one.
            arguments: as in `evaluate`.

        Returns:
            Sizes >= 0, ascending: a `range`, often of length one, or a tuple.

        Raises:
            ValueError: not exactly one name is unknown.
            Unsolvable: there are too many sizes to try.
        """
        from equikd.typing._solve import solve

        unknowns = self.unknowns(sizes, arguments)
        if len(unknowns) != 1:
            raise ValueError(f"{self.text}: {len(unknowns)} unknown names, not one")
        return solve(self.filled(sizes, arguments or {}), size, unknowns[0])


@functools.lru_cache(maxsize=4096)
def expression(text: str) -> Expression:
    """Parse a symbolic axis.

    Raises:
        AnnotationError: it holds something else than arithmetic.

    Example:
        >>> sorted(expression("{self.heads}*h+t").names), sorted(expression("{self.heads}*h").arguments)
        (['h', 't'], ['self'])
    """
    names: set[str] = set()
    arguments: set[str] = set()
    try:
        tree = _parse(ast.parse(text, mode="eval").body, names, arguments, in_braces=False)
    except (SyntaxError, _NoArithmetic) as error:
        raise AnnotationError(
            f"axis {text!r}: not an expression of axes ({error}); "
            "write + - * / // % **, parentheses, min, max, abs, names, ints, and arguments as {self.dim}"
        ) from None
    return Expression(text, tree, frozenset(names), frozenset(arguments))


class _NoArithmetic(ValueError):
    """A part of an expression that is not understood."""


def _parse(node: ast.expr, names: set[str], arguments: set[str], *, in_braces: bool) -> Tree:
    parse = functools.partial(_parse, names=names, arguments=arguments, in_braces=in_braces)
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return ("int", value)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return (_OPERATORS[type(node.op)][0], parse(node.left), parse(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return ("-", ("int", 0), parse(node.operand))
        case ast.UnaryOp(op=ast.UAdd()):
            return parse(node.operand)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS and node.args:
            return ("call", name, tuple(parse(argument) for argument in node.args))
        case ast.Set(elts=[inner]) if not in_braces:  # `{x}` is Python's notation of a set
            return _parse(inner, names, arguments, in_braces=True)
        case ast.Name(id=name) if not in_braces:
            names.add(name)
            return ("name", name)
        case ast.Name() | ast.Attribute() | ast.Subscript() if in_braces:
            return _argument(node, arguments)
    raise _NoArithmetic(f"{ast.unparse(node)!r} is not understood")


def _argument(node: ast.expr, arguments: set[str]) -> Tree:
    steps: list[tuple[str, Any]] = []
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(value=inner, attr=name):
                steps.append(("attribute", name))
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                steps.append(("item", key))
            case _:
                raise _NoArithmetic(f"{ast.unparse(node)!r} is not understood")
        node = inner
    arguments.add(node.id)
    return ("argument", node.id, tuple(reversed(steps)))


def _evaluate(tree: Tree, sizes: Mapping[str, int], arguments: Mapping[str, Any], text: str) -> Any:
    match tree:
        case ("int", value):
            return value
        case ("name", name):
            if name not in sizes:
                raise UnboundName(name)
            return sizes[name]
        case ("argument", name, steps):
            value = _look_up(name, steps, arguments, text)
            # A string stands for itself, as in an f-string: "{axis}" with axis="b" is the axis b.
            return expression(value).evaluate(sizes, arguments) if isinstance(value, str) else value
        case ("call", name, inner):
            return _FUNCTIONS[name](*(_evaluate(part, sizes, arguments, text) for part in inner))
    left, right = (_evaluate(part, sizes, arguments, text) for part in tree[1:])
    return _APPLY[tree[0]](left, right)


def _look_up(name: str, steps: tuple[tuple[str, Any], ...], arguments: Mapping[str, Any], text: str) -> Any:
    if name not in arguments:
        raise AnnotationError(f"axis {text!r}: no argument {name!r} here")
    value = arguments[name]
    for kind, key in steps:
        try:
            value = getattr(value, key) if kind == "attribute" else value[key]
        except (AttributeError, LookupError, TypeError) as error:
            raise AnnotationError(f"axis {text!r}: {error}") from None
    if isinstance(value, str):
        return value
    try:
        return operator.index(value)
    except Exception:  # a tracer, too, has no number to give
        raise AnnotationError(f"axis {text!r}: {name!r} gives a {type(value).__name__}, not an int") from None


def _filled(tree: Tree, sizes: Mapping[str, int], arguments: Mapping[str, Any], text: str, depth: int = 0) -> Tree:
    fill = functools.partial(_filled, sizes=sizes, arguments=arguments, text=text, depth=depth)
    match tree:
        case ("int", _):
            return tree
        case ("name", name):
            return ("int", sizes[name]) if name in sizes else tree
        case ("argument", name, steps):
            value = _look_up(name, steps, arguments, text)
            if not isinstance(value, str):
                return ("int", value)
            if depth > _DEEPEST:
                raise AnnotationError(f"axis {text!r}: {name!r} stands for itself")
            return _filled(expression(value).tree, sizes, arguments, text, depth + 1)
        case ("call", name, inner):
            return ("call", name, tuple(map(fill, inner)))
    return (tree[0], *map(fill, tree[1:]))


def names_of(tree: Tree) -> frozenset[str]:
    """The axis names in a tree."""
    if tree[0] == "name":
        return frozenset(tree[1:])
    if tree[0] in ("int", "argument"):
        return frozenset()
    return frozenset().union(*map(names_of, tree[2] if tree[0] == "call" else tree[1:]))


def value_of(tree: Tree, sizes: Mapping[str, int]) -> Any:
    """The value of a tree without arguments.

    Raises:
        UnboundName: a name has no size.
        ArithmeticError: division by zero, or a number with thousands of digits.
    """
    return _evaluate(tree, sizes, {}, "")
