"""`ek.testing.violations(fn)`: calls that are broken in exactly one place.

A valid call is drawn, and one axis, rank or dtype of one array changed, so that the annotations contradict each other:
an axis has another size than a number, an expression, or the same name elsewhere. A name that stands once is free, and
another size for it is no violation. What is a violation is judged from sizes (`_contradictions`), not by the binder.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from equikd.errors import message
from equikd.testing._arguments import Arguments, Patience, check_options, drawn
from equikd.testing._contradictions import contradiction
from equikd.testing._drawing import Options
from equikd.testing._parts import DrawError, Leaf, Part, known_choices, leaves, replaced
from equikd.testing._rules import Rules, rules_of
from equikd.typing._nodes import Node, walk

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Kind = Literal["axis", "rank", "dtype"]
KINDS: tuple[Kind, ...] = ("axis", "rank", "dtype")


class Violation(Arguments):
    """A drawn call that is broken.

    Attributes:
        broken: what is wrong, in words: `"axis b of x is 2, of y it is 3"`.
        kind: `"axis"`, `"rank"` or `"dtype"`.
    """

    def __init__(self, valid: Arguments, parts: Mapping[str, Part], kind: Kind, broken: str) -> None:
        super().__init__(valid.rules, parts, valid.scope, valid.seed)
        self.kind: Kind = kind
        self.broken = broken

    def __repr__(self) -> str:
        """The call, and what is wrong with it."""
        return f"{super().__repr__()}  # {self.broken}"

    @property
    def call(self) -> str:
        """The call alone."""
        return super().__repr__()


class _Change(NamedTuple):
    kind: Kind
    leaf: Leaf
    changed: Leaf
    text: str
    """What is wrong; of an axis, the contradiction says it."""


def violations(
    fn: Any,
    *,
    axes: "Mapping[str, SearchStrategy[Any]] | None" = None,
    where: Callable[..., bool] | None = None,
    given: "Mapping[str, SearchStrategy[Any]] | None" = None,
    values: bool = False,
    dtypes: Literal["usual", "all"] = "usual",
    kinds: Sequence[Kind] | Kind = KINDS,
) -> "SearchStrategy[Violation]":
    """Calls that break the annotations of a function in exactly one axis, rank or dtype.

    Args:
        fn: as of `arguments`.
        axes: as of `arguments`.
        where: as of `arguments`; of the call before it is broken.
        given: as of `arguments`; what is given is not broken.
        values: as of `arguments`.
        dtypes: as of `arguments`.
        kinds: what may be broken: `"axis"`, `"rank"`, `"dtype"`, or several.

    Returns:
        A strategy of `Violation`s: `Arguments` that know what is `broken`.

    Raises:
        DrawError: as of `arguments`; there is no such kind; and if nothing can be broken.

    Example:
        >>> import hypothesis
        >>> from equikd.typing import Array, Float
        >>> def distance(x: Float[Array, " d"], y: Float[Array, " d"]): ...
        >>> hypothesis.find(violations(distance, kinds=["axis"]), lambda call: True)
        distance(x=f32[2], y=f32[1])  # axis d of x is 2, of y it is 1
    """
    from hypothesis import strategies as st

    rules, owner = rules_of(fn)
    options = Options(axes or {}, given or {}, dtypes)
    check_options(rules, options, where)
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    known_choices("kinds", kinds, KINDS, rules.name)
    if not breakable(rules, options.given):
        raise DrawError(nothing_to_break(rules))
    before, useful = Patience(), Patience()

    def draw_one(draw: Callable[[Any], Any]) -> Violation:
        valid = drawn(draw, rules, owner, options, where, before, values=values)
        return broken(draw, valid, options, kinds, useful)

    return st.composite(draw_one)()


def breakable(rules: Rules, spared: Collection[str] = ()) -> bool:
    """Whether any argument that is not spared has a dtype family, a rank, or axes that could be contradicted."""
    found = [rule for name, node in rules.nodes.items() if name not in {"return", *spared} for rule in _all_rules(node)]
    return any(rule.dtypes is not None or rule.many is None or rule.rank or rule.names for rule in found)


def _all_rules(node: Node) -> Iterator[Any]:
    return (rule for _, rule in walk(node))


def nothing_to_break(rules: Rules) -> str:
    """The message where annotations admit everything."""
    return message(
        f"{rules.name}: nothing can be broken",
        got="annotations that no axis, rank or dtype contradicts (an axis that stands once is free)",
        expected='an array annotation with a dtype family or a rank, such as Float[Array, "b d"]',
    )


def broken(
    draw: Callable[[Any], Any],
    valid: Arguments,
    options: Options,
    kinds: Sequence[Kind],
    patience: Patience,
    spared: Collection[str] = (),
) -> Violation:
    """A valid call with one thing broken, in none of the arguments that are spared."""
    from hypothesis import strategies as st

    nodes = {name: node for name, node in valid.rules.nodes.items() if name not in options.given}
    changes = [change for change in _changes(valid, {*options.given, *spared}) if change.kind in kinds]
    if changes:
        chosen = draw(st.sampled_from([kind for kind in kinds if any(change.kind == kind for change in changes)]))
        # Those of the chosen kind first; from a drawn one on, the first that breaks anything.
        ranked = [one for one in changes if one.kind == chosen]
        start = draw(st.integers(0, len(ranked) - 1))
        others = [one for one in changes if one.kind != chosen]
        for change in [*ranked[start:], *ranked[:start], *others]:
            parts = {name: replaced(part, change.leaf, change.changed) for name, part in valid.parts.items()}
            text = contradiction(parts, nodes, valid.scope)
            if text is not None:
                patience.succeeded()
                return Violation(valid, parts, change.kind, text if change.kind == "axis" else change.text)
    patience.failed(nothing_to_break(valid.rules))
    raise AssertionError("unreachable")


def _changes(valid: Arguments, spared: Collection[str]) -> Iterator[_Change]:
    for leaf in leaves(part for name, part in valid.parts.items() if name not in spared):
        rank, rule, path = len(leaf.shape), leaf.rule, leaf.path
        for axis, at in rule.align(rank):
            if axis.kind in ("anonymous", "ellipsis"):
                continue
            for index in range(at.start, at.stop):
                size = leaf.shape[index]
                for other in dict.fromkeys((size + 1, 1, 2 * size + 1)):  # 1 is what broadcasts in silence
                    if other != size:
                        shape = (*leaf.shape[:index], other, *leaf.shape[index + 1 :])
                        yield _Change("axis", leaf, dataclasses.replace(leaf, shape=shape), "")
        for shape in dict.fromkeys(((*leaf.shape, 2), (1, *leaf.shape), leaf.shape[1:], leaf.shape[:-1])):
            if len(shape) != rank and not rule.admits_rank(len(shape)):
                least = " or more" if rule.many is not None else ""
                count = f"{len(shape)} {'axis' if len(shape) == 1 else 'axes'}"
                text = f"{path} has {count}, and the annotation says {rule.rank}{least}"
                yield _Change("rank", leaf, dataclasses.replace(leaf, shape=shape), text)
        for dtype in ("int32", "float32", "bool", *(() if leaf.concrete else ("prng_key",))):
            if not rule.admits_dtype(dtype):
                text = f"{path} is {dtype}, and the annotation says {rule.dtype}"
                yield _Change("dtype", leaf, dataclasses.replace(leaf, dtype=dtype), text)
