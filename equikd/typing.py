"""Shape checks at run time: jaxtyping's annotations, and `typechecked`.

    @ek.typechecked
    def forward(x: Float[Array, "b d"], w: Float[Array, "d n"]) -> Float[Array, "b n"]: ...

Axis names are bound once a call; a size that disagrees is an error at trace time, so the compiled program pays nothing.
`float` admits the 0-d float tracer that a config's float is inside a trace. beartype is imported at the first call of a
checked function, or when a class is decorated.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from jaxtyping import Array as Array
from jaxtyping import ArrayLike as ArrayLike
from jaxtyping import Bool as Bool
from jaxtyping import Float as Float
from jaxtyping import Inexact as Inexact
from jaxtyping import Int as Int
from jaxtyping import Integer as Integer
from jaxtyping import Num as Num
from jaxtyping import PRNGKeyArray as PRNGKeyArray
from jaxtyping import PyTree as PyTree
from jaxtyping import Shaped as Shaped
from jaxtyping import UInt as UInt
from jaxtyping import jaxtyped

F = TypeVar("F", bound=Callable[..., Any])

Scalar = Shaped[Array, ""]
"""A 0-d array of any dtype."""


def typechecked(function: F) -> F:
    """Check a function's annotations when it is called: types by beartype, axis names across all arrays.

    Args:
        function: a function or method with annotations, or a class whose constructor and methods are checked.

    Returns:
        The same function, checked. The environment variable `EQUIKD_TYPECHECK=0` turns checks off; it is read at each
        call of a function, and when a class is decorated.

    Raises:
        jaxtyping.TypeCheckError: at a call, an argument or the result does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> @typechecked
        ... def double(x: Float[Array, " n"]) -> Float[Array, " n"]:
        ...     return x * 2
        >>> double(jnp.ones(3)).shape
        (3,)
    """
    if isinstance(function, type):
        if os.environ.get("EQUIKD_TYPECHECK") == "0":
            return function  # pyright: ignore[reportReturnType]
        return jaxtyped(typechecker=_beartype())(function)  # pyright: ignore[reportReturnType]
    if function.__name__ == "<lambda>":  # it has no annotations, and jaxtyping trips over its name
        return function
    checked: list[Any] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("EQUIKD_TYPECHECK") == "0":
            return function(*args, **kwargs)
        if not checked:
            checked.append(jaxtyped(typechecker=_beartype())(function))
        return checked[0](*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]  # same signature


@functools.cache
def _beartype() -> Any:
    from beartype import BeartypeConf, FrozenDict, beartype

    return beartype(conf=BeartypeConf(hint_overrides=FrozenDict({float: float | Float[Array, ""]})))
