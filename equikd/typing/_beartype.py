"""What is no array: judged by beartype, which is imported when a value is first judged by it.

`float` admits the 0-d float tracer that a config's float is inside a trace.
"""

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float


def tester(annotation: Any) -> Callable[[Any], bool]:
    """Whether a value fits an annotation, as a function; beartype's own limits apply.

    An annotation that makes sense to a type checker alone (`Self`, `NoReturn`, a `ParamSpec`) admits everything.

    Example:
        >>> fits = tester(list[float])
        >>> fits([1.0]), fits(["a"]), fits([])
        (True, False, True)
    """
    is_bearable, conf, error = _imported()
    try:
        is_bearable(None, annotation, conf=conf)
    except error:
        return lambda value: True
    return lambda value: is_bearable(value, annotation, conf=conf)


@functools.cache
def _imported() -> Any:
    from beartype import BeartypeConf, FrozenDict
    from beartype.door import is_bearable
    from beartype.roar import BeartypeException

    conf = BeartypeConf(hint_overrides=FrozenDict({float: float | Float[Array, ""]}))
    return is_bearable, conf, BeartypeException
