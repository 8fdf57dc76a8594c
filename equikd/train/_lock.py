"""One run directory, one run: the lock that a run holds on its directory from start to end.

Two runs that write into one directory destroy each other's rows and checkpoints. So training locks the file `.lock` in
it, and a second start, from another process or another thread of this one, is refused before it touches anything. The
operating system holds the lock (`flock`): it ends with the process, however that ends, so a killed run blocks nobody.
Where the system or the disk has no such locks there is none.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from equikd.errors import message
from equikd.train._directory import RunDirectory, RunDirectoryError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_held: set[int] = set()  # descriptors


def _forget() -> None:
    """In a forked child: a data worker that outlives its killed parent must not keep the parent's lock."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def locked(directory: RunDirectory) -> Iterator[None]:
    """Holds the lock of a run directory, which is made where it is missing; what is left empty is removed again.

    Args:
        directory: where to run; `directory.check()` has passed.

    Raises:
        RunDirectoryError: another run holds it; the disk refuses.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = RunDirectory.open(folder + "/runs/a")
        ...     with locked(run):
        ...         print(run.path.exists())
        ...     print(run.path.exists())
        True
        False
    """
    made = [place for place in (directory.path, *directory.path.parents) if not place.exists()]
    file = directory.path / NAME
    descriptor = None
    try:
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            descriptor = _acquire(file)
        except OSError as error:
            fix = "check the disk and the permissions, or name another directory"
            what = f"{directory.path}: cannot be locked"
            raise RunDirectoryError(message(what, got=str(error), fix=fix)) from error
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                file.unlink()  # while it is held: `_acquire` looks whether the file that it locked is still there
            _held.discard(descriptor)
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the first that holds something ends it
            for place in made:
                place.rmdir()


def _acquire(file: Path) -> int | None:
    """The descriptor that holds the lock, or None where there are no locks."""
    while fcntl is not None:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(descriptor, file):  # the run before has removed it in between
                os.close(descriptor)
                continue
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise _taken(file, holder) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            file.unlink(missing_ok=True)
            return None
        _held.add(descriptor)
        return descriptor
    return None


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _taken(file: Path, holder: str) -> RunDirectoryError:
    who = f"process {holder}" if holder else "another process"
    return RunDirectoryError(
        message(
            f"{file.parent}: another run is at work here; nothing was touched",
            got=f"{file.name} is held by {who}{', which is this one' if holder == str(os.getpid()) else ''}",
            expected="one run a directory at a time",
            fix="wait for it or end it, or name another directory",
        )
    )
