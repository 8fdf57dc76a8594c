"""The rows of `metrics.jsonl`: one `Record` a line, written so that a kill tears at most the last one.

Beside writing and reading, here is what happens to rows that are there when a run starts: a resume keeps those up to
its checkpoint, a start at step 0 puts the file aside under a numbered name.
"""

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from equikd.errors import listing, message
from equikd.metrics import Summary
from equikd.train._directory import RunDirectoryError, write_atomically


@final
@dataclass(frozen=True)
class Record:
    """One row of results.

    Attributes:
        step: the number of updates made when the values were taken.
        split: `train` for a training interval, else the eval's name.
        metrics: names to values; nan and inf are possible.
        seconds: seconds since the run's start, summed over resumes.
        summaries: names to images, texts and histograms; not in `metrics.jsonl`, so none where rows were read from it.
        differences: of a compilation of the step that was not the first, what made it necessary: path, kind, before,
            after, fix.
        speed: of a training interval, `steps_per_second`, `examples_per_second`, and `model_flops_utilization` where
            the peak of the hardware is known. No two runs have the same, so it is no metric, and `Result.history` does
            not hold it.
    """

    step: int
    split: str
    metrics: dict[str, float]
    seconds: float
    summaries: Mapping[str, Summary] = field(default_factory=dict)
    differences: tuple[dict[str, str], ...] = ()
    speed: Mapping[str, float] = field(default_factory=dict)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The rows of a `metrics.jsonl`, in order; a torn last line is left out, so a running run can be read.

    Raises:
        FileNotFoundError: there is no such file.
        RunDirectoryError: a line before the last one is no row; it names file and lines. The file cannot be read.
    """
    path = Path(path)
    return [record for record, _ in _rows(path, _read(path))]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        fix = "move it away, or check the permissions"
        raise RunDirectoryError(message(f"{path}: cannot be read", got=str(error), fix=fix)) from error


def line(record: Record) -> bytes:
    values = {name: float(record.metrics[name]) for name in sorted(record.metrics)}
    row = {
        "step": int(record.step),
        "split": record.split,
        "metrics": {name: value if math.isfinite(value) else str(value) for name, value in values.items()},
        "seconds": round(float(record.seconds), 3),
    }
    if record.differences:
        row["differences"] = list(record.differences)
    if record.speed:
        row["speed"] = {name: float(f"{record.speed[name]:.6g}") for name in sorted(record.speed)}
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _record(line: bytes) -> Record:
    row = json.loads(line)
    metrics = {name: float(value) for name, value in row["metrics"].items()}
    speed = {name: float(value) for name, value in row.get("speed", {}).items()}  # evals and older rows have none
    values = {"step": int(row["step"]), "split": str(row["split"]), "seconds": float(row["seconds"])}
    return Record(**values, metrics=metrics, speed=speed, differences=tuple(row.get("differences", ())))


def _rows(path: Path, data: bytes) -> list[tuple[Record, bytes]]:
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    rows, broken = [], []
    for number, line in enumerate(lines, 1):
        try:
            rows.append((_record(line), line + b"\n"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # cut short, or some other JSON
            broken.append(number)
    if broken and broken[-1] == len(lines):  # a kill in the middle of a write; only the last line can be torn so
        broken.pop()
    if broken:
        raise RunDirectoryError(
            message(
                f"{path}: {'a line is' if len(broken) == 1 else f'{len(broken)} lines are'} broken",
                where=listing([f"{path.name}:{number}" for number in broken], 5),
                got=lines[broken[0] - 1][:80].decode("utf-8", "replace") or "an empty line",
                expected='a row, such as {"step": 500, "split": "test", "metrics": {"loss": 0.09}, "seconds": 12.3}',
                fix="mend or delete the line; a killed run tears only the last, so something else has changed the file",
            )
        )
    return rows


def keep_rows(path: Path, step: int) -> None:
    """Leaves the rows up to `step`; none for step 0, where the run starts anew, and the old file gets another name."""
    if not path.exists():
        return
    data = _read(path)
    if not step:
        if data:
            path.rename(name_for_old(path))
        return
    kept = b"".join(text for record, text in _rows(path, data) if record.step <= step)
    if kept != data:
        write_atomically(path, kept)


def check_rows(path: Path, step: int) -> None:
    """Refuses rows that a run which goes on at `step` could not take over; changes nothing.

    Raises:
        RunDirectoryError: broken lines, or a file that cannot be read.
    """
    if path.exists():
        data = _read(path)
        if step:
            _rows(path, data)


def name_for_old(path: Path) -> Path:
    """Where the rows of an earlier start go when a run starts again at step 0: the first free `metrics.<n>.jsonl`."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())
