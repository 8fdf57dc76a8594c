"""One array annotation as data: `Float[Array, "*b t 2*h"]` becomes an `ArrayRule` of `Axis`es.

jaxtyping keeps the parsed form of an annotation to itself; its text (`dim_str`), dtypes and array type are public. Here
the text is parsed again into small frozen dataclasses, which the binder (`_binder`) runs forwards, from arrays to
verdicts, and a test's strategies run backwards, from chosen sizes to arrays. `_nodes` does the same for the containers
around arrays.

| written | kind | admits |
| --- | --- | --- |
| `4`, `rows=4` | fixed | this size |
| `b` | named | any size, the same wherever `b` stands in the call |
| `*b` | variadic | any number of axes, the same wherever `*b` stands |
| `_`, `_anything` | anonymous | any size |
| `...`, `*_` | ellipsis | any number of axes |
| `2*h`, `{self.dim}` | symbolic | the value of an expression, see `_expression` |

`#` in front (`broadcast`) also admits size 1, for `*#b` shapes that broadcast; `?` (`tree`) makes the name one for each
leaf of the enclosing `PyTree[..., "T"]`.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import AbstractArray, Shaped

from equikd.typing._expression import Expression, expression

Kind = Literal["fixed", "named", "variadic", "anonymous", "ellipsis", "symbolic"]


@dataclass(frozen=True)
class Axis:
    """One word of an annotation's shape.

    Example:
        >>> axes("#b")[0]
        Axis(kind='named', text='#b', name='b', size=None, broadcast=True, tree=False, expression=None)
    """

    kind: Kind
    text: str
    """As written."""
    name: str = ""
    """Of a named or variadic axis, without its marks."""
    size: int | None = None
    """Of a fixed axis."""
    broadcast: bool = False
    """Marked `#`."""
    tree: bool = False
    """Marked `?`."""
    expression: Expression | None = None
    """Of a symbolic axis."""

    @property
    def many(self) -> bool:
        """Whether it stands for any number of axes."""
        return self.kind in ("variadic", "ellipsis")

    @property
    def names(self) -> frozenset[str]:
        """Axis names that it binds or reads."""
        if self.expression is not None:
            return self.expression.names
        return frozenset([self.name]) if self.name else frozenset()


@dataclass(frozen=True)
class ArrayRule:
    """One jaxtyping annotation.

    Example:
        >>> import jax
        >>> from jaxtyping import Float
        >>> rule = array_rule(Float[jax.Array, "b 3"])
        >>> rule.text, [axis.kind for axis in rule.axes], rule.admits_dtype("int32"), rule.rank
        ('Float[Array, "b 3"]', ['named', 'fixed'], False, 2)
    """

    array_type: Any
    """`jax.Array`, `numpy.ndarray`, `Any`, ..."""
    dtypes: tuple[str | re.Pattern[str], ...] | None
    """Names (or patterns of names) of the dtypes that it admits; None: any."""
    axes: tuple[Axis, ...]
    text: str
    """As the user writes it."""
    dtype: str
    """The name of the family: `Float`, `Int`, ..."""

    @functools.cached_property
    def many(self) -> int | None:
        """The position of the axis that stands for any number of axes."""
        return next((index for index, axis in enumerate(self.axes) if axis.many), None)

    @property
    def rank(self) -> int:
        """How many axes an array has, at least where `many` is not None."""
        return len(self.axes) - (self.many is not None)

    def admits_rank(self, rank: int) -> bool:
        """Whether an array of this many axes fits."""
        return rank == self.rank or (rank > self.rank and self.many is not None)

    def admits_dtype(self, name: str) -> bool:
        """Whether a dtype of this name fits (`float32`, `bool`, `prng_key`)."""
        if self.dtypes is None:
            return True
        return any(name == one if isinstance(one, str) else one.match(name) for one in self.dtypes)

    def align(self, rank: int) -> list[tuple[Axis, slice]]:
        """Each axis of the annotation with the positions of the array's axes that it stands for.

        Args:
            rank: number of axes of the array; must be admitted.
        """
        found = self._aligned.get(rank)
        if found is None:
            found, start = [], 0
            for axis in self.axes:
                stop = start + (rank - self.rank if axis.many else 1)
                found.append((axis, slice(start, stop)))
                start = stop
            self._aligned[rank] = found
        return found

    @functools.cached_property
    def _aligned(self) -> dict[int, list[tuple[Axis, slice]]]:
        return {}

    @property
    def names(self) -> frozenset[str]:
        """All axis names that it binds or reads."""
        return frozenset().union(*(axis.names for axis in self.axes))


def array_rule(annotation: Any) -> ArrayRule | None:
    """The rule of a jaxtyping annotation; None for anything else.

    Raises:
        AnnotationError: a symbolic axis is no arithmetic.
    """
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray) and annotation is not AbstractArray:
        return _array_rule(annotation)
    return None


@functools.lru_cache(maxsize=4096)
def _array_rule(annotation: Any) -> ArrayRule:
    anything: Any = Shaped  # to a type checker it is `Annotated`
    dtypes = None if annotation.dtypes is anything.dtypes else tuple(annotation.dtypes)
    name = getattr(annotation.array_type, "__name__", str(annotation.array_type)).rpartition(".")[2]
    family = annotation.dtype.__name__
    text = f'{family}[{name}, "{annotation.dim_str}"]'
    return ArrayRule(annotation.array_type, dtypes, axes(annotation.dim_str), text, family)


@functools.lru_cache(maxsize=4096)
def axes(text: str) -> tuple[Axis, ...]:
    """The axes of a shape such as `"*b t 2*h"`; jaxtyping has refused what is ill-formed.

    Raises:
        AnnotationError: a symbolic axis is no arithmetic.
    """
    return tuple(_axis(word) for word in text.split())


def _axis(word: str) -> Axis:
    if word == "...":
        return Axis("ellipsis", word)
    marks, rest = set(), word
    while rest:  # as jaxtyping reads them: marks in any order, and `name=` anywhere among them
        if rest[0] in "#*_?":
            marks.add(rest[0])
            rest = rest[1:]
        elif rest.count("=") == 1:
            rest = rest.partition("=")[2]
        else:
            break
    broadcast, tree = "#" in marks, "?" in marks
    if "_" in marks:
        return Axis("ellipsis" if "*" in marks else "anonymous", word)
    if "*" in marks:
        return Axis("variadic", word, rest, broadcast=broadcast, tree=tree)
    if not rest or rest.isidentifier():
        return Axis("named", word, rest, broadcast=broadcast, tree=tree)
    if re.fullmatch(r"[+-]?\d+", rest):
        return Axis("fixed", word, size=int(rest), broadcast=broadcast)
    return Axis("symbolic", word, broadcast=broadcast, expression=expression(rest))
