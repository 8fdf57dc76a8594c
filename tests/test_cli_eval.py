"""`equikd eval`: a saved run, evaluated on its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from equikd.cli import main

ROOT = Path(__file__).parents[1]
MODULE = str(ROOT / "tests" / "train" / "_experiment.py")
SETTINGS = ("--args.num_steps=60", "--cfg.writers=()", "--cfg.checkpoints.every=20", "--cfg.evals.test.every=20")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", "equikd", *words], capture_output=True, text=True, env=environment, check=False
    )


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(words)
    return code, *capsys.readouterr()


def rows(text: str, split: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{split} ")]


@pytest.mark.slow
def test_it_reports_what_training_reported(tmp_path, capsys):
    workdir = tmp_path / "run"
    code, trained, _ = told(capsys, "train", MODULE, *SETTINGS, "--workdir", str(workdir))
    assert code == 0
    again = run("eval", MODULE, *SETTINGS, "--workdir", str(workdir))  # in a process of its own
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith(f"{MODULE}, step 60 of {workdir}\n")
    assert [line.split() for line in rows(again.stdout, "test")] == [line.split() for line in rows(trained, "test")]
    assert rows(again.stdout, "train") == []

    code, text, error = told(capsys, "eval", MODULE, *SETTINGS, "--workdir", str(workdir), "--step", "20")
    assert (code, error) == (0, "")
    assert text.startswith(f"{MODULE}, step 20 of {workdir}\n")
    assert rows(text, "test") != rows(again.stdout, "test")

    code, text, error = told(capsys, "eval", MODULE, *SETTINGS, "--workdir", str(workdir), "--cfg.losses.ce.weight=2")
    assert code == 0
    assert "was trained with another config" in error
    assert "losses.ce.weight" in error

    code, _, error = told(capsys, "eval", MODULE, *SETTINGS, "--workdir", str(workdir), "--step", "30")
    assert code == 2
    assert "there is no checkpoint of step 30" in error
    assert re.search(r"expected: +one of 20, 40, 60", error)


def test_without_a_run_or_evals(tmp_path, capsys):
    code, _, error = told(capsys, "eval", MODULE, "--workdir", str(tmp_path / "nowhere"))
    assert code == 2
    assert "holds no run" in error
    assert not (tmp_path / "nowhere").exists()
    code, _, error = told(capsys, "eval", MODULE, "--cfg.evals={}", "--workdir", str(tmp_path / "nowhere"))
    assert code == 2
    assert "has no evals" in error
    with pytest.raises(SystemExit, match="2"):
        main(["eval", MODULE, "--step", "three", "--workdir", str(tmp_path)])


def test_no_module_to_evaluate(capsys, snapshot):
    code, _, error = told(capsys, "eval")
    assert code == 2
    snapshot("no_module", error)
