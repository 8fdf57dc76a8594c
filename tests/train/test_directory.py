"""The run directory: whole files or none, refusals that help, facts that never fail a run."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import jax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from equikd.errors import EquikdError
from equikd.train import _directory
from equikd.train._directory import RunDirectory, RunDirectoryError, environment_facts, write_atomically


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def test_opening_makes_nothing(tmp_path):
    run = RunDirectory.open(tmp_path / "runs" / "a")
    assert not run.exists
    run.check()
    assert files(tmp_path) == []


def test_create_leaves_two_whole_files(tmp_path):
    run = RunDirectory.open(tmp_path / "runs" / "a")
    run.create('{"z": 1, "a": {"é": 0.1}}', {"seed": 3, "odd": Path("x")})
    assert run.exists
    assert files(run.path) == ["config.json", "environment.json"]
    assert run.config_text() == '{\n  "z": 1,\n  "a": {\n    "é": 0.1\n  }\n}\n'
    assert json.loads(run.environment.read_text()) == {"seed": 3, "odd": "x"}
    assert (run.metrics, run.checkpoints) == (run.path / "metrics.jsonl", run.path / "checkpoints")


def test_the_path_does_not_move_with_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = RunDirectory.open("a")
    monkeypatch.chdir("/")
    assert run.path == tmp_path / "a"
    assert RunDirectory.open("~/b").path == tmp_path / "home" / "b"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters()),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(st.characters()), child, max_size=3),
    max_leaves=8,
)


@given(value=json_values)
@example(value={"b\ud800": "é\udfff", "a": [1e22, -0.0, 2**70]})
def test_the_config_is_written_exactly(value, tmp_path_factory):
    """Order of keys, bits of floats, nan, big ints and lone surrogates all survive."""
    run = RunDirectory.open(tmp_path_factory.mktemp("runs") / "a")
    text = json.dumps(value)
    run.create(text, {})
    assert json.dumps(json.loads(run.config_text())) == text


def test_a_text_that_is_no_json_makes_nothing(tmp_path):
    with pytest.raises(ValueError, match="Expecting"):
        RunDirectory.open(tmp_path / "a").create("{", {})
    assert files(tmp_path) == []


def test_what_a_killed_creation_left_is_no_obstacle(tmp_path):
    for name in ("environment.json", ".config.json.tmp", ".environment.json.tmp", ".DS_Store"):
        (tmp_path / name).write_text("{")
    run = RunDirectory.open(tmp_path)
    assert not run.exists
    run.create("{}", {})
    assert files(tmp_path) == [".DS_Store", "config.json", "environment.json"]


def test_the_config_is_written_last(tmp_path, monkeypatch):
    """A creation that dies at any moment leaves no directory that passes for a run."""
    written = []
    monkeypatch.setattr(_directory, "write_atomically", lambda path, data: written.append(path.name))
    RunDirectory.open(tmp_path / "a").create("{}", {})
    assert written == ["environment.json", "config.json"]


def refusal(tmp_path: Path, path: str | Path) -> str:
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.open(path).create("{}", {})
    assert isinstance(caught.value, EquikdError)
    return str(caught.value).replace(str(tmp_path), "<tmp>")


def test_a_directory_with_other_files_is_refused(tmp_path, snapshot):
    for name in ("thesis.tex", "b.png", "data"):
        (tmp_path / name).write_text("precious")
    snapshot("other_files", refusal(tmp_path, tmp_path))
    assert files(tmp_path) == ["b.png", "data", "thesis.tex"]


def test_a_file_is_refused(tmp_path, snapshot):
    (tmp_path / "model").write_text("precious")
    snapshot("a_file", refusal(tmp_path, tmp_path / "model"))
    snapshot("below_a_file", refusal(tmp_path, tmp_path / "model" / "runs" / "a"))
    assert (tmp_path / "model").read_text() == "precious"


def test_a_second_run_in_one_directory_is_refused(tmp_path, snapshot):
    run = RunDirectory.open(tmp_path / "a")
    config = {"__format__": 1, "__qualname__": "equikd.train:Trainer", "num_steps": 1}
    run.create(json.dumps(config), {})
    run.check()  # a run to resume is a fine place
    snapshot("a_run_already", refusal(tmp_path, tmp_path / "a"))
    assert json.loads(run.config_text()) == config


def test_an_address_is_refused(tmp_path, snapshot):
    snapshot("an_address", refusal(tmp_path, "gs://bucket/runs/a"))


def test_a_place_without_permission_is_refused(tmp_path, snapshot, monkeypatch):
    """By the mode of the directory; root may write anywhere, so for root `access` is made to answer."""
    tmp_path.chmod(0o555)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    try:
        snapshot("no_permission", refusal(tmp_path, tmp_path / "runs" / "a"))
    finally:
        tmp_path.chmod(0o755)
    assert files(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_place_where_the_system_makes_no_directory_is_refused(tmp_path):
    assert refusal(tmp_path, "/proc/equikd-runs/a").startswith("/proc/equikd-runs/a: ")


def test_a_missing_run_is_named(tmp_path, snapshot):
    (tmp_path / "notes.txt").write_text("")
    for name, path in (("no_directory", tmp_path / "b"), ("no_config", tmp_path)):
        with pytest.raises(RunDirectoryError) as caught:
            RunDirectory.open(path).config_text()
        snapshot(name, str(caught.value).replace(str(tmp_path), "<tmp>"))


def test_a_changed_config_keeps_the_old_one(tmp_path):
    run = RunDirectory.open(tmp_path / "a")
    run.create('{"lr": 1}', {})
    run.update_config('{ "lr":1 }', step=50)  # the same in other spaces
    assert files(run.path) == ["config.json", "environment.json"]
    run.update_config('{"lr": 2}', step=50)
    run.update_config('{"lr": 3}', step=50)  # what ran with 2 was lost with the crash
    run.update_config('{"lr": 4}', step=100)
    kept = {name: json.loads((run.path / name).read_text())["lr"] for name in files(run.path) if "config" in name}
    assert kept == {"config.50.json": 1, "config.100.json": 3, "config.json": 4}


def test_an_update_needs_a_run(tmp_path):
    with pytest.raises(RunDirectoryError, match="no run here"):
        RunDirectory.open(tmp_path / "a").update_config("{}", step=1)
    assert files(tmp_path) == []


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert (files(tmp_path), path.read_bytes()) == (["a.json"], b"old")


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_write_leaves_a_whole_file(tmp_path):
    path, size = tmp_path / "a.bin", 2_000_000
    write_atomically(path, b"a" * size)
    program = (
        "import sys; from pathlib import Path; from equikd.train._directory import write_atomically as write\n"
        f"print(flush=True)\nwhile True:\n  for letter in (b'b', b'c'): write(Path({str(path)!r}), letter * {size})"
    )
    for pause in (0.0, 0.011, 0.027):
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        data = path.read_bytes()
        assert len(data) == size
        assert len(set(data)) == 1


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "--quiet")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_the_facts_are_plain_and_true(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["equikd", "train", "x", "--cfg.seed=3"])
    facts = environment_facts(seed=3)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["command"] == ["equikd", "train", "x", "--cfg.seed=3"]
    assert (facts["seed"], facts["processes"]) == (3, 1)
    assert facts["packages"]["jax"] == jax.__version__
    assert facts["python"] == sys.version.split()[0]
    assert [(device["kind"], device["count"]) for device in facts["devices"]] == [
        (jax.devices()[0].device_kind, jax.device_count())
    ]
    age = datetime.now(UTC) - datetime.fromisoformat(facts["started"])
    assert -1 <= age.total_seconds() < 60


def test_the_commit_of_the_working_directory(repository):
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "runs").mkdir()
    (repository / "runs" / "untracked").write_text("")
    assert environment_facts(0)["git"] == {"commit": commit, "dirty": False}
    (repository / "a.py").write_text("2")
    assert environment_facts(0)["git"] == {"commit": commit, "dirty": True}


def test_no_repository_and_no_git_are_no_error(tmp_path, monkeypatch, repository):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert environment_facts(0)["git"] is None
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert environment_facts(0)["git"] is None


def test_a_git_that_hangs_is_given_up(repository, monkeypatch):
    slow = repository / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(_directory, "GIT_SECONDS", 0.2)
    start = time.monotonic()
    assert environment_facts(0)["git"] is None
    assert time.monotonic() - start < 10


def test_a_fact_that_fails_is_none(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no backend")

    monkeypatch.setattr(jax, "devices", broken)
    monkeypatch.setattr(_directory, "PACKAGES", ("jax", "no-such-package"))
    facts = environment_facts(0)
    assert facts["devices"] is None
    assert facts["packages"]["no-such-package"] is None
    assert facts["packages"]["jax"] == jax.__version__


def test_nan_in_facts_is_no_obstacle(tmp_path):
    run = RunDirectory.open(tmp_path / "a")
    run.create("{}", {"x": math.nan})
    assert math.isnan(json.loads(run.environment.read_text())["x"])
