r"""Where the numbers of a run go: writers, and the rows they are given.

A `Record` is one row of results: the training metrics of one interval, or one eval; and its summaries, which a writer
may leave alone. A *writer* is a config class with one method, `open(run)`, that gives back something open for this run:
`tick` after every dispatch, of one step or of many, `write` for every record, `flush` before a checkpoint, `close` at
the end. The loop speaks to one `Writers`, which passes everything on to all of them.

A writer of one's own takes ten lines; it is its own open writer where it holds nothing open:

    >>> @config
    ... class Best:
    ...     name: str = "accuracy"
    ...     def open(self, run): return self
    ...     def tick(self, step): pass
    ...     def write(self, record):
    ...         if record.metrics.get(self.name, 0) > 0.9: print(record.step, record.split, record.metrics[self.name])
    ...     def flush(self): pass
    ...     def close(self): pass
    >>> run = Run(workdir=None, config="{}", num_steps=1000, start_step=0)
    >>> with Writers.open([JsonLines(), Best()], run) as writers:
    ...     writers.write(Record(step=500, split="test", metrics={"accuracy": 0.975}, seconds=12.3))
    500 test 0.975

A resume starts at a checkpoint, and rows past it belong to steps that will be made again: each writer that keeps rows
drops them on `open`, so that an interrupted run leaves the same rows as an uninterrupted one. `flush` runs before a
checkpoint is published, so no row that a checkpoint vouches for can be missing.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, final

from equikd.config import config
from equikd.train._directory import RunDirectory
from equikd.train._rendering import rendered
from equikd.train._rows import Record as Record
from equikd.train._rows import keep_rows, line
from equikd.train._rows import read_records as read_records


@final
@dataclass(frozen=True)
class Run:
    """What a writer is told when it is opened.

    Attributes:
        workdir: the run directory; None where nothing is to be written to disk.
        config: the experiment as JSON text.
        num_steps: the step at which the run ends.
        start_step: the step at which this process starts: 0 for a new run, the checkpoint's step for a resumed one.
    """

    workdir: Path | None
    config: str
    num_steps: int
    start_step: int


class OpenWriter(Protocol):
    """A writer at work."""

    def tick(self, step: int) -> None:
        """`step` updates have been dispatched. Called after every dispatch: well under a microsecond, please."""

    def write(self, record: Record) -> None:
        """Takes one row."""

    def flush(self) -> None:
        """Puts every row written so far on the disk; a checkpoint is published right after."""

    def close(self) -> None:
        """Ends the work, also after an error; a second call does nothing."""


class Writer(Protocol):
    """Plain data that says where rows go; a config class."""

    def open(self, run: Run) -> OpenWriter:
        """Begins the work for one run. On a resume, drops rows with a step above `run.start_step`."""
        ...


@final
class Writers:
    """Many writers as one: passes on `tick`, `write`, `flush` and `close`, and closes all of them whatever happens.

    A writer that fails does not keep a row from the others. The first error is raised after all had their turn, with
    a note for each further one; an error from the `with` block always comes before one from closing.

    Example:
        >>> with Writers.open([], Run(workdir=None, config="{}", num_steps=1, start_step=0)) as writers:
        ...     writers.tick(1)
    """

    def __init__(self, writers: Sequence[OpenWriter]):
        self._writers = tuple(writers)
        self._ticks = tuple(writer.tick for writer in writers)  # looked up once: `tick` runs after every step

    @classmethod
    def open(cls, writers: Iterable[Writer], run: Run) -> Self:
        """Opens all of `writers`; where one fails, closes those that are open and raises its error."""
        opened: list[OpenWriter] = []
        try:
            for writer in writers:
                opened.append(writer.open(run))  # noqa: PERF401 (what is open before a failure must be known)
        except BaseException as error:
            cls(opened).__exit__(type(error), error, error.__traceback__)
            raise
        return cls(opened)

    def tick(self, step: int) -> None:
        """Says that `step` updates have been dispatched."""
        for tick in self._ticks:
            tick(step)

    def write(self, record: Record) -> None:
        """Gives one row to every writer."""
        _run_all([lambda writer=writer: writer.write(record) for writer in self._writers])

    def flush(self) -> None:
        """Has every writer put its rows on the disk."""
        _run_all([writer.flush for writer in self._writers])

    def close(self) -> None:
        """Closes every writer, last opened first; a second call does nothing."""
        writers, self._writers, self._ticks = self._writers, (), ()
        _run_all([writer.close for writer in reversed(writers)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"closing a writer failed as well: {failure!r}")


def _run_all(calls: Sequence[Callable[[], None]]) -> None:
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:  # a KeyboardInterrupt too waits until the others are closed
            errors.append(error)
    if errors:
        first = next((error for error in errors if not isinstance(error, Exception)), errors[0])
        for further in errors:
            if further is not first:
                first.add_note(f"a further writer failed: {further!r}")
        raise first


@final
class _Nothing:
    """The open writer of a run without a directory."""

    def tick(self, step: int) -> None: ...
    def write(self, record: Record) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@final
class _Appending:
    """A file that only grows, without a buffer: a `write` is one system call, and a kill tears at most the last one."""

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        self._closed = False

    def write(self, data: bytes) -> None:
        while data:  # a second turn comes only from a disk that is nearly full, and then raises the reason
            data = data[os.write(self._descriptor, data) :]

    def flush(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if not self._closed:
            self._closed = True  # first: a descriptor is never closed twice, whatever `close` raises
            os.close(self._descriptor)


@final
@config
class JsonLines:
    """Rows in `metrics.jsonl`, one JSON object a line; nothing without a run directory.

        {"step": 500, "split": "test", "metrics": {"accuracy": 0.975, "loss": 0.09}, "seconds": 12.3}

    Metrics are sorted by name, seconds rounded to milliseconds. JSON has no nan and no infinities: they are written
    as the strings "nan", "inf", "-inf", which `float` reads. `read_records` gives the rows back. Scalars alone are
    written: of images, texts and histograms nothing, so that a row that has no others has no metrics. Rows of training
    intervals also have `"speed": {"examples_per_second": 3200.0, "steps_per_second": 100.0}`.

    On a resume, rows past the checkpoint and a torn last line are removed; a run that starts at step 0 starts an empty
    file, and the rows of an earlier start are kept as `metrics.1.jsonl` (or the next free number).

    Raises:
        RunDirectoryError: on a resume, a line before the last one is no row; it names file and lines. The file cannot
            be read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Writers.open([JsonLines()], Run(Path(folder), "{}", num_steps=10, start_step=0)) as writers:
        ...         writers.write(Record(5, "train", {"loss": 0.5, "accuracy": float("nan")}, 1.25))
        ...     print((Path(folder) / "metrics.jsonl").read_text(), end="")
        {"step": 5, "split": "train", "metrics": {"accuracy": "nan", "loss": 0.5}, "seconds": 1.25}
    """

    def open(self, run: Run) -> OpenWriter:
        """Opens the file for appending, with the rows up to `run.start_step`."""
        if run.workdir is None:
            return _Nothing()
        path = RunDirectory.open(run.workdir).metrics
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_rows(path, run.start_step)
        return _OpenJsonLines(_Appending(path))


@final
class _OpenJsonLines:
    def __init__(self, file: _Appending):
        self._file = file

    def tick(self, step: int) -> None: ...

    def write(self, record: Record) -> None:
        self._file.write(line(record))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@final
@config
class TensorBoard:
    """Rows as TensorBoard events, one directory a split: `tensorboard --logdir runs`; nothing without a run directory.

    Events go to `tensorboard/<split>/` and a metric's tag is its name, so that `loss` of train and test are two
    curves of one chart. How fast training goes stands under `perf/`. Images, texts and histograms stand under their
    metric's name in dashboards of their own. The text of the config stands under the tag `config` of `train`. Events
    are on disk as soon as they are written. On a resume a restart mark makes TensorBoard drop the points past the
    checkpoint; the fast data server of newer versions drops them when the first new point of that curve arrives.
    """

    def open(self, run: Run) -> OpenWriter:
        """Opens the events of `train`, and of the splits that an earlier start of this run has left."""
        if run.workdir is None:
            return _Nothing()
        return _OpenTensorBoard(RunDirectory.open(run.workdir).path / "tensorboard", run)


@final
class _OpenTensorBoard:
    # Frames the events itself: tensorboardX's own writer passes them through a thread that its `flush` does not wait
    # for, and names files by the second, so that a quick resume overwrites the first start's file.

    def __init__(self, directory: Path, run: Run):
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import text

        messages: Any = event_pb2  # its classes are made when it is loaded; no type checker sees them
        self._event = messages.Event
        self._checksum: Callable[[bytes], int] = masked_crc32c
        self._directory = directory
        self._start_step = run.start_step
        self._restart = messages.SessionLog(status=messages.SessionLog.START)
        self._files: dict[str, _Appending] = {}
        earlier = [path.name for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
        for split in dict.fromkeys(["train", *sorted(earlier)]):
            self._file(split)
        fenced = f"```json\n{run.config}\n```"  # the text plugin reads Markdown
        self._append(self._file("train"), step=run.start_step, summary=text("config", fenced))

    def tick(self, step: int) -> None: ...

    def write(self, record: Record) -> None:
        values: list[dict[str, Any]]
        values = [{"tag": name, "simple_value": float(value)} for name, value in sorted(record.metrics.items())]
        values += [{"tag": f"perf/{name}", "simple_value": float(v)} for name, v in sorted(record.speed.items())]
        values += [value for name, summary in sorted(record.summaries.items()) for value in rendered(name, summary)]
        self._append(self._file(record.split), step=int(record.step), summary={"value": values})

    def flush(self) -> None:
        _run_all([file.flush for file in self._files.values()])

    def close(self) -> None:
        _run_all([file.close for file in self._files.values()])

    def _file(self, split: str) -> _Appending:
        if split in self._files:
            return self._files[split]
        directory = self._directory / split
        directory.mkdir(parents=True, exist_ok=True)
        # Readers take the files in the order of their names, and the restart mark must come after what it drops: the
        # count keeps that order, and apart, two starts within one second.
        count = len(list(directory.glob("*tfevents*")))
        path = directory / f"events.out.tfevents.{int(time.time()):010d}.{count:04d}.{socket.gethostname()}"
        file = self._files[split] = _Appending(path)
        self._append(file, file_version="brain.Event:2")
        # A restart at step s drops the points at s and after it. The checkpoint's own step stays, unless all is new.
        purge = self._start_step + 1 if self._start_step else 0
        self._append(file, step=purge, session_log=self._restart)
        return file

    def _append(self, file: _Appending, **fields: Any) -> None:
        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        frame = length + struct.pack("<I", self._checksum(length)) + data + struct.pack("<I", self._checksum(data))
        file.write(frame)
