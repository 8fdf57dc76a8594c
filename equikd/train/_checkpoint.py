"""Checkpoints: everything that a run needs to go on, in a directory that never holds half of one.

    checkpoints/
      100/
        arrays/            an orbax checkpoint: {"state.model.layers[0].weight": array, ...}
        checkpoint.json    format, facts, and of every leaf its name, dtype and shape
      200/
      300.orbax-checkpoint-tmp/    being written, or left by a killed run; never counts

`save` copies the leaves to the host, which is all that the loop waits for, and a thread writes them. A step appears
under its number by one rename, after everything in it is on disk; only then are older ones removed, also by a rename
first. So whatever is killed when, each number names a whole checkpoint. An error in the thread is kept, and raised by
the next `save`, `wait` or `close`.

A directory holds one line of steps. A store continues the line that it restored, or begins one in an empty directory:

- saving the step that this store saved or restored is nothing to do: it is the same step of the same run;
- after `restore(100)`, steps beyond 100 are a line that was left; they give way when the next step is published;
- a store that restored nothing does not add to steps that are already there.

Anyone can read the arrays without equikd: `orbax.checkpoint.PyTreeCheckpointer().restore(".../100/arrays")`. Where
orbax cannot hold a leaf, `checkpoint.json` has it: an empty array is only its dtype and shape, a dtype that orbax does
not know is stored as the bytes of each value, a PRNG key as its raw integers, an unprintable name as a number.

What it costs: the loop waits for one copy (0.5 ms for 30 small leaves), and the thread needs about 10 ms and 0.5 ms for
each leaf, most of it orbax's, in which it competes with the loop for the interpreter.
"""

import contextlib
import json
import logging
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, final

import jax
import numpy as np

from equikd.errors import CheckpointError, listing, message
from equikd.train._directory import file_sizes, write_atomically
from equikd.train._leaves import Entry, cut, differences, entry_of, from_host, named, to_host

FORMAT = 1
_ARRAYS, _DOCUMENT = "arrays", "checkpoint.json"
_UNFINISHED = ".orbax-checkpoint-tmp"  # orbax too takes such a directory for an unfinished checkpoint
_LEFTOVER = re.compile(r"\d+(\.removed)?" + re.escape(_UNFINISHED))
T = TypeVar("T")


class _NotRemoved(Exception):
    """A step is published, but older ones could not be removed."""


class _Pending(NamedTuple):
    step: int
    before: int | None
    done: "Future[None]"


@final
class CheckpointStore:
    """The checkpoints of one run directory: a host object that saves in the background and restores exactly.

    Close it, or use it in a `with`: a save that is still being written when the interpreter exits is lost.

    Args:
        directory: where the steps lie; made by the first save.
        keep: how many of the newest steps stay, at least 1.

    Raises:
        CheckpointError: `keep` is less than 1.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, CheckpointStore(Path(folder), keep=2) as store:
        ...     for step in (1, 2, 3):
        ...         store.save(step, {"state": {"w": np.full(2, step)}}, {"epoch": 0})
        ...     store.wait()
        ...     store.steps(), store.restore(3, {"state": {"w": np.zeros(2, int)}})
        ((2, 3), ({'state': {'w': array([3, 3])}}, {'epoch': 0}))
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        if type(keep) is not int or keep < 1:
            what = "keep: a run needs at least one checkpoint"
            raise CheckpointError(message(what, got=repr(keep), expected="an int >= 1"))
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._worker = ThreadPoolExecutor(1, "equikd-checkpoint")
        self._pending: _Pending | None = None
        self._position: int | None = None  # the newest step of the line that this store continues
        self._own: set[int] = set()
        self._names: tuple[Any, tuple[str, ...]] | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(self, step: int, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Copies all leaves to the host and writes them in the background; the caller may then donate the buffers.

        Waits for the save before this one, so at most one copy of the arrays is held on the host.

        Args:
            step: the number of updates made; larger than those saved before.
            arrays: `{name: pytree of arrays}`: JAX arrays (sharded ones too, PRNG keys too) or numpy ones, any shape;
                of a module, `eqx.filter(module, eqx.is_array)`.
            facts: JSON: what is no array (the data position, the config's hash). Non-finite floats are allowed.

        Raises:
            CheckpointError: the save before this one failed (this one is then not begun); leaves that are no arrays;
                facts that are no JSON; a step that does not continue the directory's line. The store stays usable.
        """
        self._settle()
        step = operator.index(step)
        if step in self._own:
            return
        before = self._position
        self._check_line(step)
        host, keys = to_host(self._name(dict(arrays)))
        text = _facts_text(step, facts)
        done = self._worker.submit(_publish, self._directory, step, host, keys, text, self._keep)
        self._pending, self._position = _Pending(step, before, done), step
        self._own.add(step)

    def wait(self) -> None:
        """Returns when the last save is durable.

        Raises:
            CheckpointError: it failed; its cause is the error of the thread.
        """
        self._settle()

    def close(self) -> None:
        """`wait`, and end the thread. Nothing can be saved after it; calling it again does nothing.

        Raises:
            CheckpointError: the last save failed.
        """
        self._closed = True
        try:
            self._settle()
        finally:
            self._worker.shutdown()

    def steps(self) -> tuple[int, ...]:
        """The steps that can be restored, in order; unfinished ones are not among them."""
        return _steps(self._directory)

    def latest(self) -> int | None:
        """The newest step that can be restored, or None."""
        return max(self.steps(), default=None)

    def read_facts(self, step: int) -> dict[str, Any]:
        """The facts of a step, without reading its arrays or importing orbax.

        Raises:
            CheckpointError: there is no such step, or it is broken.
        """
        return self._read_document(step)["facts"]

    def restore(self, step: int, template: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays and facts of a step; this store then continues from it.

        Args:
            step: one of `steps()`.
            template: `{name: pytree}` of arrays or `jax.ShapeDtypeStruct`s (`jax.eval_shape` gives them).

        Returns:
            The same trees with numpy arrays as leaves, to be placed by the caller, except PRNG keys, which are JAX
            arrays; and the facts. A numpy array has no weak type: an array that was weakly typed comes back strong.

        Raises:
            CheckpointError: no such step; leaves missing, extra, or of another shape or dtype, all at once; files that
                cannot be read, with the cause.
        """
        self._settle()
        document = self._read_document(step)
        treedef = jax.tree_util.tree_structure(dict(template))
        wanted = named(dict(template))
        wrong = [f"{path}: {type(leaf).__name__}" for path, leaf in wanted.items() if not hasattr(leaf, "dtype")]
        if wrong:
            raise CheckpointError(cut("the template holds leaves that are no arrays", wrong))
        entries = document["leaves"]
        lines = differences(entries, {path: entry_of(leaf) for path, leaf in wanted.items()}, "checkpoint")
        if lines:
            what = f"checkpoint {step} does not fit the template: {len(lines)} leaves differ"
            fix = "restore with the model and optimizer that were saved"
            raise CheckpointError(cut(what, lines, where=str(self._directory), fix=fix))
        arrays = self._read_arrays(step, entries, document.get("files", {}))
        self._position, self._own = step, {step}
        return jax.tree_util.tree_unflatten(treedef, [arrays[path] for path in wanted]), document["facts"]

    def _name(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """`named`, which a loop that saves the same structure again and again pays for once."""
        leaves, treedef = jax.tree_util.tree_flatten(arrays)
        if self._names is None or self._names[0] != treedef:
            self._names = treedef, tuple(named(arrays))
        return dict(zip(self._names[1], leaves, strict=True))

    def _settle(self) -> None:
        """Waits for the save in progress and raises its error, once."""
        if self._pending is None:
            return
        wait_for([self._pending.done])  # an interrupt here leaves the save pending, and so its error to come
        (step, before, done), self._pending = self._pending, None
        error = done.exception()
        if isinstance(error, _NotRemoved):
            what = f"checkpoint {step} is saved, but older ones could not be removed"
            raise CheckpointError(message(what, where=str(self._directory), got=_spell(error.__cause__))) from error
        if error is not None:
            self._position = before
            self._own.discard(step)
            what, fix = f"checkpoint {step} was not saved", "mend the cause and save again; older ones are untouched"
            raise CheckpointError(message(what, where=str(self._directory), got=_spell(error), fix=fix)) from error

    def _check_line(self, step: int) -> None:
        """Refuses a step that would mix two runs, or that would be removed at once as the oldest."""
        if self._closed:
            raise CheckpointError(message(f"checkpoint {step}: the store is closed"))
        if step < 0:
            raise CheckpointError(message("a step is not negative", got=str(step)))
        where = str(self._directory)
        if self._position is None and (present := self.steps()):
            what = f"checkpoint {step}: the directory holds steps that this run did not make"
            fix = f"restore step {present[-1]} first, or use another directory"
            raise CheckpointError(message(what, where=where, got=f"steps {listing(present)}", fix=fix))
        if self._position is not None and step <= self._position:
            raise CheckpointError(message("steps must grow", where=where, got=f"{step} after {self._position}"))

    def _read_document(self, step: int) -> dict[str, Any]:
        path = self._directory / str(step) / _DOCUMENT
        try:
            document = json.loads(path.read_text("utf-8"))
            version = document["format"]
        except FileNotFoundError:
            what, expected = f"there is no checkpoint {step}", f"one of: {listing(self.steps()) or 'none'}"
            raise CheckpointError(message(what, where=str(self._directory), expected=expected)) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _broken(step, path, error) from error
        if version != FORMAT:
            what, fix = f"checkpoint {step} has an unknown format", "read it with the version of equikd that wrote it"
            raise CheckpointError(message(what, where=str(path), got=repr(version), expected=str(FORMAT), fix=fix))
        if not _is_document(document):
            raise _broken(step, path, ValueError(f"this is no {_DOCUMENT} as equikd writes it"))
        return document

    def _read_arrays(self, step: int, entries: Mapping[str, Entry], files: Mapping[str, int]) -> dict[str, Any]:
        path = self._directory / str(step) / _ARRAYS
        try:
            # Before orbax reads: where one of its reads fails, the others go on and complain of a loop that is gone.
            damaged = files.items() - file_sizes(path.parent).items()
            if damaged:
                raise OSError(f"missing or cut short: {listing(sorted(name for name, _ in damaged), 4)}")
            stored = _in_thread(lambda: _read(path)) if any(0 not in e["shape"] for e in entries.values()) else {}
            return {name: from_host(_load(stored, name, entry), entry) for name, entry in entries.items()}
        except Exception as error:  # whatever orbax, tensorstore and the file system raise for broken files
            raise _broken(step, path, error) from error


def _spell(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


def _broken(step: int, path: Path, error: BaseException) -> CheckpointError:
    what = f"checkpoint {step} cannot be read"
    return CheckpointError(message(what, where=str(path), got=_spell(error), fix="restore an older step"))


def _is_document(plain: dict[str, Any]) -> bool:
    """Whether what checkpoint.json holds has the form that `_publish` gives it."""
    facts, leaves = plain.get("facts"), plain.get("leaves")
    is_entry = lambda e: isinstance(e, dict) and isinstance(e.get("dtype"), str) and isinstance(e.get("shape"), list)
    return isinstance(facts, dict) and isinstance(leaves, dict) and all(map(is_entry, leaves.values()))


def _steps(directory: Path) -> tuple[int, ...]:
    """The numbers of whole checkpoints. What has a number is whole; the document tells it from somebody else's."""
    if not directory.is_dir():
        return ()
    names = (entry.name for entry in os.scandir(directory) if re.fullmatch(r"0|[1-9]\d*", entry.name))
    return tuple(sorted(int(name) for name in names if (directory / name / _DOCUMENT).is_file()))


def _facts_text(step: int, facts: Mapping[str, Any]) -> str:
    """The facts as JSON, at once: the caller may then change them, and is told at its own line what is no JSON."""
    try:
        return json.dumps(dict(facts))
    except (TypeError, ValueError) as error:
        raise CheckpointError(message(f"the facts of checkpoint {step} are not JSON", got=str(error))) from error


def _storable(arrays: dict[str, np.ndarray], keys: dict[str, Entry]) -> tuple[dict[str, np.ndarray], dict[str, Entry]]:
    """Arrays that orbax can hold, and of every leaf an entry, which says how the array stored differs from it."""
    stored, entries = {}, {}
    for number, (path, array) in enumerate(arrays.items()):
        entries[path] = entry = keys.get(path) or entry_of(array)
        if array.size == 0:
            continue
        name = path if path.isprintable() and path else f"#{number}"
        if name != path:
            entry["name"] = name
        if array.dtype.kind == "V" and array.dtype.name != "bfloat16":
            entry["bytes"] = True
        stored[name] = array.view(f"u{array.dtype.itemsize}") if "bytes" in entry else array
    return stored, entries


def _load(stored: Mapping[str, np.ndarray], path: str, entry: Entry) -> np.ndarray:
    """One array as it was saved: the inverse of `_storable`."""
    name = entry.get("name", path)
    if name not in stored:  # an empty one
        raw = () if "key" not in entry else np.shape(jax.random.key_data(jax.random.key(0, impl=entry["key"])))
        return np.zeros((*entry["shape"], *raw), np.uint32 if "key" in entry else np.dtype(entry["dtype"]))
    array = np.asarray(stored[name])
    array = array.view(np.dtype(entry["dtype"])) if "bytes" in entry else array
    if "key" not in entry and entry_of(array) != {"dtype": entry["dtype"], "shape": entry["shape"]}:
        raise ValueError(f"{path} is {entry_of(array)}, which {_DOCUMENT} does not say")
    return array


def _publish(
    directory: Path, step: int, host: dict[str, np.ndarray], keys: dict[str, Entry], facts: str, keep: int
) -> None:
    """Writes a step beside its place and gives it its name when it is whole; then removes what is not kept."""
    arrays, entries = _storable(host, keys)
    directory.mkdir(parents=True, exist_ok=True)
    for entry in list(os.scandir(directory)):
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry.path)
    temporary = directory / f"{step}{_UNFINISHED}"
    try:
        temporary.mkdir()
        if arrays:
            _write(temporary / _ARRAYS, arrays)
        leaves, files = json.dumps(entries), json.dumps(file_sizes(temporary))
        document = f'{{"format": {FORMAT}, "step": {step}, "facts": {facts}, "leaves": {leaves}, "files": {files}}}'
        write_atomically(temporary / _DOCUMENT, document.encode())
        # Steps from here on belong to a line that a restore has left. They go first: in the other order a run killed
        # between would resume from the abandoned line.
        for abandoned in (old for old in _steps(directory) if old >= step):
            _remove(directory, abandoned)
        temporary.rename(directory / str(step))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        for old in _steps(directory)[:-keep]:
            _remove(directory, old)
    except OSError as error:
        raise _NotRemoved from error


def _remove(directory: Path, step: int) -> None:
    """Takes the name away first: a step whose removal is interrupted must not count."""
    doomed = directory / f"{step}.removed{_UNFINISHED}"
    (directory / str(step)).rename(doomed)
    shutil.rmtree(doomed)


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    import orbax.checkpoint

    with _quiet(), contextlib.closing(orbax.checkpoint.PyTreeCheckpointer()) as checkpointer:
        checkpointer.save(path, args=orbax.checkpoint.args.PyTreeSave(arrays))


def _read(path: Path) -> dict[str, np.ndarray]:
    import orbax.checkpoint

    with _quiet(), contextlib.closing(orbax.checkpoint.PyTreeCheckpointer()) as checkpointer:
        return checkpointer.restore(path)


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
