"""Runs killed (-9) while they save: what is left is whole, and a next run tidies up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from equikd.train._checkpoint import CheckpointStore

KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from equikd.train import _checkpoint

assert "orbax" not in sys.modules
directory, place = Path(sys.argv[1]), sys.argv[2]

def die(path, *args):
    if {"document": "/3.orbax", "remove": "/1.removed"}[place] in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(path, *args)

store = _checkpoint.CheckpointStore(directory, keep=2)
if place == "document":
    original, _checkpoint.write_atomically = _checkpoint.write_atomically, die
if place == "remove":
    original, _checkpoint.shutil.rmtree = _checkpoint.shutil.rmtree, die
for step in range(300):
    store.save(step, {"w": [np.full((100, 100), step, np.float32) for _ in range(8)]}, {"at": step})
    if step == 2:
        store.wait()
    print(step, flush=True)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("place", ["document", "remove", "anywhere"])
def test_a_killed_run_leaves_whole_checkpoints(tmp_path, place):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), place],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with child:
        for line in child.stdout:
            if place == "anywhere" and int(line) == 9:
                time.sleep(0.011)
                child.kill()
    assert child.returncode == -signal.SIGKILL
    before = names(tmp_path)
    assert place == "anywhere" or any("tmp" in name for name in before), before
    with CheckpointStore(tmp_path, keep=2) as store:
        steps = store.steps()
        assert 1 <= len(steps) <= 3
        assert place == "anywhere" or steps[-1] == {"document": 2, "remove": 3}[place]
        for step in steps:
            restored, facts = store.restore(step, {"w": [np.zeros((100, 100), np.float32)] * 8})
            assert facts == {"at": step}
            assert all((leaf == step).all() for leaf in restored["w"])
        store.save(steps[-1] + 1, {}, {})
        store.wait()
        assert store.steps() == (steps[-1], steps[-1] + 1)
    assert names(tmp_path) == sorted([str(steps[-1]), str(steps[-1] + 1)])


def test_leftovers_neither_count_nor_stay_and_other_files_do(tmp_path):
    for name in ("7.orbax-checkpoint-tmp", "5.removed.orbax-checkpoint-tmp", "9", "notes", "08"):
        (tmp_path / name / "arrays").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    with CheckpointStore(tmp_path, keep=1) as store:
        assert store.steps() == ()
        store.save(7, {}, {})
        store.save(8, {}, {})
    assert names(tmp_path) == ["08", "8", "9", "notes", "notes.txt"]


def test_a_reader_changes_nothing(tmp_path):
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()  # may be a run that is saving right now
    with CheckpointStore(tmp_path, keep=1) as store:
        assert store.steps() == ()
    with CheckpointStore(tmp_path / "none", keep=1) as store:
        assert store.latest() is None
    assert names(tmp_path) == ["7.orbax-checkpoint-tmp"]
