"""`ek.testing.arguments(fn)`: a Hypothesis strategy of calls that fit the annotations of a function.

    @hypothesis.given(ek.testing.arguments(attend, axes={"d": st.sampled_from([8, 16])}))
    def test_attend(call):
        assert call.eval_shape(attend).shape == call.kwargs["x"].shape

Nothing is computed: arrays are `jax.ShapeDtypeStruct`s, and `call.eval_shape(fn)` runs the function on tracers. With
`values=True` they are real.
"""

import collections
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Key, Shaped

from equikd.errors import message, report
from equikd.testing._contradictions import possible, undetermined
from equikd.testing._drawing import MISSING, Drawing, Options
from equikd.testing._parts import (
    DrawError,
    Fixed,
    Group,
    Leaf,
    Part,
    Scope,
    Undrawable,
    built,
    known_choices,
    known_names,
    leaves,
    shaped,
    written,
)
from equikd.testing._rules import Rules, order_of, rules_of
from equikd.typing._annotation import ArrayRule, array_rule
from equikd.typing._nodes import ArrayNode, Node, PlainNode, walk

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_IN_VAIN = 25  # draws of which none was of use, after which the annotations are to blame


class Arguments:
    """A drawn call.

    Attributes:
        args: positional arguments; empty unless the function has positional-only ones or `*args`.
        kwargs: argument -> value; arrays are `ShapeDtypeStruct`s unless values were asked for.
        sizes: axis name -> size.
    """

    def __init__(self, rules: Rules, parts: Mapping[str, Part], scope: Scope, seed: int | None) -> None:
        self.rules, self.parts, self.scope, self.seed = rules, dict(parts), scope, seed
        self.args, self.kwargs = self.build(shaped if seed is None else lambda leaf: leaf.make(seed))
        self.sizes: dict[str, int] = {name: size for name, size in scope.sizes.items() if isinstance(name, str)}

    @property
    def names(self) -> dict[str, Any]:
        """What `where` may read: axis sizes, and arguments that are no arrays."""
        plain = {name: part.value for name, part in self.parts.items() if isinstance(part, Fixed)}
        return self.sizes | {name: sizes for name, sizes in self.scope.groups.items() if isinstance(name, str)} | plain

    def build(self, make: Callable[[Leaf], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with what `make` gives in the places of the arrays."""
        values = collections.OrderedDict()
        for name in self.rules.signature.parameters:
            if name in self.parts:
                values[name] = built(self.parts[name], make)
        kinds = {name: parameter.kind for name, parameter in self.rules.signature.parameters.items()}
        positional, keyword = [], {}
        spread = bool(values.get(next((name for name, kind in kinds.items() if kind is kind.VAR_POSITIONAL), ""), ()))
        for name, value in values.items():
            kind = kinds[name]
            if kind is kind.VAR_POSITIONAL:
                positional += value
            elif kind is kind.VAR_KEYWORD:
                keyword |= value
            elif kind is kind.POSITIONAL_ONLY or (kind is kind.POSITIONAL_OR_KEYWORD and spread):
                positional.append(value)
            else:
                keyword[name] = value
        return tuple(positional), keyword

    def eval_shape(self, function: Callable[..., Any], owner: Any = None) -> Any:
        """Run a function on these arguments without computing anything.

        Args:
            function: what is called; exceptions come out as they are.
            owner: first argument, whose `ShapeDtypeStruct`s become tracers too.

        Returns:
            The result, with `ShapeDtypeStruct`s for arrays.
        """
        found = [leaf for leaf in leaves(self.parts.values()) if not leaf.concrete]
        dynamic, static = eqx.partition(owner, lambda one: isinstance(one, jax.ShapeDtypeStruct))

        def run(arrays: list[Any], dynamic: Any) -> Any:
            made = dict(zip(map(id, found), arrays, strict=True))
            args, kwargs = self.build(lambda leaf: shaped(leaf) if leaf.concrete else made[id(leaf)])
            first = () if owner is None else (eqx.combine(dynamic, static),)
            return function(*first, *args, **kwargs)

        return eqx.filter_eval_shape(run, [leaf.spec for leaf in found], dynamic)

    def __repr__(self) -> str:
        """`fn(x=f32[3,4], heads=2)`."""
        args, kwargs = self.build(shaped)
        shown = [*map(written, args), *(f"{name}={written(value)}" for name, value in kwargs.items())]
        return f"{self.rules.name}({', '.join(shown)})"


def arguments(
    fn: Any,
    *,
    axes: "Mapping[str, SearchStrategy[Any]] | None" = None,
    where: Callable[..., bool] | None = None,
    given: "Mapping[str, SearchStrategy[Any]] | None" = None,
    values: bool = False,
    dtypes: Literal["usual", "all"] = "usual",
) -> "SearchStrategy[Arguments]":
    """Calls that fit the annotations of a function.

    Axis names agree across all arguments and what they contain: list, tuple, dict, TypedDict, NamedTuple, dataclass,
    `eqx.Module`, Optional, unions, PyTree. Sizes are from 1 to 6, mostly different, and such that the expressions in
    the annotation of the result have a value, so that `t-{k}` is not negative. An argument without arrays is drawn
    where its annotation lists what it admits (bool, Literal, Enum); otherwise it has its default; without one, an int
    is from 1 to 4, a float from 0 to 1, a str `"a"` or `"b"`. A dataclass is made of drawn fields, its constructor not
    called. A PRNG key, as which an argument named `key` is taken, is a typed one of the default implementation. The
    `mask` of a loss or metric is one bool for each row.

    Args:
        fn: a function, a bound method, a callable instance (its `__call__`), or a class (its constructor).
        axes: axis name (`*b` for a group: tuples), or name of an argument without arrays -> strategy; here 0 can be
            among the sizes of an axis, `axes={"t": st.integers(0, 3)}`.
        where: predicate of such names (of a group without the `*`), as its parameters are called; draws for which it
            is false are left out.
        given: argument -> strategy, for annotations that say too little; its arrays bind no axes.
        values: real arrays instead of shapes.
        dtypes: `"usual"` draws float32, int32, bool, ... of a family; `"all"` also bfloat16, int8, complex64, ..., and
            PRNG keys in their raw form, where it is admitted.

    Returns:
        A strategy of `Arguments`, which have `args`, `kwargs`, `sizes` and `eval_shape(fn)`.

    Raises:
        DrawError: an option names what does not exist; when drawn: annotations that say too little, all at once.

    Example:
        >>> import hypothesis
        >>> from equikd.typing import Array, Float
        >>> def project(x: Float[Array, "b d"], w: Float[Array, "d n"]) -> Float[Array, "b n"]:
        ...     return x @ w
        >>> call = hypothesis.find(arguments(project), lambda call: True)
        >>> call, call.sizes, call.eval_shape(project).shape
        (project(x=f32[1,2], w=f32[2,3]), {'b': 1, 'd': 2, 'n': 3}, (1, 3))
    """
    from hypothesis import strategies as st

    rules, owner = rules_of(fn)
    options = Options(axes or {}, given or {}, dtypes)
    check_options(rules, options, where)
    useful = Patience()
    return st.composite(lambda draw: drawn(draw, rules, owner, options, where, useful, values=values))()


class Patience:
    """Counts draws in vain until one was of use; then, or never, the fault is elsewhere."""

    def __init__(self) -> None:
        self.left: int | None = _IN_VAIN

    def succeeded(self) -> None:
        """One was of use."""
        self.left = None

    def failed(self, what: str, **answers: Any) -> None:
        """One was not; leaves the draw.

        Raises:
            DrawError: none of many was.
        """
        from hypothesis import reject

        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise DrawError(message(what, **answers))
        reject()


def check_options(rules: Rules, options: Options, where: Any, more: Collection[str] = ()) -> None:
    """Refuse options that name what does not exist; `more` are names known from elsewhere."""
    known = rules.choosable | set(more)
    known_choices("dtypes", [options.dtypes], ("usual", "all"), rules.name)
    known_names("axes", options.axes, known, rules.name)
    known_names("given", options.given, [*rules.signature.parameters, *more], rules.name)
    if where is not None:
        readable = {name.removeprefix("*") for name in known}
        known_names("where", inspect.signature(where).parameters, readable, rules.name)


def drawn(
    draw: Callable[[Any], Any],
    rules: Rules,
    owner: Any,
    options: Options,
    where: Callable[..., bool] | None,
    patience: Patience,
    *,
    values: bool = False,
    more: Mapping[str, Any] | None = None,
) -> Arguments:
    """One call; `more` are further names that `where` may read."""
    from hypothesis import reject
    from hypothesis import strategies as st

    drawing = Drawing(draw, options)
    defaults = {n: p.default for n, p in rules.signature.parameters.items() if p.default is not p.empty}
    scope = Scope({"self": owner} | defaults) if not rules.fields else Scope({"self": _Fields(defaults)})
    parts: dict[str, Part] = {}
    errors: list[Undrawable] = []
    for name in order_of(rules):
        try:
            if rules.of_rows and name == "mask":
                drawing.rows = _rows(drawing, rules.nodes[name], parts)
            parts[name] = _parameter(drawing, rules, name, scope)
            drawing.rows = None
        except Undrawable as error:
            errors.append(error)
            continue
        value = built(parts[name], shaped)
        if rules.fields:
            setattr(scope.arguments["self"], name, value)
        else:
            scope.arguments[name] = value
    if errors:
        raise DrawError(report(f"{rules.name}: arguments cannot be drawn", [_told(rules, error) for error in errors]))
    if not possible(rules.nodes.get("return"), scope, options.axes):
        reject()
    lost = undetermined(parts, rules.nodes, scope)
    if lost is not None:
        fix = "let another array have the names as axes of their own"
        patience.failed(f"{rules.name}: {lost} cannot be solved: two unknown names", fix=fix)
    seed = draw(st.integers(0, 2**16)) if values else None
    call = Arguments(rules, parts, scope, seed)
    if where is not None:
        known = {**(more or {}), **call.names}
        wanted = inspect.signature(where).parameters
        if all(name in known for name in wanted) and not where(**{name: known[name] for name in wanted}):
            reject()
    patience.succeeded()
    return call


class _Fields:
    """What `self` is while the fields of a constructor are drawn."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)


def _parameter(drawing: Drawing, rules: Rules, name: str, scope: Scope) -> Part:
    parameter, node = rules.signature.parameters[name], rules.nodes[name]
    default = MISSING if parameter.default is parameter.empty else parameter.default
    if name in drawing.options.given:
        return _from_value(drawing.draw(drawing.options.given[name]), name)
    if name == "key" and _says_no_shape(node, "Key"):
        return Leaf(_KEY, (), "prng_key", name)
    if drawing.rows is not None and not isinstance(node, ArrayNode) and _says_no_shape(node):
        return Leaf(_MASK, drawing.rows, "bool", name)
    if node.annotation is inspect.Parameter.empty and default is MISSING and name not in drawing.options.axes:
        raise Undrawable(name, None, "has no annotation")
    return drawing.part(node, scope, name, name, default)


def _rows(drawing: Drawing, mask: Node, parts: Mapping[str, Part]) -> tuple[int, ...]:
    """What any number of axes are in a mask with one bool for each row.

    `...` are the rows of the first array, as of the trainer's own mask; `*m` one axis, and `b ...` or `b *n` none more.
    """
    if any(rule.rank for _, rule in walk(mask)):
        return ()
    if any(rule.names for _, rule in walk(mask)):
        return (drawing.draw(drawing.st.integers(1, 6)),)
    return next((leaf.shape[:1] for leaf in leaves(parts.values()) if leaf.dtype != "prng_key"), ())


def _says_no_shape(node: Node, family: str = "") -> bool:
    """Whether an annotation admits any array, or one of a dtype family."""
    plain = {node.annotation, *typing.get_args(node.annotation)}
    if plain & {inspect.Parameter.empty, Any, jax.Array}:
        return True
    return any(rule.dtype == family for _, rule in walk(node))


def _rule(annotation: Any) -> ArrayRule:
    rule = array_rule(annotation)
    assert rule is not None
    return rule


_KEY = _rule(Key[jax.Array, ""])
_MASK = _rule(Bool[jax.Array, "..."])
_FREE = _rule(Shaped[jax.Array, "..."])  # of arrays that are given


def _from_value(value: Any, path: str) -> Part:
    """A given value as a part: its `ShapeDtypeStruct`s are leaves, all else stays."""

    def part(one: Any) -> Part:
        if not isinstance(one, jax.ShapeDtypeStruct):
            return Fixed(one)
        is_key = jnp.issubdtype(one.dtype, jax.dtypes.prng_key)
        return Leaf(_FREE, one.shape, "prng_key" if is_key else one.dtype.name, path)

    flat, tree = jax.tree.flatten(value)
    parts = [part(one) for one in flat]
    if not any(isinstance(part, Leaf) for part in parts):
        return Fixed(value)
    return Group(PlainNode(Any), object, tuple(range(len(parts))), tuple(parts), tree.unflatten)


def _told(rules: Rules, error: Undrawable) -> str:
    parameter = error.path.split(".")[0].split("[")[0]
    if error.annotation is None:
        what = f"{error.path} {error.why}"
    else:
        name = error.annotation if isinstance(error.annotation, str) else _spelt(error.annotation)
        what = f"{error.path}: {name} {error.why}"
    fix = f"give a strategy: given={{{parameter!r}: st.just(...)}}"
    if error.annotation is jax.Array:
        fix = f'write its shape: Float[Array, "b d"]; or {fix}'
    return message(what, where=rules.name, fix=fix)


def _spelt(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__.rpartition(".")[2]
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")
