"""What lives longer than one check: the frame of a checked call, scopes that share names, the off switch, provenance.

    with Scope("b"):                 # `b` is one size in all checked calls inside; other names are local to a call
        preds = model(batch.x)       # binds b
        loss(preds, batch.y)         # must agree

A *frame* is what a checked call has bound, while its body runs: `dim` and `shape` read it. All of this lives in context
variables, so threads and tasks keep apart, and costs a lookup where unused.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import AnnotationError
from jaxtyping import config as jaxtyping_config

from equikd.errors import listing, message, nearest
from equikd.typing._annotation import axes
from equikd.typing._bindings import Bindings
from equikd.typing._errors import ShapeError
from equikd.typing._expression import UnboundName

_OFF_WORDS, _ON_WORDS = ("0", "false", "no", "off"), ("1", "true", "yes", "on", "")
_OFF: ContextVar[bool] = ContextVar("equikd_typing_off", default=False)
_SCOPES: ContextVar[tuple["Scope", ...]] = ContextVar("equikd_typing_scopes", default=())
FRAME: ContextVar["Frame | None"] = ContextVar("equikd_typing_frame", default=None)
_PROVENANCE: ContextVar["Provenance | None"] = ContextVar("equikd_typing_provenance", default=None)


class Frame:
    """A checked call whose body runs; where checks are off, it binds when someone asks."""

    __slots__ = ("_bind", "_bindings", "_caller")

    def __init__(self, bindings: Bindings | None, bind: Callable[[], Bindings] | None = None) -> None:
        self._bindings, self._bind = bindings, bind
        self._caller = None if bind is None else FRAME.get()

    @property
    def bindings(self) -> Bindings:
        """What the call has bound."""
        if self._bindings is None:
            assert self._bind is not None
            token = FRAME.set(self._caller)  # as if the call were about to start
            try:
                self._bindings = self._bind()
            finally:
                FRAME.reset(token)
        return self._bindings


class Scope:
    """Axis names that all checked calls inside share.

    Args:
        *names: `"b"`, or `"*n"` for a group of axes; the first checked call that has the axis binds it.
        of: a function, method or callable object: the names are shared only with its checked calls that are made
            directly inside; what such a call calls in turn has names of its own. None: with all checked calls inside.
        sizes: name -> size, or `*name` -> sizes, bound from the start; also as keywords: `Scope(b=32)`.

    Raises:
        ValueError: a name is no identifier.
        RuntimeError: it is entered while it is open.

    Scopes nest; a name is that of the innermost scope that declares it. A scope can be entered again: what was bound
    inside is forgotten.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.typing import Array, Float, check
        >>> with Scope("b") as scope:
        ...     x = check(jnp.ones((2, 3)), Float[Array, "b d"])
        ...     y = check(jnp.ones((2, 4)), Float[Array, "b d"])  # d is local to a check
        ...     scope.sizes
        {'b': 2}
    """

    def __init__(
        self, *names: str, of: Any = None, sizes: Mapping[str, int | tuple[int, ...]] = {}, **more: int
    ) -> None:
        given = {**sizes, **more}
        for name in (*names, *given):
            if not name.removeprefix("*").isidentifier():
                raise ValueError(message(f"Scope({name!r}): not the name of an axis", expected="'b', or '*n' for many"))
        self.declared = frozenset(names) | given.keys()
        """The names."""
        self._of = of
        self._frame: Frame | None = None
        single = {name: size for name, size in given.items() if isinstance(size, int)}
        groups = {name.removeprefix("*"): (False, size) for name, size in given.items() if isinstance(size, tuple)}
        self._given = (single, groups)
        self._bindings = Bindings(*self._given)
        self.binders: dict[str, str] = {}
        """Name -> which call bound it first."""

    @property
    def sizes(self) -> dict[str, int | tuple[int, ...]]:
        """What is bound: name -> size, `*name` -> sizes."""
        groups = {f"*{name}": sizes for name, (_, sizes) in self._bindings.groups.items()}
        return {**self._bindings.sizes, **groups}

    def __enter__(self) -> "Scope":
        if self in _SCOPES.get():
            raise RuntimeError("this Scope is open already; make another one")
        self._bindings = Bindings(*self._given)
        self.binders = dict.fromkeys(self.sizes, "Scope")
        self._frame = FRAME.get()
        _SCOPES.set((*_SCOPES.get(), self))
        return self

    def __exit__(self, *details: object) -> None:
        _SCOPES.set(tuple(scope for scope in _SCOPES.get() if scope is not self))

    def reaches(self, function: Any) -> bool:
        """Whether a checked call of a function that starts now shares the names."""
        return self._of is None or (FRAME.get() is self._frame and plain(self._of) is plain(function))


def new_bindings(arguments: Mapping[str, Any], function: Any = None) -> Bindings:
    """Bindings of a new call of a function, which know what the open scopes share with it."""
    scopes = _SCOPES.get()
    if not scopes:
        return Bindings(arguments=arguments)
    return _known_to(tuple(scope for scope in scopes if scope.reaches(function)), arguments)


def _known_to(scopes: tuple[Scope, ...], arguments: Mapping[str, Any]) -> Bindings:
    sizes: dict[Any, int] = {}
    groups: dict[Any, tuple[bool, tuple[int, ...]]] = {}
    for scope in scopes:
        # A name that an inner scope declares anew hides that of the outer one.
        sizes = {name: size for name, size in sizes.items() if name not in scope.declared} | scope._bindings.sizes
        groups = {name: one for name, one in groups.items() if f"*{name}" not in scope.declared}
        groups |= scope._bindings.groups
    return Bindings(sizes, groups, arguments, scopes)


def share(bindings: Bindings, binder: Callable[[str, Any], str]) -> None:
    """Tell the open scopes what a call has bound of their names.

    Args:
        bindings: of the call; all fits.
        binder: (name, size) -> a text that says who bound it.
    """
    if not bindings.scopes:
        return
    sizes, groups = bindings.shared_names()
    for known, found, star in (("sizes", sizes, ""), ("groups", groups, "*")):
        value: Any
        for name, value in found.items():
            scope = next(one for one in reversed(bindings.scopes) if f"{star}{name}" in one.declared)
            if f"{star}{name}" not in scope.binders:
                scope.binders[f"{star}{name}"] = binder(f"{star}{name}", value[1] if star else value)
            getattr(scope._bindings, known)[name] = value


def withdraw(bindings: Bindings) -> None:
    """Make the open scopes forget what a call has told them: other members of its unions were meant."""
    if not bindings.scopes:
        return
    for known, found, given, star in zip(("sizes", "groups"), bindings.shared_names(), bindings.given, ("", "*"),
                                         strict=True):  # fmt: skip
        for name, value in found.items():
            scope = next(one for one in reversed(bindings.scopes) if f"{star}{name}" in one.declared)
            there = getattr(scope._bindings, known)
            if there.get(name) != value:
                continue
            if name in given:
                there[name] = given[name]
            else:
                del there[name]
                scope.binders.pop(f"{star}{name}", None)


def shared_binder(name: str, scopes: tuple[Scope, ...]) -> tuple[int | tuple[int, ...], str] | None:
    """(size, who bound it) of a name that one of these scopes has bound; groups as `*name`."""
    for scope in reversed(scopes):
        if name in scope.declared:
            return (scope.sizes[name], scope.binders[name]) if name in scope.sizes else None
    return None


def dim(name: str) -> int:
    """The size of an axis in the checked call that is running.

    Raises:
        ShapeError: no such axis is bound, or no checked call is running.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.typing import Array, Float, typechecked
        >>> @typechecked
        ... def mean(x: Float[Array, "b d"]) -> Float[Array, " d"]:
        ...     return x.sum(axis=0) / dim("b")
        >>> mean(jnp.ones((2, 3))).tolist()
        [1.0, 1.0, 1.0]
    """
    sizes = shape(name)
    if len(sizes) != 1:
        raise ShapeError(message(f"dim({name!r}): {len(sizes)} axes, not one", fix=f"write shape({name!r})"))
    return sizes[0]


def shape(text: str) -> tuple[int, ...]:
    """The sizes of axes in the checked call that is running: names, numbers, groups and expressions.

    Raises:
        ShapeError: an axis is not bound, or no checked call is running.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.typing import Array, Float, typechecked
        >>> @typechecked
        ... def zeros(x: Float[Array, "*b d"]) -> Float[Array, "*b 2*d"]:
        ...     return jnp.zeros(shape("*b 2*d"))
        >>> zeros(jnp.ones((5, 6, 3))).shape
        (5, 6, 6)
    """
    bindings = _current(text)
    found: list[int] = []
    for axis in axes(text):
        try:
            if axis.kind == "fixed":
                found.append(axis.size or 0)
            elif axis.kind == "symbolic" and axis.expression is not None:
                found.append(axis.expression.evaluate(bindings.sizes, bindings.arguments))
            elif axis.kind == "variadic":
                found += bindings.groups[axis.name][1]
            else:
                found.append(bindings.sizes[axis.name])
        except (KeyError, UnboundName) as error:
            name = error.name if isinstance(error, UnboundName) else "*" * axis.many + axis.name
            raise ShapeError(_unbound(text, name, bindings)) from None
        except (ArithmeticError, AnnotationError) as error:
            raise ShapeError(message(f"{text!r} cannot be computed: {error}")) from None
    return tuple(found)


def _current(text: str) -> Bindings:
    frame = FRAME.get()
    if frame is not None:
        return frame.bindings
    if _SCOPES.get():
        return _known_to(_SCOPES.get(), {})  # of a scope for one function, too: that may be running unchecked
    raise ShapeError(
        message(
            f"{text!r}: no checked call is running, and no Scope is open",
            fix="decorate the function with @ek.typechecked",
        )
    )


def _unbound(text: str, name: str, bindings: Bindings) -> str:
    known = {key: size for key, size in bindings.sizes.items() if isinstance(key, str)}
    known |= {f"*{key}": sizes for key, (_, sizes) in bindings.groups.items() if isinstance(key, str)}
    bound = listing(f"{key}={size}" for key, size in known.items()) or "nothing"
    return message(
        f"{text!r}: no argument has an axis {name!r}", expected=f"bound here: {bound}", near=nearest(name, known)
    )


def is_off() -> bool:
    """Whether checks are off: by the environment, by `disabled()`, or by jaxtyping's own switch."""
    written = os.environ.get("EQUIKD_TYPECHECK")
    return (written is not None and _says_off(written)) or _OFF.get() or jaxtyping_config.jaxtyping_disable


@functools.lru_cache(maxsize=16)
def _says_off(written: str) -> bool:
    word = written.strip().lower()
    if word in _OFF_WORDS or word in _ON_WORDS:
        return word in _OFF_WORDS
    raise ValueError(
        message(
            f"EQUIKD_TYPECHECK={written!r} says neither on nor off",
            expected=f"{', '.join(_OFF_WORDS)} for no checks; 1, true, or unset for checks",
        )
    )


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """No checks inside.

    Example:
        >>> from equikd.typing import Array, Float, check
        >>> with disabled():
        ...     check("no array", Float[Array, " n"])
        'no array'
    """
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


@dataclass(frozen=True)
class Provenance:
    """Where the arguments of a call come from; see `provenance`."""

    sources: Mapping[str, str]
    function: Any
    frame: Frame | None = field(repr=False)

    def of(self, function: Any) -> Mapping[str, str]:
        """The sources, if `function` is what is called here, and nothing within."""
        same = self.function is None or plain(self.function) is plain(function)
        return self.sources if same and FRAME.get() is self.frame else {}


@contextlib.contextmanager
def provenance(sources: Mapping[str, str], function: Any = None) -> Iterator[None]:
    """Say where the arguments of the checked call inside come from; the message of a `ShapeError` repeats it.

    Args:
        sources: argument -> text, such as `inputs.x = batch.image`.
        function: whose arguments; None: those of any checked call that is made directly inside. What that call calls
            in turn has arguments of its own, and is left alone.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.typing import Array, Float, ShapeError, typechecked
        >>> @typechecked
        ... def model(x: Float[Array, "b 784"]): ...
        >>> try:
        ...     with provenance({"x": "inputs.x = batch.image"}):
        ...         model(jnp.ones((2, 28)))
        ... except ShapeError as error:
        ...     "inputs.x = batch.image" in str(error)
        True
    """
    token = _PROVENANCE.set(Provenance(sources, function, FRAME.get()))
    try:
        yield
    finally:
        _PROVENANCE.reset(token)


def sources_of(function: Any) -> Mapping[str, str]:
    """Argument -> where it comes from, of a call that failed."""
    found = _PROVENANCE.get()
    return {} if found is None else found.of(function)


def plain(function: Any) -> Any:
    """A function without its wrappers, `functools.partial`s and instance; of a callable object, what calling runs."""
    while True:
        inner = getattr(function, "__func__", None) or getattr(function, "__wrapped__", None)
        if isinstance(function, functools.partial):
            inner = function.func
        if inner is None and not isinstance(function, type) and not hasattr(function, "__code__"):
            inner = getattr(type(function), "__call__", None)  # noqa: B004
        if inner is None or inner is function:
            return function
        function = inner
