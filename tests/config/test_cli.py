"""Command lines of config classes: nested flags, every kind of field, help from docstrings, validated at the end."""

import enum
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal

import jax
import pytest

from equikd.config import cli, config, field
from equikd.errors import ConfigError

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # a new process finds what this one does


class Act(enum.Enum):
    relu = "relu"
    gelu = "gelu"


@config
class Opt:
    learning_rate: float = 1e-3
    """Peak step size."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    clip: float | None = None

    def validate(self):
        if self.learning_rate <= 0:
            raise ValueError("learning_rate must be positive")


@config
class Sgd:
    momentum: float = 0.0


@config
class Args:
    """Trains a model."""

    opt: Opt = Opt()
    width: int = 8
    widths: tuple[int, ...] = (8, 8)
    act: Act = Act.relu
    mode: Literal["a", "b"] = "a"
    name: str = "run"
    nesterov: bool = False
    path: Path | None = None
    seed: int = field(dynamic=True, unsigned=True, default=0)
    weights: dict[str, float] = field(default_factory=lambda: {"ce": 1.0})
    heads: tuple[Opt, ...] = ()


@config
class Choice:
    optimizer: Opt | Sgd = Opt()


def test_nothing_given_is_the_default():
    assert cli(Args, []) == Args()


def test_every_kind_of_field():
    words = "--opt.learning-rate 3e-4 --opt.betas 0.8 0.99 --opt.clip 1 --width 16 --widths 1 2 3 --act gelu".split()
    words += "--mode b --name x --nesterov --path a/b --seed 7 --weights.ce 2".split()
    args = cli(Args, words)
    opt = Opt(3e-4, (0.8, 0.99), 1.0)
    assert args == Args(opt, 16, (1, 2, 3), Act.gelu, "b", "x", True, Path("a/b"), 7, {"ce": 2.0})
    assert type(args.opt.clip) is float
    assert cli(Args, ["--opt.clip", "None"]).opt.clip is None


def test_a_learning_rate_from_the_command_line_is_strong_at_the_border():
    (leaf, *_) = jax.tree.leaves(cli(Opt, ["--learning-rate", "1"]))
    assert (leaf.dtype.name, jax.typeof(leaf).weak_type) == ("float32", False)


def test_defaults_may_come_from_an_instance():
    assert cli(Args, ["--width", "3"], default=Args(name="mine")) == Args(name="mine", width=3)


def test_a_union_of_configs_gives_subcommands():
    assert cli(Choice, ["optimizer:sgd", "--optimizer.momentum", "0.9"]) == Choice(Sgd(0.9))
    assert cli(Choice, []) == Choice()


def test_validate_runs_after_parsing():
    with pytest.raises(ConfigError, match=r"opt: learning_rate must be positive"):
        cli(Args, ["--opt.learning-rate", "-1"])


@pytest.mark.parametrize(
    "words",
    [["--widht", "3"], ["--width", "3.5"], ["--act", "tanh"], ["--opt.betas", "1"], ["--opt.learning-rate", "fast"]],
    ids=" ".join,
)
def test_wrong_words_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli(Args, words)
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert words[0].removesuffix("dht") in output.out + output.err


def test_values_that_no_leaf_can_hold_are_refused(capsys):
    with pytest.raises((ConfigError, SystemExit)) as caught:
        cli(Args, ["--opt.learning-rate", "1e39"])
    output = capsys.readouterr()
    assert "1e+39 becomes inf" in output.out + output.err + str(caught.value)


def test_help_has_the_docstrings_of_the_fields(capsys):
    with pytest.raises(SystemExit) as caught:
        cli(Args, ["--help"])
    assert not caught.value.code
    text = capsys.readouterr().out
    for wanted in (
        "Trains a model.",
        "--opt.learning-rate",
        "Peak step size.",
        "Decay rates of the two moments.",
        "(default: 0.001)",
    ):
        assert wanted in text


def test_as_a_process(tmp_path):
    script = """
    import enum
    from equikd.config import cli, config

    class Act(enum.Enum):
        relu = 1
        gelu = 2

    @config
    class Opt:
        rate: float = 0.1
        \"\"\"How fast.\"\"\"

    @config
    class Args:
        opt: Opt = Opt()
        act: Act = Act.relu
        widths: tuple[int, ...] = (1,)
        clip: float | None = None

    if __name__ == "__main__":
        print(cli(Args))
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))

    def run(*words):
        return subprocess.run([sys.executable, path, *words], capture_output=True, text=True, check=False, env=ENV)

    done = run("--opt.rate", "1", "--act", "gelu", "--widths", "2", "3", "--clip", "0.5")
    assert done.stdout == "Args(opt=Opt(rate=1.0), act=Act.gelu, widths=(2, 3), clip=0.5)\n", done.stderr
    helped = run("--help")
    assert helped.returncode == 0
    assert "How fast." in helped.stdout
