"""Writers: rows survive kills and resumes exactly, TensorBoard reads them back, one failing writer harms no other."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from equikd.train import _writers
from equikd.train._directory import RunDirectoryError
from equikd.train._writers import JsonLines, Record, Run, TensorBoard, Writer, Writers, read_records


def run_in(workdir: Path | None, start_step: int = 0, config: str = "{}") -> Run:
    return Run(workdir=workdir, config=config, num_steps=1000, start_step=start_step)


def write(writer: Writer, workdir: Path, records: list[Record], start_step: int = 0) -> None:
    with Writers.open([writer], run_in(workdir, start_step)) as writers:
        for record in records:
            writers.write(record)


def rows(*steps: int, split: str = "train", offset: float = 0.0) -> list[Record]:
    return [Record(step, split, {"loss": step / 8 + offset, "accuracy": 0.5}, step / 10) for step in steps]


def same(a: list[Record], b: list[Record]) -> bool:
    return repr(a) == repr(b)  # nan equals nan here, and -0.0 is not 0.0


# ---- metrics.jsonl


def test_the_line_is_as_documented(tmp_path):
    record = Record(500, "test", {"loss": 0.09, "accuracy": 0.975}, 12.3)
    write(JsonLines(), tmp_path, [record])
    line = '{"step": 500, "split": "test", "metrics": {"accuracy": 0.975, "loss": 0.09}, "seconds": 12.3}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == line


def test_not_finite_values_are_strict_json(tmp_path):
    record = Record(1, "train", {"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0}, 0.0)
    write(JsonLines(), tmp_path, [record])

    def refuse(name):
        raise AssertionError(name)

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["metrics"] == {"a": "nan", "b": "inf", "c": "-inf", "d": -0.0}
    assert same(read_records(tmp_path / "metrics.jsonl"), [record])


names = st.text(st.characters(), max_size=5)
metrics = st.dictionaries(names, st.floats(), max_size=3).map(lambda values: dict(sorted(values.items())))
seconds = st.integers(0, 10**9).map(lambda milliseconds: milliseconds / 1000)
record_lists = st.lists(
    st.builds(Record, step=st.integers(0, 9), split=names, metrics=metrics, seconds=seconds), max_size=5
)


@given(records=record_lists)
def test_reading_undoes_writing(records, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    write(JsonLines(), workdir, records)
    assert same(read_records(workdir / "metrics.jsonl"), records)


@given(records=record_lists, start_step=st.integers(1, 9), data=st.data())
def test_a_resume_after_any_tear_keeps_the_whole_rows_up_to_its_step(records, start_step, data, tmp_path_factory):
    """Cut the file at any byte, resume at any step: what stays is what a run up to there would have written."""
    workdir = tmp_path_factory.mktemp("run")
    path = workdir / "metrics.jsonl"
    write(JsonLines(), workdir, records)
    whole = path.read_bytes()
    size = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:size])
    # A row is whole once its closing brace is there, with or without the newline.
    ends = [sum(len(line) for line in whole.splitlines(keepends=True)[: count + 1]) for count in range(len(records))]
    kept = [record for record, end in zip(records, ends, strict=True) if end - 1 <= size and record.step <= start_step]
    new = Record(start_step + 1, "train", {"loss": 1.0}, 1.0)
    write(JsonLines(), workdir, [new], start_step)
    assert same(read_records(path), [*kept, new])
    assert [file.name for file in workdir.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_starts_an_empty_file(tmp_path):
    write(JsonLines(), tmp_path, rows(0, 100))
    write(JsonLines(), tmp_path, rows(0))
    assert same(read_records(tmp_path / "metrics.jsonl"), [Record(0, "train", {"accuracy": 0.5, "loss": 0.0}, 0.0)])


def test_kept_lines_stay_as_they_are(tmp_path):
    """A resume removes lines and changes none, not even what somebody has added by hand."""
    path = tmp_path / "metrics.jsonl"
    line = '{"step":5,"split":"train","metrics":{"loss":1},"seconds":1,"note":"by hand"}\n'
    path.write_text(line)
    before = path.stat().st_ino
    write(JsonLines(), tmp_path, rows(10), start_step=5)
    assert path.read_text().startswith(line)
    assert path.stat().st_ino == before  # nothing to remove, so no second file either


def test_a_broken_line_in_the_middle_is_an_error(tmp_path, snapshot):
    path = tmp_path / "metrics.jsonl"
    write(JsonLines(), tmp_path, rows(100, 200, 300, 400))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:30] + b"\n" + lines[2] + b"[1]\n" + lines[3])
    broken = path.read_bytes()
    with pytest.raises(RunDirectoryError) as caught:
        write(JsonLines(), tmp_path, [], start_step=100)
    snapshot("broken_lines", str(caught.value).replace(str(tmp_path), "<tmp>"))
    assert path.read_bytes() == broken
    path.write_bytes(lines[0] + b"\n" + lines[1])
    with pytest.raises(RunDirectoryError) as caught:
        read_records(path)
    snapshot("broken_line", str(caught.value).replace(str(tmp_path), "<tmp>"))


def test_a_line_is_one_system_call(tmp_path, monkeypatch):
    calls, actual = [], os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: calls.append(data) or actual(descriptor, data))
    write(JsonLines(), tmp_path, rows(1, 2))
    assert b"".join(calls) == (tmp_path / "metrics.jsonl").read_bytes()
    assert len(calls) == 2


def test_a_short_write_is_finished(tmp_path, monkeypatch):
    actual = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: actual(descriptor, data[:7]))
    write(JsonLines(), tmp_path, rows(1, 2))
    assert [record.step for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2]


def test_flush_reaches_the_disk(tmp_path, monkeypatch):
    synced, actual = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino) or actual(file))
    with Writers.open([JsonLines(), TensorBoard()], run_in(tmp_path)) as writers:
        writers.write(rows(1)[0])
        writers.write(rows(1, split="test")[0])
        synced.clear()
        writers.flush()
        paths = [tmp_path / "metrics.jsonl", *(tmp_path / "tensorboard").glob("*/*")]
    assert sorted(synced) == sorted(path.stat().st_ino for path in paths)
    assert len(paths) == 3


CHILD = """
import os, signal, sys
from pathlib import Path
from equikd.train._writers import JsonLines, Record, Run, Writers
tear, write, step = int(sys.argv[2]), os.write, 0
def torn_write(descriptor, data):
    if step < 3:
        return write(descriptor, data)
    write(descriptor, data[:tear])
    os.kill(os.getpid(), signal.SIGKILL)
if tear:
    os.write = torn_write
with Writers.open([JsonLines()], Run(Path(sys.argv[1]), "{}", num_steps=10, start_step=0)) as writers:
    print("ready", flush=True)
    while True:
        step += 1
        writers.write(Record(step, "train", {"loss": 0.1}, 1.0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("tear", [0, 1, 30, -2, -1])
def test_a_kill_tears_at_most_the_last_line(tmp_path, tear):
    """Killed by -9: at 0 from outside at any moment, else in the middle of the third line, after so many bytes."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), str(tear)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    if not tear:
        time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    path = tmp_path / "metrics.jsonl"
    steps = [record.step for record in read_records(path)]
    assert steps == list(range(1, len(steps) + 1))
    if tear:
        assert len(steps) == (3 if tear == -1 else 2)  # only the newline is missing: the row is there
        assert not path.read_bytes().endswith(b"\n")
    write(JsonLines(), tmp_path, rows(3), start_step=2)
    assert [record.step for record in read_records(path)] == [1, 2, 3]
    assert path.read_bytes().count(b"\n") == 3


# ---- TensorBoard


def points(workdir: Path, split: str, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(workdir / "tensorboard" / split), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_the_rows_back(tmp_path):
    write(TensorBoard(), tmp_path, [*rows(100, 200), *rows(200, split="test", offset=1.0)])
    assert points(tmp_path, "train", "loss") == [(100, 12.5), (200, 25.0)]
    assert points(tmp_path, "test", "loss") == [(200, 26.0)]
    assert points(tmp_path, "test", "accuracy") == [(200, 0.5)]


def test_tensorboard_keeps_names_and_values_that_are_not_finite(tmp_path):
    record = Record(1, "train", {"losses/ce (top 5)": math.inf, "x": math.nan}, 0.0)
    write(TensorBoard(), tmp_path, [record])
    assert points(tmp_path, "train", "losses/ce (top 5)") == [(1, math.inf)]
    assert math.isnan(points(tmp_path, "train", "x")[0][1])


def test_tensorboard_shows_the_config_once(tmp_path):
    with Writers.open([TensorBoard()], run_in(tmp_path, config='{"seed": 0}')) as writers:
        writers.write(rows(1)[0])
    events = EventAccumulator(str(tmp_path / "tensorboard" / "train"))
    events.Reload()
    (tag,) = events.Tags()["tensors"]
    (event,) = events.Tensors(tag)
    assert tag.startswith("config")
    assert event.tensor_proto.string_val[0].decode() == '```json\n{"seed": 0}\n```'


@pytest.mark.parametrize("torn", [0, 5])
def test_tensorboard_drops_what_a_resume_makes_again(tmp_path, torn):
    """Also within one second of the first start, and where the kill has torn the last event."""
    write(TensorBoard(), tmp_path, [*rows(100, 200, 300), *rows(200, 300, split="test")])
    if torn:
        for path in (tmp_path / "tensorboard").glob("*/*"):
            path.write_bytes(path.read_bytes()[:-torn])
    with Writers.open([TensorBoard()], run_in(tmp_path, start_step=200)) as writers:
        # The mark is there before any new row.
        assert points(tmp_path, "train", "loss") == [(100, 12.5), (200, 25.0)]
        assert points(tmp_path, "test", "loss") == [(200, 25.0)]
        writers.write(rows(300, offset=1.0)[0])
    assert points(tmp_path, "train", "loss") == [(100, 12.5), (200, 25.0), (300, 38.5)]


def test_a_new_start_in_tensorboard_drops_all(tmp_path):
    write(TensorBoard(), tmp_path, rows(0, 100))
    write(TensorBoard(), tmp_path, rows(0, 50, offset=1.0))
    assert points(tmp_path, "train", "loss") == [(0, 1.0), (50, 7.25)]


def test_events_are_on_disk_without_a_flush(tmp_path):
    """A running TensorBoard follows, and a kill loses nothing."""
    with Writers.open([TensorBoard()], run_in(tmp_path)) as writers:
        writers.write(rows(1)[0])
        assert points(tmp_path, "train", "loss") == [(1, 0.125)]


# ---- many writers


class Spy:
    """Keeps what it is told; fails where it is asked to."""

    def __init__(self, name: str, log: list[str], fails: str = "", error: BaseException | None = None):
        self.name, self.log, self.fails = name, log, fails
        self.error = error or OSError(f"{name} is full")

    def _note(self, call: str) -> None:
        self.log.append(f"{self.name}.{call}")
        if call.startswith(self.fails or "nothing"):
            raise self.error

    def open(self, run: Run) -> "Spy":
        self._note("open")
        return self

    def tick(self, step: int) -> None:
        self._note(f"tick {step}")

    def write(self, record: Record) -> None:
        self._note(f"write {record.step}")

    def flush(self) -> None:
        self._note("flush")

    def close(self) -> None:
        self._note("close")


def test_calls_reach_every_writer_in_order():
    log: list[str] = []
    with Writers.open([Spy("a", log), Spy("b", log)], run_in(None)) as writers:
        writers.tick(1)
        writers.write(rows(1)[0])
        writers.flush()
    writers.close()
    opening, closing = ["a.open", "b.open"], ["a.flush", "b.flush", "b.close", "a.close"]
    assert log == [*opening, "a.tick 1", "b.tick 1", "a.write 1", "b.write 1", *closing]


@pytest.mark.parametrize("call", ["write", "flush", "close"])
def test_one_failing_writer_harms_no_other(call):
    log: list[str] = []
    spies = [Spy("a", log, fails=call), Spy("b", log), Spy("c", log, fails=call)]
    writers = Writers.open(spies, run_in(None))
    with pytest.raises(OSError, match="is full") as caught:
        {"write": lambda: writers.write(rows(1)[0]), "flush": writers.flush, "close": writers.close}[call]()
    assert sum(entry.split(".")[1].startswith(call) for entry in log) == 3
    assert [note for note in caught.value.__notes__ if "a further writer failed" in note]


def test_a_failing_open_closes_what_is_open():
    log: list[str] = []
    with pytest.raises(OSError, match="b is full"):
        Writers.open([Spy("a", log), Spy("b", log, fails="open"), Spy("c", log)], run_in(None))
    assert log == ["a.open", "b.open", "a.close"]


def test_the_error_of_the_loop_comes_before_one_of_closing():
    log: list[str] = []
    with (
        pytest.raises(ZeroDivisionError) as caught,
        Writers.open([Spy("a", log, fails="close"), Spy("b", log)], run_in(None)),
    ):
        raise ZeroDivisionError
    assert log[-2:] == ["b.close", "a.close"]
    assert caught.value.__notes__ == ["closing a writer failed as well: OSError('a is full')"]


def test_an_interrupt_while_closing_waits_for_the_others():
    log: list[str] = []
    spies = [Spy("a", log), Spy("b", log, "close", KeyboardInterrupt()), Spy("c", log, "close")]
    writers = Writers.open(spies, run_in(None))
    with pytest.raises(KeyboardInterrupt):
        writers.close()
    assert log[-3:] == ["c.close", "b.close", "a.close"]


@pytest.mark.parametrize("writer", [JsonLines(), TensorBoard()])
def test_without_a_directory_nothing_is_written(writer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Writers.open([writer], run_in(None)) as writers:
        writers.tick(1)
        writers.write(rows(1)[0])
        writers.flush()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", [JsonLines(), TensorBoard()])
def test_closing_twice_closes_no_foreign_file(writer, tmp_path):
    """A descriptor's number is given again to the next file, which a second close would hit."""
    opened = writer.open(run_in(tmp_path))
    opened.close()
    with (tmp_path / "other").open("w") as file:
        opened.close()
        file.write("alive")
    assert (tmp_path / "other").read_text() == "alive"


def test_tensorboard_is_loaded_only_when_used():
    program = "import sys, equikd.train._writers; assert not {'tensorboardX', 'rich', 'tensorboard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(_writers.__file__).parents[2])
