"""The plan of a checked function: made at its first call, then run at each.

A plan holds one compiled check for each annotated parameter and for the result. Running it costs a few dict operations
an argument; only where something does not fit are arguments bound to names, alternatives tried, and words sought.
"""

import contextlib
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtyping import AnnotationError, jaxtyped

from equikd.errors import message
from equikd.typing._binder import Check, checker
from equikd.typing._bindings import Bindings, Mismatch
from equikd.typing._errors import ShapeError
from equikd.typing._hints import hints_of
from equikd.typing._nodes import ANYTHING, MappingNode, Node, SequenceNode, node_of
from equikd.typing._report import Call, binder, explain
from equikd.typing._running import resumed, resumed_async, tell_jaxtyping
from equikd.typing._scope import FRAME, Frame, is_off, new_bindings, share, sources_of, withdraw
from equikd.typing._search import search

_NOT_FOR_RUN_TIME = (typing.NoReturn, typing.Never, typing.Self)
_GUARDS = tuple(getattr(typing, name) for name in ("TypeGuard", "TypeIs") if hasattr(typing, name))


class Arguments(Mapping[str, Any]):
    """Argument -> value of a call, bound when first read."""

    __slots__ = ("_args", "_bound", "_kwargs", "_signature")

    def __init__(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._signature, self._args, self._kwargs = signature, args, kwargs
        self._bound: dict[str, Any] | None = None

    def _values(self) -> dict[str, Any]:
        if self._bound is None:
            bound = self._signature.bind_partial(*self._args, **self._kwargs)
            bound.apply_defaults()
            self._bound = dict(bound.arguments)
        return self._bound

    def __getitem__(self, name: str) -> Any:
        return self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())


class Plan:
    """What is checked when a function is called.

    Args:
        function: with annotations; strings among them are evaluated where it was defined, and one that cannot be (a
            name local to a function) is not checked.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.signature = inspect.signature(function)
        self.nodes = nodes_of(function, self.signature)
        kinds = inspect.Parameter
        parameters = self.signature.parameters.values()
        compiled = {name: checker(node) for name, node in self.nodes.items() if node != ANYTHING}
        by_position = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        self.positional = [compiled.get(p.name) for p in parameters if p.kind in by_position]
        self.named = {p.name: compiled[p.name] for p in parameters if p.name in compiled}
        self.rest = next((compiled.get(p.name) for p in parameters if p.kind is kinds.VAR_POSITIONAL), None)
        self.extra = next((compiled.get(p.name) for p in parameters if p.kind is kinds.VAR_KEYWORD), None)
        self.variable = [p.name for p in parameters if p.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
        for name in self.variable:
            self.named.pop(name, None)
        # Of a generator, the annotation tells what it yields.
        code = inspect.unwrap(function)
        yields = inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code)
        self.result: Check | None = None if yields else compiled.get("return")
        is_one = code is function and yields
        self.resumed = None if not is_one else resumed if inspect.isgeneratorfunction(function) else resumed_async

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], bindings: Bindings) -> None:
        """Check the arguments.

        Raises:
            Mismatch: one does not fit.
        """
        positional = self.positional
        for check, value in zip(positional, args, strict=False):
            if check is not None:
                check(value, bindings)
        if len(args) > len(positional) and self.rest is not None:
            self.rest(args[len(positional) :], bindings)
        if kwargs:
            named, extra = self.named, {}
            for name, value in kwargs.items():
                check = named.get(name)
                if check is not None:
                    check(value, bindings)
                elif self.extra is not None and name not in self.signature.parameters:
                    extra[name] = value
            if extra and self.extra is not None:
                self.extra(extra, bindings)
        if bindings.deferred:
            bindings.settle()

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bindings:
        """The bindings of a call's arguments.

        Raises:
            ShapeError: one does not fit.
            TypeError: the call itself is wrong.
        """
        arguments = Arguments(self.signature, args, kwargs)
        bindings = new_bindings(arguments, self.function)
        try:
            self.bind(args, kwargs, bindings)
        except Mismatch as error:
            failure = error
        else:
            if bindings.scopes:
                share(bindings, lambda name, size: binder(self.call(args, kwargs), name, size))
            return bindings
        self.signature.bind(*args, **kwargs)
        if bindings.ambiguous:
            try:
                bindings = search(
                    functools.partial(self.bind, args, kwargs), lambda: new_bindings(arguments, self.function)
                )
            except Mismatch as error:
                failure = error
            else:
                share(bindings, lambda name, size: binder(self.call(args, kwargs), name, size))
                return bindings
        raise ShapeError(explain(self.call(args, kwargs), failure))

    def check_result(self, args: tuple[Any, ...], kwargs: dict[str, Any], bindings: Bindings, result: Any) -> None:
        """Check what a call has returned.

        Raises:
            ShapeError: it does not fit.
        """
        assert self.result is not None
        try:
            self._bind_result(bindings, result)
        except Mismatch as error:
            failure = error
        else:
            if bindings.scopes:
                share(bindings, lambda name, size: binder(self.call(args, kwargs, result), name, size))
            return

        def attempt(fresh: Bindings) -> None:
            self.bind(args, kwargs, fresh)
            self._bind_result(fresh, result)

        try:
            found = search(attempt, bindings.again)
        except Mismatch as error:
            failure.gave_up = error.gave_up
        else:
            withdraw(bindings)
            share(found, lambda name, size: binder(self.call(args, kwargs, result), name, size))
            return
        raise ShapeError(explain(self.call(args, kwargs, result), failure))

    def _bind_result(self, bindings: Bindings, result: Any) -> None:
        assert self.result is not None
        self.result(result, bindings)
        if bindings.deferred:
            bindings.settle()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, checked.

        Raises:
            ShapeError: an argument or the result does not fit.
        """
        __tracebackhide__ = True
        function = self.function
        if is_off():
            frame = Frame(None, lambda: self.bound(args, kwargs))
            if self.resumed is not None:
                return self.resumed(function(*args, **kwargs), frame)
            token = FRAME.set(frame)
            try:
                return function(*args, **kwargs)
            finally:
                FRAME.reset(token)
        bindings = self.bound(args, kwargs)
        if self.resumed is not None:
            return self.resumed(function(*args, **kwargs), Frame(bindings))
        token = FRAME.set(Frame(bindings))
        try:
            with jaxtyped("context"):
                tell_jaxtyping(bindings)
                result = function(*args, **kwargs)
        finally:
            FRAME.reset(token)
        if self.result is not None:
            self.check_result(args, kwargs, bindings, result)
        return result

    async def run_async(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `run`, of a coroutine function; its annotation says what it gives when awaited."""
        off = is_off()
        frame = Frame(None, lambda: self.bound(args, kwargs)) if off else Frame(self.bound(args, kwargs))
        token = FRAME.set(frame)
        try:
            with contextlib.nullcontext() if off else jaxtyped("context"):
                if not off:
                    tell_jaxtyping(frame.bindings)
                result = await self.function(*args, **kwargs)
        finally:
            FRAME.reset(token)
        if self.result is not None and not off:
            self.check_result(args, kwargs, frame.bindings, result)
        return result

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *result: Any) -> Call:
        """The call, for a message."""
        values = dict(Arguments(self.signature, args, kwargs))
        given = self.signature.bind_partial(*args, **kwargs).arguments
        entries = [(name, self.nodes[name], values[name]) for name in given if name in self.nodes]
        if result:
            entries.append(("result", self.nodes["return"], result[0]))
        function = self.function
        return Call(name_of(function), place_of(function), entries, values, sources_of(function), function)


def nodes_of(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Node]:
    """Parameter (and `return`) -> node, of those that are annotated.

    `*args: X` is a tuple of X, `**kwargs: X` a dict of X.
    """
    raw = {name: p.annotation for name, p in signature.parameters.items()} | {"return": signature.return_annotation}
    raw = {name: annotation for name, annotation in raw.items() if annotation is not inspect.Signature.empty}
    inner = inspect.unwrap(function)
    hints = hints_of(inner) if inspect.isfunction(inner) or inspect.ismethod(inner) else {}
    nodes: dict[str, Node] = {}
    for name, written in raw.items():
        annotation = hints.get(name, Any if isinstance(written, str) else written)
        if annotation in _NOT_FOR_RUN_TIME:
            annotation = Any
        elif typing.get_origin(annotation) in _GUARDS:
            annotation = bool
        try:
            node = node_of(type(None) if annotation is None else annotation)
        except AnnotationError as error:  # an axis is no arithmetic
            where = place_of(function)
            raise ShapeError(message(f"{name_of(function)}: {name}: {error}", where=where)) from None
        kind = signature.parameters[name].kind if name != "return" else None
        if kind is inspect.Parameter.VAR_POSITIONAL:
            node = SequenceNode(annotation, tuple, node)
        elif kind is inspect.Parameter.VAR_KEYWORD and typing.get_origin(annotation) is not typing.Unpack:
            node = MappingNode(annotation, dict, ANYTHING, node)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            node = node_of(typing.get_args(annotation)[0])
        nodes[name] = node
    return nodes


def name_of(function: Any) -> str:
    """As the user knows it: `Model.__call__`; what stands in front of `<locals>` says nothing."""
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return name.rpartition("<locals>.")[2]


def place_of(function: Any) -> str | None:
    """File and line of a function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None and code.co_filename == "<string>":  # jaxtyping checks a stand-in of the same name
        found: Any = sys.modules.get(function.__module__)
        for name in function.__qualname__.split("."):
            found = getattr(found, name, None)
        code = getattr(inspect.unwrap(found), "__code__", None) if found is not None else None
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"
