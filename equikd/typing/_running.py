"""While the body of a checked call runs: its frame around generators, and its sizes in jaxtyping's own context."""

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any

import numpy as np
from jaxtyping import Shaped

from equikd.typing._bindings import Bindings
from equikd.typing._scope import FRAME, Frame


def resumed(generator: Generator[Any, Any, Any], frame: Frame) -> Generator[Any, Any, Any]:
    """A generator whose body runs in a frame of its own, whoever resumes it."""
    step: Callable[[Any], Any] = generator.send
    value: Any = None
    while True:
        token = FRAME.set(frame)
        try:
            item = step(value)
        except StopIteration as end:
            return end.value
        finally:
            FRAME.reset(token)
        try:
            step, value = generator.send, (yield item)
        except BaseException as error:  # GeneratorExit among them
            step, value = generator.throw, error


async def resumed_async(generator: AsyncGenerator[Any, Any], frame: Frame) -> AsyncGenerator[Any, Any]:
    """As `resumed`, of an asynchronous generator."""
    step: Callable[[Any], Awaitable[Any]] = generator.asend
    value: Any = None
    while True:
        token = FRAME.set(frame)
        try:
            item = await step(value)
        except StopAsyncIteration:
            return
        finally:
            FRAME.reset(token)
        try:
            step, value = generator.asend, (yield item)
        except BaseException as error:
            step, value = generator.athrow, error


class _Sizes:
    """Something that jaxtyping takes for an array."""

    __slots__ = ("shape",)
    dtype = np.dtype("float32")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def tell_jaxtyping(bindings: Bindings) -> None:
    """Bind what we have bound in jaxtyping's context too, for `isinstance(x, Float[Array, "n"])` in the body."""
    sizes, words = tuple(bindings.sizes.values()), tuple(bindings.sizes)
    for name, (loose, group) in bindings.groups.items():
        if isinstance(name, str):  # at most one group in an annotation
            isinstance(_Sizes((*sizes, *group)), _shaped((*words, f"*#{name}" if loose else f"*{name}")))
            sizes, words = (), ()
    if words:
        isinstance(_Sizes(sizes), _shaped(words))


@functools.lru_cache(maxsize=4096)
def _shaped(names: tuple[Any, ...]) -> Any:
    return Shaped[Any, " ".join(name if isinstance(name, str) and name else "_" for name in names)]
