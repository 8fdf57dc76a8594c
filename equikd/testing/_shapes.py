"""`ek.testing.check_shapes(f)`: shape rules as properties, in one line of a test.

    def test_attention():
        ek.testing.check_shapes(
            Attention,
            axes={"dim": st.sampled_from([8, 16]), "heads": st.integers(1, 4)},
            where=lambda dim, heads: dim % heads == 0,
        )

Three laws, on drawn calls of which nothing is computed: arguments that fit the annotations are taken, the result fits
its annotation, and arguments that are broken in one place are refused. The first two are tested with the checks of
`ek.typechecked` around the function; the third with the function as it is, since whether *it* refuses is the question.
"""

import dataclasses
import functools
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import jax
from jaxtyping import TypeCheckError

from equikd.errors import message
from equikd.testing._arguments import Arguments, Patience, check_options, drawn
from equikd.testing._drawing import Options
from equikd.testing._hints import hints
from equikd.testing._parts import DrawError
from equikd.testing._rules import Rules, is_bound, is_jitted_method, of_rows, rules_of, rules_of_method
from equikd.testing._violations import KINDS, Violation, breakable, broken
from equikd.typing import check, typechecked
from equikd.typing._plan import name_of, place_of
from equikd.typing._scope import is_off

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_SUPPLIED = ("key",)  # to a constructor; whether it checks its key is not asked
_NARROW = "mend it, or narrow what is drawn: axes={...}, where=lambda ...: ..., given={...}"
_DECORATE = "decorate {} with @ek.typechecked, which also looks into lists, dicts, dataclasses, ..."


class _Failed(AssertionError):
    """A law is broken; Hypothesis looks for a smaller call."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Subject:
    """What is checked: a constructor, a function, or a function of an instance; of a class both."""

    constructor: Any
    construction: Rules | None
    function: Any
    rules: Rules | None
    owner: Any
    """The instance, where it is given and not drawn."""

    @functools.cached_property
    def checked(self) -> Any:
        """The function with checks around it; those of losses and metrics have them inside."""
        if self.rules is None or self.rules.of_rows:
            return self.function
        try:
            return typechecked(_without_jaxtyped(self.function))
        except TypeError as error:  # a decorator around it, through which its annotations say nothing
            raise DrawError(str(error)) from error

    @property
    def names(self) -> set[str]:
        """Axes and arguments of both."""
        return set().union(*(rules.choosable for rules in (self.construction, self.rules) if rules is not None))


@dataclasses.dataclass(frozen=True, eq=False)
class _Settings:
    options: Options
    building: Options
    """Of the constructor."""
    where: Callable[..., bool] | None
    patience: Patience = dataclasses.field(default_factory=Patience)
    useful: Patience = dataclasses.field(default_factory=Patience)


def check_shapes(
    target: Any,
    *,
    axes: "Mapping[str, SearchStrategy[Any]] | None" = None,
    where: Callable[..., bool] | None = None,
    given: "Mapping[str, SearchStrategy[Any]] | None" = None,
    method: str | None = None,
    examples: int = 50,
    dtypes: Literal["usual", "all"] = "usual",
) -> None:
    """Check the shape rules that annotations state, on drawn calls under `eval_shape`.

    Arguments that fit are taken, the result fits its annotation (checked here, decorated or not), and every call with
    one axis, rank or dtype broken raises a `jaxtyping.TypeCheckError`; a function that is not checked accepts such
    calls, or fails in the middle, and is told to be decorated. To test the rules of an undecorated function alone, give
    `ek.typechecked(function)`.

    The argument `mask` of a loss or metric is drawn as the trainer gives it by default, one bool for each row, however
    many axes its annotation admits: that a mask of more axes has the first of the values is in no annotation. Another
    mask: `given={"mask": ...}`, or `axes={"*n": ...}` where it has the axes `*n`.

    Args:
        target: a function, a method of an instance, or a callable instance; a loss (`values`) or metric
            (`from_values`); or a class: its constructor arguments are drawn, it is built, and its fields and its
            `__call__` are checked, in whose annotations `{self.dim}` is the instance's. `key` arguments are supplied.
        axes: axis name, or name of an argument without arrays -> strategy; of constructor and call. No size is 0
            unless a strategy here says so, `axes={"t": st.integers(0, 3)}`: many functions rightly refuse it.
        where: predicate of such names, as its parameters are called.
        given: argument -> strategy, for annotations that say too little.
        method: another method than `__call__`.
        examples: how many calls are drawn for each law.
        dtypes: `"usual"`: float32, int32, ... of each family; `"all"`: all of it.

    Raises:
        AssertionError: a law is broken; the text has the smallest call that was found, and what is wrong.
        DrawError: annotations or options from which nothing can be drawn.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.typing import Array, Float
        >>> @typechecked
        ... def outer(x: Float[Array, " n"], y: Float[Array, " m"]) -> Float[Array, "n m"]:
        ...     return y[:, None] * x
        >>> check_shapes(outer)
        Traceback (most recent call last):
        AssertionError: outer(x=f32[1], y=f32[2]): the result does not fit its annotation
        ...
    """
    if is_off():
        raise DrawError(message("checks are off", fix="unset EQUIKD_TYPECHECK, and leave `disabled()`"))
    subject = _subject(target, method)
    options = Options(axes or {}, given or {}, dtypes)
    chosen = _Settings(options, _building(subject, options), where)
    for rules in (subject.construction, subject.rules):
        if rules is not None:
            check_options(rules, chosen.options, where, subject.names)
    if not any(rules is not None and rules.holds_arrays for rules in (subject.construction, subject.rules)):
        name = getattr(target, "__qualname__", type(target).__qualname__)
        raise DrawError(
            message(f"{name}: no argument is annotated with a shape", expected='such as Float[Array, "b d"]')
        )
    for law in _laws(subject, chosen):
        _run(law, subject, dataclasses.replace(chosen, useful=Patience()), examples)


def _subject(target: Any, method: str | None) -> _Subject:
    cls = target if isinstance(target, type) else type(target)
    method = method or of_rows(cls)
    member = inspect.getattr_static(target, method or "__call__", None)
    if not isinstance(target, type) or isinstance(member, staticmethod | classmethod):
        called = target if method is None else getattr(target, method)
        rules, owner = rules_of(called)
        return _Subject(None, None, called if owner is None else _function(called, owner), rules, owner)
    function = getattr(target, method or "__call__", None) if method or _calls(target) else None
    rules = None
    if function is not None:
        rules = rules_of_method(target, function)
    return _Subject(target, rules_of(target)[0], function, rules, None)


def _building(subject: _Subject, options: Options) -> Options:
    """The options of the constructor: the fields of a loss or metric have the names of its arguments, as key paths."""
    if subject.rules is None or not subject.rules.of_rows:
        return options
    given = {name: one for name, one in options.given.items() if name not in subject.rules.signature.parameters}
    return dataclasses.replace(options, given=given)


def _without_jaxtyped(function: Any) -> Any:
    """A function that does the same, if it is in `jaxtyped`, which need not check the result and hands on arguments."""
    if not inspect.isfunction(function) or function.__globals__.get("__name__", "").partition(".")[0] != "jaxtyping":
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    functools.update_wrapper(call, function)
    call.__signature__ = inspect.signature(function)  # pyright: ignore[reportFunctionMemberAccess]  # read by inspect
    del vars(call)["__wrapped__"]
    return call


def _calls(cls: type) -> bool:
    return any("__call__" in vars(base) for base in cls.__mro__)


def _function(target: Any, owner: Any) -> Any:
    """The function that takes the owner as its first argument."""
    if is_bound(target):
        return target.__func__
    return target.func if is_jitted_method(target) else type(owner).__call__


Law = Callable[[Callable[[Any], Any], _Subject, _Settings], Callable[[], None]]
"""Draws what it needs, and returns the check."""


def _laws(subject: _Subject, chosen: _Settings) -> Iterator[Law]:
    yield _takes_valid
    if subject.construction is not None and breakable(subject.construction, {*_SUPPLIED, *chosen.building.given}):
        yield _constructor_refuses
    if subject.rules is not None and breakable(subject.rules, chosen.options.given):
        yield _refuses


def _run(law: Law, subject: _Subject, chosen: _Settings, examples: int) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Unsatisfiable

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=(Phase.generate, Phase.shrink),
    )
    @given(st.composite(lambda draw: law(draw, subject, chosen))())
    def holds(check: Callable[[], None]) -> None:
        check()

    try:
        holds()
    except _Failed as error:  # without the notes of Hypothesis, which repeat the call
        failure, cause = str(error), error.__cause__
    except (DrawError, Unsatisfiable) as error:
        if law is not _takes_valid and chosen.useful.left is not None:
            return  # valid calls there are, and none that is broken: a union admits all
        if isinstance(error, DrawError):
            raise
        what = "no arguments can be drawn: `where` is false, or a size negative, nearly always"
        raise DrawError(message(what, fix="draw what fits: axes={...}")) from None
    else:
        return
    raise AssertionError(failure) from cause


# The laws


def _takes_valid(draw: Callable[[Any], Any], subject: _Subject, chosen: _Settings) -> Callable[[], None]:
    built, owner = _owner(draw, subject, chosen)
    if subject.rules is None:
        return lambda: None
    call = _call(draw, subject, chosen, built, owner)
    function = subject.checked

    def check() -> None:
        try:
            _evaluate(call, function, owner, built, subject)
        except Exception as error:
            _failed_valid(_text(call, built), subject.function, error, hints(call, owner))

    return check


def _refuses(draw: Callable[[Any], Any], subject: _Subject, chosen: _Settings) -> Callable[[], None]:
    built, owner = _owner(draw, subject, chosen)
    call = broken(draw, _call(draw, subject, chosen, built, owner), chosen.options, KINDS, chosen.useful)
    return lambda: _must_refuse(call, subject.function, owner, built, subject)


def _constructor_refuses(draw: Callable[[Any], Any], subject: _Subject, chosen: _Settings) -> Callable[[], None]:
    assert subject.construction is not None
    valid = drawn(draw, subject.construction, None, chosen.building, chosen.where, chosen.patience)
    call = broken(draw, valid, chosen.building, KINDS, chosen.useful, _SUPPLIED)
    return lambda: _must_refuse(call, subject.constructor, None, None, subject)


def _must_refuse(call: Violation, function: Any, owner: Any, built: Arguments | None, subject: _Subject) -> None:
    answers = {
        "where": _place(function),
        "got": call.broken,
        "expected": "a jaxtyping.TypeCheckError",
        "fix": _DECORATE.format(call.rules.name),
    }
    try:
        _evaluate(call, function, owner, built, subject)
    except TypeCheckError:
        return
    except Exception as error:
        answers["got"] += f"\n{_told(error, function)}"
        what = f"{_text(call, built)}: a violation was found by chance, not by a check"
        raise _Failed(message(what, **answers)) from error
    raise _Failed(message(f"{_text(call, built)}: a violation was accepted", **answers))


def _evaluate(call: Arguments, function: Any, owner: Any, built: Arguments | None, subject: _Subject) -> None:
    """Call the function abstractly; an instance that is no pytree, so that its arrays are hidden, is built anew."""
    if built is None or not jax.tree_util.all_leaves([owner]):
        call.eval_shape(function, owner)
        return

    def build_and_call(*args: Any, **kwargs: Any) -> Any:
        first, named = built.build(lambda leaf: leaf.make(0))
        return function(subject.constructor(*first, **named), *args, **kwargs)

    call.eval_shape(build_and_call)


def _owner(draw: Callable[[Any], Any], subject: _Subject, chosen: _Settings) -> tuple[Arguments | None, Any]:
    """The instance to call: the one given, or one that is built of drawn arguments under `eval_shape`."""
    if subject.construction is None:
        return None, subject.owner
    cls: Any = subject.constructor
    name, is_dataclass = cls.__name__, dataclasses.is_dataclass(cls)
    call = drawn(draw, subject.construction, None, chosen.building, chosen.where, chosen.patience)

    def build(*args: Any, **kwargs: Any) -> Any:
        instance = cls(*args, **kwargs)
        return check(instance, cls, name) if is_dataclass else instance

    try:
        return call, call.eval_shape(build)
    except Exception as error:
        _failed_valid(_text(call, None), cls, error)


def _call(
    draw: Callable[[Any], Any], subject: _Subject, chosen: _Settings, built: Arguments | None, owner: Any
) -> Arguments:
    assert subject.rules is not None
    more = {} if built is None else built.names
    return drawn(draw, subject.rules, owner, chosen.options, chosen.where, chosen.patience, more=more)


# The words


def _failed_valid(call: str, function: Any, error: Exception, hinted: Sequence[str] = ()) -> NoReturn:
    fix = "\n".join([*hinted, _NARROW])
    told = "\n".join(line for line in str(error).splitlines() if "testing/_shapes.py" not in line)
    if not isinstance(error, TypeCheckError):
        what = f"{call}: raises {type(error).__name__} where all arguments fit"
        raise _Failed(message(what, where=_place(function), got=_told(error, function), fix=fix)) from error
    own, _, rest = told.partition("\n")[0].partition(": ")
    # Its own result, not that of a function which it calls.
    in_table = re.search(r"^ *> +result ", told, re.MULTILINE)
    of_result = own == _name(function) and bool(in_table or rest.startswith("result "))
    what = "the result does not fit its annotation" if of_result else "refused where all arguments fit"
    if told.startswith("check: "):
        told, what = told.removeprefix("check: "), "the instance does not fit the annotations of its fields"
    raise _Failed(message(f"{call}: {what}", got=told, fix="\n".join(hinted) or None if of_result else fix)) from error


def _text(call: Arguments, built: Arguments | None) -> str:
    text = call.call if isinstance(call, Violation) else repr(call)
    if built is None:
        return text
    name = call.rules.name.rpartition(".")[2]
    arguments = text.removeprefix(call.rules.name)
    return f"{built!r}{arguments}" if name == "__call__" else f"{built!r}.{name}{arguments}"


def _told(error: Exception, function: Any) -> str:
    """The error, and the last line of the function's file that led to it."""
    file = (place_of(_code_of(function)) or "").rpartition(":")[0]
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f"\nin {lines[-1].name}, {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: " + "\n".join(text[:6]) + place


def _name(function: Any) -> str:
    return name_of(inspect.unwrap(function))


def _place(function: Any) -> str | None:
    place = place_of(_code_of(function))
    if place is not None and place.startswith("<string>"):  # the constructor of a dataclass
        return _place_of_class(function)
    return place


def _place_of_class(cls: Any) -> str | None:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return None


def _code_of(function: Any) -> Any:
    return function.__init__ if isinstance(function, type) else function
