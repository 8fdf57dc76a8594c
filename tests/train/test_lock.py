"""The lock: one run a directory, whoever else starts one, and no trace of it afterwards."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from equikd.train import _lock
from equikd.train._directory import RunDirectory, RunDirectoryError
from equikd.train._lock import NAME, locked
from tests.train._small import quick

HOLD = """
import sys, time
from equikd.train._directory import RunDirectory
from equikd.train._lock import locked
with locked(RunDirectory.open(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path / "a"`."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / "a")]
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root})
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != NAME}


def test_another_process_is_refused_until_the_first_is_killed(tmp_path, holder, snapshot):
    with pytest.raises(RunDirectoryError) as caught:
        quick().train(tmp_path / "a")
    assert [file.name for file in (tmp_path / "a").iterdir()] == [NAME]
    snapshot("taken", str(caught.value).replace(str(tmp_path), "TMP").replace(str(holder.pid), "PID"))
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "a" / NAME).exists()
    quick().train(tmp_path / "a")
    assert not (tmp_path / "a" / NAME).exists()


def test_a_second_run_of_this_process_touches_nothing(tmp_path):
    quick().train(tmp_path / "a")
    before = contents(tmp_path)
    with locked(RunDirectory.open(tmp_path / "a")):
        with pytest.raises(RunDirectoryError, match="which is this one"):
            quick(seed=5).train(tmp_path / "a")
        assert contents(tmp_path) == before


def test_of_many_threads_one_trains(tmp_path):
    barrier = threading.Barrier(3)

    def start(seed: int) -> bool:
        barrier.wait()
        try:
            quick(seed=seed, num_steps=200).train(tmp_path / "a")
        except RunDirectoryError as error:
            if "another run is at work here" not in str(error):
                raise
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        trained = list(pool.map(start, range(3)))
    assert any(trained)
    names = {file.name for file in (tmp_path / "a").iterdir()}
    assert NAME not in names
    assert json.loads((tmp_path / "a" / "config.json").read_text())["seed"] in (n for n in range(3) if trained[n])


def test_a_child_does_not_keep_it(tmp_path):
    """The fork of a worker closes its copy of the descriptor; else it would hold the lock of a killed parent."""
    with locked(RunDirectory.open(tmp_path / "a")):
        assert len(_lock._held) == 1
    assert not _lock._held
    copy = os.dup(0)
    _lock._held.add(copy)
    _lock._forget()
    assert not _lock._held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copy)


def test_it_leaves_no_directory(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(RunDirectory.open(tmp_path / "runs" / "a")):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
