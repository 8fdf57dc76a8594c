"""`typechecked`: checks around functions, and around what a class holds.

A check belongs right around the function that has the annotations. Where a decorator stands between the two, it is
taken apart and put together again if Python says how (`property`, `lru_cache`, `partialmethod`, ...). `jax.vmap` and
others change what goes in, and `jax.jit` admits more than the function that it traces: there, checks from outside would
refuse what is right, so the decoration itself is refused, with what to write.
"""

import contextlib
import dataclasses
import functools
import inspect
import pathlib
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from equikd.errors import message
from equikd.typing._binder import checker, fields_of
from equikd.typing._bindings import Bindings, Mismatch
from equikd.typing._errors import ShapeError
from equikd.typing._nodes import DataclassNode
from equikd.typing._plan import Plan, name_of, place_of
from equikd.typing._report import Call, binder, explain
from equikd.typing._scope import is_off, new_bindings, share, sources_of
from equikd.typing._search import search

F = TypeVar("F", bound=Callable[..., Any])
_CODES: set[Any] = set()  # of the wrappers below; `functools.wraps` copies attributes, but not these
_PACKAGE = str(pathlib.Path(__file__).parents[1])


def typechecked(function: F) -> F:
    """Check the annotations of a function when it is called: axis names across all arrays, types by beartype.

    Args:
        function: a function or method; a `staticmethod`, `classmethod` or `property`; or a class, of which all
            annotated methods are checked, and the fields of a dataclass or `eqx.Module` once it is constructed.
            Stands below `jax.jit`, `jax.vmap` and other decorators, right above the `def`; of a class, above
            `@dataclass`, which makes the constructor.

    Returns:
        The same, checked. A lambda is left alone; of a generator function only the arguments are checked; an `async`
        function's result is checked when awaited. `EQUIKD_TYPECHECK=0`, which is read at each call, and
        `ek.typing.disabled()` turn checks off.

    Raises:
        ShapeError: at a call, an argument or the result does not fit.
        TypeError: another decorator stands in between, so that the function cannot be checked; or it is a `NamedTuple`
            or `TypedDict`, which hold anything when they are constructed.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.typing import Array, Float
        >>> @typechecked
        ... def double(x: Float[Array, " n"]) -> Float[Array, " n"]:
        ...     return x * 2
        >>> double(jnp.ones(3)).shape
        (3,)
        >>> double(jnp.ones((3, 3)))
        Traceback (most recent call last):
        equikd.typing.ShapeError: double: x has 2 axes, and the annotation says 1
        ...
    """
    if isinstance(function, type):
        _refuse_a_record(function)
        return _class(function)  # pyright: ignore[reportReturnType]
    return _function(function)


def hooked(definition: Any) -> Any:
    """As `typechecked`, for the import hook: what it would refuse to look into stays as it is."""
    return _class(definition) if isinstance(definition, type) else _function(definition)


def _refuse_a_record(cls: type) -> None:
    named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    if named_tuple or typing.is_typeddict(cls):
        kind = "NamedTuple" if named_tuple else "TypedDict"
        raise TypeError(
            message(
                f"typechecked: {cls.__qualname__} is a {kind}, whose fields are not checked when it is constructed",
                got=f"a {kind}" + ", which JAX constructs with any contents" * named_tuple,
                fix="decorate the functions that take it, which look inside; or make it a dataclass or eqx.Module",
            )
        )


def _function(function: Any) -> Any:
    """One function, method or descriptor, checked."""
    rebuilt = _rebuilt(function, _function)
    if rebuilt is not None:
        return rebuilt
    if not callable(function):
        raise TypeError(message(f"typechecked: {function!r} is not callable"))
    chain = list(_chain(function))
    if is_checked(function) or any(_is_untouched(one) for one in chain):
        return function
    if len(chain) > 1 and not _is_transparent(function) and _annotations(chain[-1]):
        # Of a wrapper that takes anything, the function inside says all.
        if any(is_checked(one) for one in chain[1:]) and _takes_anything(function):
            return function
        raise _refusal(function, chain[-1])
    return _checked(function)


def _checked(function: Any) -> Any:
    plan: Plan | None = None

    def the_plan() -> Plan:
        nonlocal plan
        if plan is None:
            plan = Plan(function)
        return plan

    if inspect.iscoroutinefunction(function):

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return await the_plan().run_async(args, kwargs)

        checked: Any = functools.wraps(function)(call_async)
    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return (plan or the_plan()).run(args, kwargs)

        checked = functools.wraps(function)(call)
    _CODES.add(checked.__code__)
    return checked


def is_checked(function: Any) -> bool:
    """Whether it is what `typechecked` has made; something around it is not."""
    return getattr(function, "__code__", None) in _CODES


def _rebuilt(member: Any, check: Callable[[Any], Any]) -> Any:
    """What wraps functions in a way that Python knows, around checked ones; None for anything else."""
    kind = type(member)
    if isinstance(member, staticmethod | classmethod):
        return kind(check(member.__func__))
    if isinstance(member, property):
        parts = (part if part is None else check(part) for part in (member.fget, member.fset, member.fdel))
        return property(*parts, doc=member.__doc__)
    if kind is functools.cached_property:
        return functools.cached_property(check(member.func))
    if kind is functools.partialmethod:
        return functools.partialmethod(check(member.func), *member.args, **member.keywords)
    if kind is functools.singledispatchmethod:
        rebuilt = functools.singledispatchmethod(check(member.func))
        for cls, one in member.dispatcher.registry.items():
            if cls is not object:
                rebuilt.register(cls, check(one))
        return rebuilt
    if hasattr(member, "cache_parameters") and hasattr(member, "__wrapped__"):
        return functools.lru_cache(**member.cache_parameters())(check(member.__wrapped__))
    return None


def _chain(function: Any) -> Iterator[Any]:
    """A function, what it wraps, what that wraps, ..."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _annotations(function: Any) -> Any:
    return getattr(function, "__annotations__", None)


def _is_untouched(function: Any) -> bool:
    return getattr(function, "__name__", "") == "<lambda>" or getattr(function, "__no_type_check__", False)


def _is_transparent(wrapper: Any) -> bool:
    """Whether a wrapper hands on the very arguments that it is called with."""
    if inspect.isfunction(wrapper):  # a context manager, or one that is used as a decorator; or one of our own
        return wrapper.__code__.co_filename.startswith((contextlib.__file__, _PACKAGE))
    return isinstance(wrapper, _jitted("equinox" in sys.modules))


@functools.cache
def _jitted(with_equinox: bool) -> tuple[type, ...]:
    types: list[type] = [type(jax.jit(lambda: 0)), jax.custom_jvp, jax.custom_vjp]
    if with_equinox:
        equinox = sys.modules["equinox"]
        types += [type(equinox.filter_jit(lambda: 0)), type(equinox.filter_checkpoint(lambda: 0))]
    return tuple(types)


def _takes_anything(wrapper: Any) -> bool:
    code = getattr(wrapper, "__code__", None)
    both = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return code is None or (code.co_argcount + code.co_kwonlyargcount == 0 and code.co_flags & both == both)


def _refusal(wrapper: Any, inner: Any) -> TypeError:
    code = getattr(wrapper, "__code__", None)
    by = type(wrapper).__name__ if code is None else code.co_qualname.partition(".<locals>")[0]
    fix = (
        f"put @ek.typechecked below that decorator, right above `def {inner.__name__}`; "
        "or @typing.no_type_check there, to leave it unchecked"
    )
    if any(map(is_checked, _chain(wrapper))):
        fix = (
            f"{name_of(inner)} is checked already; to check what is around it, leave out functools.wraps there, which "
        )
        fix += "replaces annotations"
    return TypeError(
        message(
            f"typechecked: {name_of(inner)} is wrapped by another decorator, which may change what goes in and out",
            where=place_of(inner),
            got=f"the annotations of {name_of(inner)}, seen through {by}",
            fix=fix,
        )
    )


def _class(cls: type) -> type:
    for name, member in list(vars(cls).items()):
        checked = _member(cls, member)
        if checked is not member:
            if hasattr(checked, "__set_name__"):
                checked.__set_name__(cls, name)
            setattr(cls, name, checked)
    if dataclasses.is_dataclass(cls):
        _check_constructor(cls)
    return cls


def _member(cls: type, member: Any) -> Any:
    """What a class holds, checked if it is a method."""
    check = functools.partial(_member, cls)
    rebuilt = _rebuilt(member, check)
    if rebuilt is not None:
        return rebuilt
    if isinstance(member, type) or not callable(member):
        return member
    *wrappers, inner = _chain(member)
    if not inspect.isfunction(inner) or not _annotations(inner):
        return member
    # Generated by `dataclasses`: its annotations are those of the fields, which are checked below.
    if inner.__code__.co_filename == "<string>" or any(map(_is_untouched, (*wrappers, inner))):
        return member
    if any(map(is_checked, wrappers)):
        return member
    if not wrappers or (inspect.isfunction(member) and _is_transparent(member)):
        return _function(member)
    ours = inner.__module__ == cls.__module__ and inner.__qualname__.startswith(f"{cls.__qualname__}.")
    if not ours:
        return member
    raise _refusal(member, inner)


def _check_constructor(cls: Any) -> None:
    equinox = sys.modules.get("equinox")
    if equinox is not None and issubclass(cls, equinox.Module):
        # Equinox's hook for invariants: it runs after converters, and not when a tree is rebuilt.
        own = cls.__dict__.get("__check_init__")

        def __check_init__(self: Any) -> None:
            _check_fields(cls, self)
            if own is not None:
                own(self)

        cls.__check_init__ = __check_init__
        return
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _check_fields(cls, self)

    cls.__init__ = __init__


def _check_fields(cls: Any, instance: Any) -> None:
    """Check a new instance; a field that holds its default is the class's own business."""
    if is_off():
        return
    node = DataclassNode(cls, cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    # The constructor of a config class judges plain values itself, and admits nodes and references.
    plain = not hasattr(cls, "__equikd_config__")
    entries = [
        (name, child, content)
        for name, (child, content) in fields_of(node, instance, plain=plain, holes=False).items()
        if content is not defaults[name]
    ]

    def attempt(bindings: Bindings) -> None:
        for _, child, content in entries:
            checker(child)(content, bindings)
        bindings.settle()

    call = Call(
        cls.__qualname__.rpartition("<locals>.")[2], _place(cls), entries, {"self": instance}, sources_of(cls), cls
    )
    try:
        bindings = search(attempt, lambda: new_bindings({"self": instance}, cls))
    except Mismatch as error:
        failure = error
    else:
        share(bindings, lambda name, size: binder(call, name, size))
        return
    raise ShapeError(explain(call, failure))


def _place(cls: type) -> str | None:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return None
