"""The run directory: what a run leaves on disk, and the care taken when it is written.

    runs/digits/
      config.json         the whole experiment; `from_json` builds the same trainer again
      config.200.json     the config used up to step 200, where a resume changed it
      environment.json    versions, devices, seed, command line, git commit: facts of the first start
      metrics.jsonl       one result row a line (`train/_rows.py`)
      metrics.1.jsonl     the rows of an earlier start, where a later one began again at step 0
      tensorboard/        the same rows as TensorBoard events
      checkpoints/        states to resume from (`train/_checkpoint.py`)
      profile/            traces, where `Trainer.profile` was told this directory
      .lock               there while a run is at work (`train/_lock.py`)

`config.json` makes a directory a run directory. It is written last, and like every file here by `write_atomically`:
to a temporary file first, which then takes the name. So a run killed at any moment leaves either no run or a whole
one, never half a file. A directory that holds somebody's other files is refused instead of being mixed with ours.

Opening costs nothing and makes nothing; only `create` touches the disk.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, final

import jax

from equikd.errors import EquikdError, listing, message

PACKAGES = ("equikd", "jax", "jaxlib", "equinox", "optax", "numpy", "jaxtyping")
GIT_SECONDS = 5.0  # a repository on a hanging network disk must not hold up the run


class RunDirectoryError(EquikdError):
    """A run directory cannot be made, holds something else, or what it holds is broken."""


def write_atomically(path: Path, data: bytes) -> None:
    """Puts `data` under the name `path`: a reader, or a crash at any moment, sees the old file or the new one, whole.

    Args:
        path: the file; its directory must exist.
        data: its whole new contents.

    Raises:
        OSError: as the operating system has it; the old file is then untouched and no temporary file is left.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(Path(folder) / "a.txt", b"new")
        ...     [(file.name, file.read_bytes()) for file in Path(folder).iterdir()]
        [('a.txt', b'new')]
    """
    temporary = path.with_name(f".{path.name}.tmp")  # a fixed name: what a killed run left behind is overwritten
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before the rename: else a power cut may leave the new name on an empty file
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every system lets a directory be opened
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_sizes(folder: Path) -> dict[str, int]:
    """Path below a folder -> bytes, of all its files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


@final
@dataclass(frozen=True)
class RunDirectory:
    r"""One run's directory; made by `RunDirectory.open(path)`.

    Attributes:
        path: absolute; nothing needs to exist there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = RunDirectory.open(folder + "/runs/digits")
        ...     before = run.exists
        ...     run.create('{"seed": 0}', environment_facts(seed=0))
        ...     before, run.exists, run.config_text(), run.metrics.name
        (False, True, '{\n  "seed": 0\n}\n', 'metrics.jsonl')
    """

    path: Path

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """The run directory at `path`, which may not exist yet; makes nothing.

        Args:
            path: a local directory; `~` is the home directory, and a later change of the working directory does not
                move it.

        Raises:
            RunDirectoryError: `path` is an address such as `gs://...`.
        """
        text = os.fspath(path)
        if "://" in text:  # as a local path it would become a directory named "gs:"
            raise RunDirectoryError(
                message(
                    f"{text}: a run directory is a local directory",
                    expected="a path of this machine, such as runs/digits",
                    fix="give a local (or mounted) directory and copy it afterwards",
                )
            )
        return cls(Path(text).expanduser().absolute())

    @property
    def config(self) -> Path:
        """The file with the experiment as JSON."""
        return self.path / "config.json"

    @property
    def environment(self) -> Path:
        """The file with the facts of `environment_facts`."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """The file with the result rows."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def profiles(self) -> Path:
        """The directory of the profiler's traces."""
        return self.path / "profile"

    @property
    def exists(self) -> bool:
        """Whether a run lives here, that is, whether there is a config.json."""
        try:
            return self.config.is_file()
        except OSError as error:  # a parent that may not be entered
            raise self._failure("cannot be read", error) from error

    def config_text(self) -> str:
        """The JSON text of config.json.

        Raises:
            RunDirectoryError: there is none, or it cannot be read.
        """
        try:
            return self.config.read_text("utf-8")
        except FileNotFoundError as error:
            found = sorted(file.name for file in self.path.iterdir()) if self.path.is_dir() else None
            raise RunDirectoryError(
                message(
                    f"{self.path}: no run here",
                    got="no such directory" if found is None else f"holds {listing(found, 8) or 'nothing'}",
                    expected="a directory with a config.json, as training leaves it",
                    fix="check the path, or train with this directory first",
                )
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise self._failure("config.json cannot be read", error) from error

    def check(self) -> None:
        """Refuses, before anything expensive, a place where `create` would fail; makes nothing.

        Raises:
            RunDirectoryError: the path or one above it is a file, the directory holds other files and no config.json
                of a trainer, that one is broken, or nothing may be written there.
        """
        try:
            self._check()
        except OSError as error:
            raise self._failure("cannot be used as a run directory", error) from error

    def _check(self) -> None:
        nearest = next(place for place in (self.path, *self.path.parents) if place.exists())
        if not nearest.is_dir():
            raise RunDirectoryError(
                message(
                    f"{self.path}: cannot be a run directory",
                    got=f"{nearest} is a file",
                    expected="a new path, an empty directory, or a run directory",
                    fix="name another directory, or move the file away",
                )
            )
        if nearest == self.path and not self.exists:
            # Hidden files do not count: .DS_Store, .gitkeep, and our own temporary files. Nor do the file that a
            # creation killed half-way may have left, and the traces of a profile.
            ours = (self.environment.name, self.profiles.name)
            names = (file.name for file in self.path.iterdir())
            others = sorted(name for name in names if not name.startswith(".") and name not in ours)
            if others:
                raise RunDirectoryError(
                    message(
                        f"{self.path}: not a run directory, and not empty",
                        got=f"no config.json, but {listing(others, 5)}",
                        expected="a new path, an empty directory, or a run directory (with config.json)",
                        fix=f"name a directory of its own, such as {self.path / 'run-1'}, or move these files away",
                    )
                )
        if nearest == self.path and self.exists:
            self._check_config()
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise RunDirectoryError(
                message(
                    f"{self.path}: nothing may be written here",
                    got=f"no permission to write in {nearest}",
                    fix="name a directory that you may write to, or change its permissions",
                )
            )

    def _check_config(self) -> None:
        """Refuses a config.json that training did not write: somebody else's, or one that was damaged since."""
        try:
            plain = json.loads(self.config_text())
        except (ValueError, RecursionError) as error:
            raise RunDirectoryError(
                message(
                    f"{self.path}: not a run directory, or its config.json is broken",
                    got=f"config.json is no JSON: {str(error) or type(error).__name__}"[:300],
                    expected="the experiment as JSON, as training leaves it",
                    fix="restore the file, or name another directory; nothing here was touched",
                )
            ) from error
        if not isinstance(plain, dict) or not {"__format__", "__qualname__", "num_steps"} <= plain.keys():
            raise RunDirectoryError(
                message(
                    f"{self.path}: not a run directory, and not empty",
                    got="a config.json that is no trainer's",
                    expected="a new path, an empty directory, or a run directory (whose config.json is a trainer's)",
                    fix=f"name a directory of its own, such as {self.path / 'run-1'}, or move the file away",
                )
            )

    def create(self, config_text: str, environment: dict[str, Any]) -> None:
        """Makes the directory (and its parents) with config.json and environment.json.

        Args:
            config_text: the experiment as JSON; written indented, its keys in the order given.
            environment: facts that JSON can hold, such as `environment_facts` gives; what it cannot hold is written
                as text.

        Raises:
            RunDirectoryError: what `check` refuses; a run lives here already; the disk refuses.
        """
        facts = json.dumps(environment, indent=2, ensure_ascii=False, default=str) + "\n"
        config = _pretty(config_text)
        if self.exists:
            raise RunDirectoryError(
                message(
                    f"{self.path}: holds a run already",
                    got="a config.json",
                    expected="a new path or an empty directory",
                    fix="resume that run, or name another directory",
                )
            )
        self.check()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.environment, _utf8(facts))
            write_atomically(self.config, config)  # last: it declares the directory complete
        except OSError as error:
            raise self._failure("cannot be made a run directory", error) from error

    def undo(self) -> None:
        """Takes back a `create`, where the start that made it fails before its first step."""
        self.config.unlink(missing_ok=True)  # first: without it the directory is no run
        self.environment.unlink(missing_ok=True)
        self.metrics.unlink(missing_ok=True)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)

    def update_config(self, config_text: str, step: int) -> None:
        """Replaces config.json where a resume at `step` changed the experiment, and keeps the old one.

        The old config becomes `config.<step>.json`: what the run used up to that step. When a resume at the same step
        changed it before, the first is kept, since what the later one trained was lost with it. Equal text changes
        nothing.

        Args:
            config_text: the experiment as JSON, as in `create`.
            step: the step of the checkpoint from which the run goes on.

        Raises:
            RunDirectoryError: there is no run here; the disk refuses.
        """
        old, new = self.config_text().encode("utf-8"), _pretty(config_text)
        if old == new:
            return
        kept = self.path / f"config.{step}.json"
        try:
            if not kept.exists():
                write_atomically(kept, old)
            write_atomically(self.config, new)
        except OSError as error:
            raise self._failure("config.json cannot be replaced", error) from error

    def _failure(self, what: str, error: Exception) -> RunDirectoryError:
        return RunDirectoryError(
            message(
                f"{self.path}: {what}",
                got=str(error) or type(error).__name__,
                fix="check the disk and the permissions, or name another directory",
            )
        )


def _pretty(config_text: str) -> bytes:
    # Reading and writing again is exact: Python's JSON keeps the order of keys, floats to the bit, nan, and big ints.
    return _utf8(json.dumps(json.loads(config_text), indent=2, ensure_ascii=False) + "\n")


def _utf8(text: str) -> bytes:
    # A lone surrogate has no UTF-8 form; the backslash form is at the same time its escape in JSON.
    return text.encode("utf-8", "backslashreplace")


def environment_facts(seed: int) -> dict[str, Any]:
    """What one needs to know to repeat a run elsewhere. A fact that cannot be had is None; nothing here fails a run.

    Args:
        seed: the run's seed.

    Returns:
        Plain data: `started` (ISO, UTC), `command` (argv), `directory`, `seed`, `python`, `platform`, `packages`
        {name: version}, `devices` [{platform, kind, count}] over all processes, `processes`, and `git` {commit,
        dirty} of the current working directory (None outside a repository). `dirty` looks at tracked files only,
        since a run directory inside the repository is itself untracked.

    Example:
        >>> facts = environment_facts(seed=3)
        >>> facts["seed"], sorted(facts["packages"])
        (3, ['equikd', 'equinox', 'jax', 'jaxlib', 'jaxtyping', 'numpy', 'optax'])
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "directory": _attempt(lambda: str(Path.cwd())),
        "seed": seed,
        "python": platform.python_version(),
        "platform": _attempt(platform.platform),
        "packages": {name: _attempt(importlib.metadata.version, name) for name in PACKAGES},
        "devices": _attempt(_devices),
        "processes": _attempt(jax.process_count),
        "git": _attempt(_git_facts),
    }


def _attempt(fact: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return fact(*arguments)
    except Exception:
        return None


def _devices() -> list[dict[str, Any]]:
    counts = Counter((device.platform, device.device_kind) for device in jax.devices())
    return [{"platform": name, "kind": kind, "count": count} for (name, kind), count in counts.items()]


def _git_facts() -> dict[str, Any]:
    commit = _git("rev-parse", "HEAD").strip()
    return {"commit": commit, "dirty": _attempt(lambda: bool(_git("status", "--porcelain", "--untracked-files=no")))}


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments],
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=GIT_SECONDS,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # only look: take no lock that a user's own git would trip over
    ).stdout
