"""`check`, `declared` and `typechecker`: doors to the binder for single values, and for jaxtyping."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from equikd.typing._binder import checker
from equikd.typing._bindings import Bindings, Mismatch
from equikd.typing._errors import ShapeError
from equikd.typing._nodes import DataclassNode, NamedTupleNode, holds_arrays, node_of
from equikd.typing._plan import Plan
from equikd.typing._report import Call, binder, explain
from equikd.typing._running import tell_jaxtyping
from equikd.typing._scope import FRAME, is_off, new_bindings, share
from equikd.typing._search import search

T = TypeVar("T")


def typechecker(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same checks as a `typechecker` of jaxtyping's: `jaxtyped(typechecker=ek.typing.typechecker)`.

    `typechecked` is faster and knows more (`dim`, the line of the function); this is for code that names its checker.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxtyping import Array, Float, jaxtyped
        >>> @jaxtyped(typechecker=typechecker)
        ... def f(x: Float[Array, "n n"]): ...
        >>> f(jnp.ones((2, 3)))
        Traceback (most recent call last):
        equikd.typing.ShapeError: f: axis 'n' has two sizes, 2 and 3
        ...
    """
    plan: Plan | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal plan
        if is_off():
            return function(*args, **kwargs)
        plan = plan or Plan(function)
        bindings = plan.bound(args, kwargs)
        tell_jaxtyping(bindings)  # the context is jaxtyped's own
        result = function(*args, **kwargs)  # a stand-in that returns what the function has returned
        if plan.result is not None:
            plan.check_result(args, kwargs, bindings, result)
        return result

    return call


def check(value: T, annotation: Any, name: str = "value") -> T:
    """Check one value; inside a checked function its axis names are those of the call.

    Args:
        value: anything.
        annotation: `Float[Array, "b d"]`, a container of such, any type.
        name: what the message calls it.

    Returns:
        The value.

    Raises:
        ShapeError: it does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.typing import Array, Float
        >>> check(jnp.ones((2, 3)), Float[Array, "n n"], "gram")
        Traceback (most recent call last):
        equikd.typing.ShapeError: check: axis 'n' has two sizes, 2 and 3
        ...
    """
    if is_off():
        return value
    node, frame = node_of(annotation), FRAME.get()
    test = checker(node)
    known = new_bindings({}) if frame is None else frame.bindings

    def attempt(bindings: Bindings) -> None:
        test(value, bindings)
        bindings.settle()

    try:
        bindings = search(attempt, known.copy)
    except Mismatch as error:
        failure = error
    else:
        known.adopt(bindings)
        share(known, lambda axis, size: binder(Call("check", None, [(name, node, value)]), axis, size))
        return value
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    raise ShapeError(explain(Call("check", where, [(name, node, value)], known=known), failure))


def declared(value: Any, name: str = "value") -> dict[str, int | tuple[int, ...]]:
    """The axis names that the annotations of a dataclass, `eqx.Module` or named tuple give to what it holds.

    Args:
        value: an instance; of anything else there are none.
        name: what a message calls it.

    Returns:
        Name -> size; `*name` -> sizes.

    Raises:
        ShapeError: it does not fit its own annotations.

    Example:
        >>> import dataclasses, jax.numpy as jnp
        >>> from equikd.typing import Array, Float
        >>> @dataclasses.dataclass
        ... class Pair:
        ...     x: Float[Array, "b d"]
        ...     y: Float[Array, " b"]
        >>> declared(Pair(jnp.ones((2, 3)), jnp.ones(2)))
        {'b': 2, 'd': 3}
    """
    node = node_of(type(value))
    fields = node.fields if isinstance(node, DataclassNode | NamedTupleNode) else {}
    entries = [
        (f"{name}.{key}", child, getattr(value, key))
        for key, child in fields.items()
        if holds_arrays(child) and getattr(value, key, None) is not None
    ]

    def attempt(bindings: Bindings) -> None:
        for _, child, content in entries:
            checker(child)(content, bindings)
        bindings.settle()

    try:
        found = search(attempt, lambda: Bindings(arguments={"self": value}))
    except Mismatch as error:
        raise ShapeError(explain(Call(type(value).__qualname__, None, entries, {"self": value}), error)) from None
    groups = {f"*{name}": sizes for name, (broadcast, sizes) in found.groups.items() if not broadcast}
    return {key: size for key, size in (found.sizes | groups).items() if isinstance(key, str)}
