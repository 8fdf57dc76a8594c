"""Batches that a thread draws ahead, so that the step does not wait for them.

The thread draws at most `most` batches more than were taken. What it raises is raised where the next batch would have
been taken, with the traceback of where it happened; a run that ends draws no more. JAX's x64 mode and context variables
are those of the thread that asks for batches; other settings that hold in one thread only are not.
"""

import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, Self, TypeVar

import jax

from equikd.data._arrays import x64_enabled

T = TypeVar("T")
_LONGEST_WAIT = 0.1  # seconds until the thread sees that nobody wants more


class _Ended:
    """Stands where the iterator has ended, or failed."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetched(Generic[T]):
    """An iterator whose elements a thread draws ahead.

    Args:
        source: the iterator; used by the thread alone from now on.
        most: elements that are held ready, at least 1.

    Example:
        >>> with Prefetched(iter(range(3)), most=2) as numbers:
        ...     list(numbers)
        [0, 1, 2]
    """

    def __init__(self, source: Iterator[T], most: int) -> None:
        self._ready: queue.Queue[T | _Ended] = queue.Queue(most)
        self._unwanted = threading.Event()
        self._ended: _Ended | None = None
        work = lambda: self._draw(source)
        given = (contextvars.copy_context(), work, x64_enabled())
        self._thread = threading.Thread(target=_run, args=given, name="equikd-prefetch", daemon=True)
        self._thread.start()

    def _draw(self, source: Iterator[T]) -> None:
        ended = _Ended(None)
        try:
            for element in source:
                if not self._put(element):
                    break
        except BaseException as error:
            ended = _Ended(error)
        finally:
            close = getattr(source, "close", None)  # of a generator, whose files are closed by it
            try:
                if close is not None:
                    close()
            except BaseException as error:
                ended = ended if ended.error is not None else _Ended(error)
        self._put(ended)

    def _put(self, element: T | _Ended) -> bool:
        """Hold an element ready; False where nobody wants it."""
        while not self._unwanted.is_set():
            try:
                self._ready.put(element, timeout=_LONGEST_WAIT)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._ended is None:
            element = self._ready.get()
            if not isinstance(element, _Ended):
                return element
            self._ended = element
        error, self._ended = self._ended.error, _Ended(None)
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Draw no more. An element that is being drawn is not waited for long."""
        self._unwanted.set()
        self._thread.join(2 * _LONGEST_WAIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _run(context: contextvars.Context, work: Callable[[], None], x64: bool) -> None:
    with jax.enable_x64(x64):
        context.run(work)
