"""README and help are true: their commands run as printed, the Python runs, the example is the file it claims to be."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import equikd

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")

RUN_BY_TEST_EXAMPLES = ("equikd train equikd.examples.gan", "equikd train equikd.examples.dqn")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The `equikd` commands, each once; what installs and what runs all tests is CI's."""
    lines = [part.strip() for block in blocks("bash") for line in block.splitlines() for part in line.split("&&")]
    return [line for line in dict.fromkeys(lines) if line.startswith("equikd ")]


def help_commands() -> list[str]:
    """The commands in the package's docstrings, help and hints how to fix an error, each once; none with a gap in it.

    A word in capitals, and `...`, stand for what the reader has.
    """
    shown = r"(?:^\s*\$ ?|`|\"|: )(equikd (?:(?:train|eval|check|paths) |--)[^`\"\n]*)"
    sources = [path.read_text("utf-8") for path in sorted(Path(equikd.__file__).parent.rglob("*.py"))]
    found = [line.strip() for source in sources for line in re.findall(shown, source, re.MULTILINE)]
    found = [line for line in found if not re.search(r"\b[A-Z]{3,}\b|\.\.\.|[{}\[\]]", line)]
    return [line for line in dict.fromkeys(found) if line not in (*commands(), *RUN_BY_TEST_EXAMPLES)]


def own_help() -> list[str]:
    """The commands that the help names with a gap, filled with the shipped example."""
    from equikd.cli import USAGE

    named = re.findall(r"`(equikd [^`]*)`", USAGE)
    return [line.replace("MODULE", "equikd.examples.digits") for line in named]


@pytest.fixture
def shell(tmp_path):
    """Runs a line in bash in an empty directory, with `equikd` on the path as an installation puts it there."""
    script = tmp_path / "bin" / "equikd"
    script.parent.mkdir()
    script.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -m equikd "$@"\n')
    script.chmod(0o755)
    import equikd

    home = str(Path(equikd.__file__).parent.parent)
    env = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONPATH": home}
    where = tmp_path / "empty"
    where.mkdir()

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line], cwd=where, env=env, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def test_there_are_commands():
    assert "equikd train equikd.examples.digits" in commands()
    assert len(commands()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("line", commands())
def test_each_command_runs_as_printed(shell, line):
    done = shell(line)
    assert done.returncode == 0, done.stderr
    assert ("test   accuracy" if "train" in line else "Context of a training step") in done.stdout


def test_there_are_commands_in_help():
    assert "equikd --help" in help_commands()
    assert "equikd train equikd.examples.digits --help" in own_help()


@pytest.mark.parametrize("line", [*help_commands(), *own_help()])
def test_each_command_in_help_runs_as_printed(shell, line):
    done = shell(line)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("usage: equikd", "step", "Model", "Context"))


@pytest.mark.slow
def test_each_flag_that_help_names_runs_as_printed(shell):
    from equikd.cli import USAGE

    (edit,) = re.findall(r"--cfg\.[a-z_.]+=[\w.-]+", USAGE)
    done = shell(f"equikd train equikd.examples.digits {edit} --cfg.num_steps=2 --workdir short")
    assert done.returncode == 0, done.stderr
    listed = [line.strip() for line in shell("equikd train equikd.examples.digits --help").stdout.splitlines()]
    listed = [line for line in listed if line.startswith("--cfg.optimizer.")]
    assert listed
    line = f"equikd train equikd.examples.digits {' '.join(listed)} --cfg.num_steps=2 --workdir listed"
    assert shell(line).returncode == 0


def test_the_main_job_prints_what_the_readme_shows(shell):
    done = shell("equikd train equikd.examples.digits")
    accuracy = float(re.search(r"test +accuracy +([\d.]+)", done.stdout).group(1))
    assert accuracy >= 0.97
    shown = next(block for block in blocks("text") if block.startswith("step 100/1000"))
    names = [line.split()[:2] for line in shown.splitlines() if not line.startswith(("step", "...", "equikd"))]
    assert names == [line.split()[:2] for line in done.stdout.splitlines() if not line.startswith("equikd")]


def test_the_example_config_is_the_file():
    from equikd.examples.digits import configs

    source = Path(configs.__file__).read_text("utf-8")
    shown = next(block for block in blocks("python") if "def get_config" in block)
    assert shown.strip() in source


@pytest.mark.slow
def test_the_python_runs_top_to_bottom(tmp_path):
    code = "\n".join(block for block in blocks("python") if "def get_config" not in block)
    code += '\nassert result.metrics["test/accuracy"] > 0.9 and int(state.step) == 2\n'
    code += (
        "assert MeanConfidence(preds='preds').from_values(logits, jax.numpy.ones(len(logits), bool)).compute() > 0.5\n"
    )
    (tmp_path / "readme.py").write_text(code)
    import equikd

    env = {**os.environ, "PYTHONPATH": str(Path(equikd.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "readme.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
