"""Checkpoints: everything that a run needs to go on, in a directory that never holds half of one.

    checkpoints/
      100/
        arrays/            an orbax checkpoint: {"state.model.layers[0].weight": array, ...}
        checkpoint.json    format, facts, and of every leaf its name, dtype and shape
      200/
      constant/            what no step changes, once for all, where that is worth it (`_constant.py`)
      300.orbax-checkpoint-tmp/    being written, or left by a killed run; never counts

`save` copies the leaves to the host, which is all that the loop waits for, and a thread writes them. A step appears
under its number by one rename, after everything in it is on disk, and what it needs beside it; only then are older ones
removed, also by a rename first. So whatever is killed when, each number names a whole checkpoint. An error in the
thread is kept, and raised by the next `save`, `wait` or `close`.

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
import operator
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import jax
import numpy as np

from equikd.errors import CheckpointError, listing, message
from equikd.train._checkpoint_files import (
    ARRAYS,
    CONSTANT,
    CONSTANT_DOCUMENT,
    DOCUMENT,
    FORMAT,
    UNFINISHED,
    WITH_CONSTANT,
    broken,
    broken_constant,
    check_constant,
    check_files,
    constant_leaves,
    constant_of,
    read_document,
    spell_error,
    steps_in,
)
from equikd.train._constant import Constant, Remembered, digest_of, remove, sweep, tidy
from equikd.train._directory import file_sizes, write_atomically
from equikd.train._leaves import Entry, cut, differences, entry_of, from_host, loaded, named, storable, to_host
from equikd.train._orbax import read_stored, write_stored

_LEFTOVER = re.compile(r"\d+(\.removed)?" + re.escape(UNFINISHED))


class _NotRemoved(Exception):
    """A step is published, but older ones could not be removed."""


class _Pending(NamedTuple):
    step: int
    before: int | None
    constant: Remembered
    done: "Future[Constant | None]"


_OnHost = tuple[dict[str, np.ndarray], dict[str, Entry]]
"""Leaves as `to_host` gives them."""


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
        self._names: dict[str, tuple[Any, tuple[str, ...]]] = {}
        self._constant = Remembered({})
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(
        self, step: int, arrays: Mapping[str, Any], facts: Mapping[str, Any], constant: Mapping[str, Any] | None = None
    ) -> None:
        """Copies all leaves to the host and writes them in the background; the caller may then donate the buffers.

        Waits for the save before this one, so at most one copy of the arrays is held on the host.

        Args:
            step: the number of updates made; larger than those saved before.
            arrays: `{name: pytree of arrays}`: JAX arrays (sharded ones too, PRNG keys too) or numpy ones, any shape;
                of a module, `eqx.filter(module, eqx.is_array)`.
            facts: JSON: what is no array (the data position, the config's hash). Non-finite floats are allowed.
            constant: arrays that are expected to be the same at all steps, as `arrays`, under other paths: of a tree,
                both parts of an `eqx.partition`. They are written where they are not there yet; JAX arrays that this
                store has saved before are not even copied. A checkpoint holds both, under their paths.

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
        changing, fixed = self._name("arrays", dict(arrays)), self._name("constant", dict(constant or {}))
        doubled = sorted(changing.keys() & fixed.keys())
        if doubled:
            raise CheckpointError(cut("leaves are both constant and not", doubled))
        known = self._constant.find(self._directory, fixed)
        unknown = to_host(fixed) if known is None and fixed else known
        host = to_host(changing)
        text = _facts_text(step, facts)
        done = self._worker.submit(_publish, self._directory, step, host, unknown, text, self._keep)
        remembered = self._constant if known is not None else Remembered(fixed)
        self._pending, self._position = _Pending(step, before, remembered, done), step
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
        return steps_in(self._directory)

    def latest(self) -> int | None:
        """The newest step that can be restored, or None."""
        return max(self.steps(), default=None)

    def read_facts(self, step: int) -> dict[str, Any]:
        """The facts of a step, without reading its arrays or importing orbax.

        Raises:
            CheckpointError: there is no such step, or it is broken.
        """
        return read_document(self._directory / str(step))["facts"]

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
        document = read_document(self._directory / str(step))
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
        arrays = read_arrays(self._directory / str(step), document)
        self._position, self._own = step, {step}
        return jax.tree_util.tree_unflatten(treedef, [arrays[path] for path in wanted]), document["facts"]

    def _name(self, role: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """`named`, which a loop that saves the same structure again and again pays for once."""
        leaves, treedef = jax.tree_util.tree_flatten(arrays)
        if role not in self._names or self._names[role][0] != treedef:
            self._names[role] = treedef, tuple(named(arrays))
        return dict(zip(self._names[role][1], leaves, strict=True))

    def _settle(self) -> None:
        """Waits for the save in progress and raises its error, once."""
        if self._pending is None:
            return
        wait_for([self._pending.done])  # an interrupt here leaves the save pending, and so its error to come
        (step, before, constant, done), self._pending = self._pending, None
        error = done.exception()
        if error is None and (written := done.result()) is not None:
            self._constant, constant.written = constant, written
        if isinstance(error, _NotRemoved):
            what = f"checkpoint {step} is saved, but older ones could not be removed"
            raise CheckpointError(
                message(what, where=str(self._directory), got=spell_error(error.__cause__))
            ) from error
        if error is not None:
            self._position = before
            self._own.discard(step)
            what, fix = f"checkpoint {step} was not saved", "mend the cause and save again; older ones are untouched"
            raise CheckpointError(message(what, where=str(self._directory), got=spell_error(error), fix=fix)) from error

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


def read_arrays(path: Path, document: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Arrays of one checkpoint: numpy arrays, PRNG keys as JAX arrays.

    Args:
        path: the directory of the checkpoint.
        document: what `read_document` gave.
        names: of which leaves; None: of all. Others are not read.

    Raises:
        CheckpointError: the files are damaged.
    """
    # Before orbax reads: where one of its reads fails, the others go on and complain of a loop that is gone.
    check_files(path, document)
    entries = {name: entry for name, entry in document["leaves"].items() if names is None or name in names}
    fixed = {name: entry for name, entry in constant_leaves(document).items() if name in entries}
    folder, raw = constant_of(path, document), {}
    if folder is not None:
        try:
            raw = _loaded(folder / ARRAYS, fixed)
            if len(fixed) == len(constant_leaves(document)) and digest_of(raw, fixed) != folder.name:
                raise ValueError("the arrays are not those that the name of the directory stands for")
        except Exception as error:
            raise broken_constant(path, folder, error) from error
    try:
        raw |= _loaded(path / ARRAYS, {name: entry for name, entry in entries.items() if name not in fixed})
        return {name: from_host(raw[name], entry) for name, entry in entries.items()}
    except Exception as error:  # whatever orbax, tensorstore and the file system raise for broken files
        raise broken(path, path / ARRAYS, error) from error


def _loaded(path: Path, entries: Mapping[str, Entry]) -> dict[str, np.ndarray]:
    """Arrays of one orbax checkpoint as they were saved, PRNG keys as their raw integers."""
    wanted = [entry.get("name", name) for name, entry in entries.items() if 0 not in entry["shape"]]
    stored = read_stored(path, wanted)
    return {name: loaded(stored, name, entry) for name, entry in entries.items()}


def _facts_text(step: int, facts: Mapping[str, Any]) -> str:
    """The facts as JSON, at once: the caller may then change them, and is told at its own line what is no JSON."""
    try:
        return json.dumps(dict(facts))
    except (TypeError, ValueError) as error:
        raise CheckpointError(message(f"the facts of checkpoint {step} are not JSON", got=str(error))) from error


def _publish(
    directory: Path, step: int, host: _OnHost, constant: _OnHost | Constant | None, facts: str, keep: int
) -> Constant | None:
    """Writes a step beside its place and gives it its name when it is whole; then removes what is not kept."""
    arrays, entries = storable(*host)
    directory.mkdir(parents=True, exist_ok=True)
    tidy(directory, _LEFTOVER)
    tidy(directory / CONSTANT)
    if constant is not None and not isinstance(constant, Constant):
        constant = _constant(directory, constant)
    head = f'"format": {FORMAT}, "step": {step}, "facts": {facts}'
    if constant is not None:
        head = f'"format": {WITH_CONSTANT}, "step": {step}, "facts": {facts}, "constant": "{constant.name}"'
        entries |= {path: entry | {"constant": True} for path, entry in constant.entries.items()}
    with _unfinished(directory / str(step)) as temporary:
        _fill(temporary, arrays, DOCUMENT, head, entries)
        # Steps from here on belong to a line that a restore has left. They go first: in the other order a run killed
        # between would resume from the abandoned line.
        for abandoned in (old for old in steps_in(directory) if old >= step):
            _remove(directory, abandoned)
    try:
        for old in steps_in(directory)[:-keep]:
            _remove(directory, old)
        sweep(directory)
    except OSError as error:
        raise _NotRemoved from error
    return constant


def _constant(directory: Path, host: _OnHost) -> Constant:
    """The constant directory of these arrays; written where it is not there, or not whole."""
    arrays, entries = storable(*host)
    made = Constant(digest_of(host[0], entries), entries)
    folder = directory / CONSTANT / made.name
    try:
        check_constant(folder, entries)
    except Exception:  # absent, or damaged in whatever way
        folder.parent.mkdir(exist_ok=True)
        with _unfinished(folder) as temporary:
            _fill(temporary, arrays, CONSTANT_DOCUMENT, f'"format": {WITH_CONSTANT}', entries)
            if folder.exists():
                remove(folder)
    return made


@contextlib.contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """A directory to fill, which gets its name when all is in it, or goes away."""
    temporary = folder.with_name(folder.name + UNFINISHED)
    try:
        temporary.mkdir()
        yield temporary
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _fill(folder: Path, arrays: dict[str, np.ndarray], name: str, head: str, entries: dict[str, Entry]) -> None:
    """Writes arrays, and then the document that says what they are."""
    if arrays:
        write_stored(folder / ARRAYS, arrays)
    leaves, files = json.dumps(entries), json.dumps(file_sizes(folder))
    write_atomically(folder / name, f'{{{head}, "leaves": {leaves}, "files": {files}}}'.encode())


def _remove(directory: Path, step: int) -> None:
    remove(directory / str(step))
