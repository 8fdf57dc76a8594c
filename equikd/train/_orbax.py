"""Arrays by name in an orbax checkpoint: the only file that knows orbax, which is imported by the first call."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from equikd.errors import listing

T = TypeVar("T")


def write_stored(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name; the directory must not be there.

    Raises:
        Exception: whatever orbax, tensorstore and the file system raise.
    """
    import orbax.checkpoint

    with _quiet(), contextlib.closing(orbax.checkpoint.PyTreeCheckpointer()) as checkpointer:
        checkpointer.save(path, args=orbax.checkpoint.args.PyTreeSave(dict(arrays)))


def read_stored(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of these names, and no others; none where there are no names.

    Raises:
        Exception: whatever orbax, tensorstore and the file system raise for broken files; names that are not there.
    """
    return _in_thread(lambda: _read(path, names)) if names else {}


def _read(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    import orbax.checkpoint

    wanted = orbax.checkpoint.args.PyTreeRestore(item=dict.fromkeys(names, 0), partial_restore=True)
    with _quiet(), contextlib.closing(orbax.checkpoint.PyTreeCheckpointer()) as checkpointer:
        found = checkpointer.restore(path, args=wanted)
    absent = [name for name, array in found.items() if not isinstance(array, np.ndarray)]
    if absent:  # orbax gives back what stood in `item`
        raise ValueError(f"not there: {listing(absent, 4)}")
    return found


def _in_thread(function: Callable[[], T]) -> T:
    """Runs orbax away from the caller's thread, which in a notebook already has an event loop running."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax's own reports out of the log while we use it: what fails is raised, with its cause."""
    keep = lambda record: "orbax" not in Path(record.pathname).parts
    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
