"""Command lines of config classes as people run them: a script, its words, what it prints and its exit code."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import equikd

SCRIPT = '''
import enum
import sys
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from equikd.config import cli, config, field, lazy, pin, ref


class Act(enum.Enum):
    relu = 1
    gelu = 2


@config
class Adam:
    """Adaptive steps."""

    rate: float = 1e-3
    """Step size."""

    def validate(self):
        if self.rate <= 0:
            raise ValueError("rate must be positive")


@config
class Sgd:
    rate: float = 0.01
    momentum: float = 0.0


@config
class Train:
    """Trains a model."""

    optimizer: Adam | Sgd = Adam()
    other: Adam = Adam()
    width: int = 8
    """Units of a layer."""
    every: int | None = None
    clip: float | None = 1.0
    act: Act = Act.relu
    mode: Literal["a", "b"] = "a"
    flag: bool = False
    on: bool = True
    betas: tuple[float, float] = (0.9, 0.99)
    widths: tuple[int, ...] = (8,)
    weights: dict[str, float] = field(default_factory=lambda: {"ce": 1.0})
    more: dict[str, float] = field(default_factory=dict)
    heads: dict[str, Adam] = field(default_factory=lambda: {"a": Adam(), "b": Adam(0.5)})
    lambda_: float = 0.1
    default: int = 1
    args: int = 1
    prog: str = "p"
    activation: Callable[..., Any] = jax.nn.relu
    maybe: Callable[..., Any] | None = None
    schedule: float | Callable[..., Any] = 0.5
    anything: Any = jax.nn.relu
    kind: type = int
    type: str = "t"  # after its last use as an annotation
    node: Any = lazy(optax.adamw)(1e-3)
    pinned: float = pin(0.5)
    again: float = ref("clip")


@config
class Evaluate:
    """Measures a model."""

    workdir: str
    step: int | None = None


@config
class Taken:
    help: str = "a flag already"


@config
class Needs:
    activation: Callable[..., Any]


COMMANDS = {
    "train": lambda: cli(Train),
    "union": lambda: cli(Train | Evaluate),
    "instance": lambda: cli(Train, default=Train(optimizer=Sgd(0.5, 0.9), heads={"z": Adam(0.2)}, weights={"q": 2.0})),
    "mapped": lambda: cli(Train, default=jax.tree.map(lambda leaf: leaf, Train(lambda_=0.3))),
    "union-instance": lambda: cli(Train | Evaluate, default=Evaluate("w", 3)),
    "taken": lambda: cli(Taken),
    "needs": lambda: cli(Needs),
}

if __name__ == "__main__":
    made = COMMANDS[sys.argv.pop(1)]()
    if type(made) is not Train:
        sys.exit(print(made))
    plain = Train()
    changed = {name: value for name, value in vars(made).items() if name in Train.__annotations__}
    print(*(f"{name}={changed[name]!r}" for name in changed if changed[name] != getattr(plain, name)), sep="; ")
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.fixture
def run(script):
    home = str(Path(equikd.__file__).parent.parent)
    env = os.environ | {"PYTHONPATH": home, "COLUMNS": "100", "PYTHONWARNINGS": "error::UserWarning"}

    def call(words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, str(script), *words.split()]
        return subprocess.run(line, capture_output=True, text=True, check=False, env=env, timeout=120)

    return call


GOOD = {
    "train": "",
    "train --other.rate 1 --width 16": "other=Adam(rate=1.0); width=16",
    "train --every 3 --clip None": "every=3; clip=None",
    "train --act gelu --mode b --flag --no-on": "act=<Act.gelu: 2>; mode='b'; flag=True; on=False",
    "train --betas .1 .2 --widths 1 2": "betas=(0.1, 0.2); widths=(1, 2)",
    "train --weights.ce 3 --more a 1 b 2": "weights={'ce': 3.0}; more={'a': 1.0, 'b': 2.0}",
    "train --heads.b.rate 9": "heads={'a': Adam(rate=0.001), 'b': Adam(rate=9.0)}",
    "train --lambda_ 3 --default 4 --args 5 --prog q --type u": "lambda_=3.0; default=4; args=5; prog='q'; type='u'",
    "train optimizer:sgd --optimizer.momentum .3": "optimizer=Sgd(rate=0.01, momentum=0.3)",
    "train --schedule 3": "schedule=3.0",
    "train --again 2 --pinned 3": "pinned=3.0; again=2.0",
    "union train --width 3": "width=3",
    "union train optimizer:sgd --optimizer.rate 1": "optimizer=Sgd(rate=1.0, momentum=0.0)",
    "union evaluate --workdir w": "Evaluate(workdir='w', step=None)",
    "union-instance": "Evaluate(workdir='w', step=3)",
    "mapped": "lambda_=0.3",
    "instance --heads.z.rate .9": (
        "optimizer=Sgd(rate=0.5, momentum=0.9); weights={'q': 2.0}; heads={'z': Adam(rate=0.9)}"
    ),
}


@pytest.mark.parametrize("words", GOOD)
def test_words_become_a_config(run, words):
    done = run(words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.strip() == GOOD[words]


@pytest.mark.slow
def test_functions_and_classes_are_given_by_name(run):
    done = run("train --activation jax.nn:gelu --maybe optax:sgd --anything jax.numpy.tanh --kind builtins:float")
    assert done.returncode == 0, done.stderr
    for name, value in {"activation": "gelu", "maybe": "sgd", "anything": "tanh", "kind": "float"}.items():
        found = next(part for part in done.stdout.split("; ") if part.startswith(f"{name}="))
        assert value in found
    assert "gelu" in run("needs --activation jax.nn:gelu").stdout


BAD = {
    "train --widht 3": ["--widht", "Perhaps you meant", "--width INT"],
    "train optimizer:sdg": ["optimizer:sdg", "optimizer:sgd"],
    "train --activation jax.nn:gelo": ["--activation", "'gelu'"],
    "train --kind optax:adam": ["optax:adam is no class"],
    "train --activation math:pi": ["math:pi is no function"],
    "train --node 3": ["--node", "cannot be written as text"],
    "train --width 1.5": ["--width"],
    "train --betas 1": ["--betas"],
    "train --mode c": ["--mode"],
    "train --other.rate 1e39": ["Adam.rate: 1e+39 becomes inf as a float32 leaf", "fix:"],
    "train --other.rate -1 --heads.a.rate -1 optimizer:adam --optimizer.rate -1": [
        "3 configs are invalid",
        "- optimizer: rate must be positive",
        "- other: rate must be positive",
        "- heads.a: rate must be positive",
    ],
    "union": ["train, evaluate"],
    "union trian": ["trian", "train, evaluate"],
    "union evaluate": ["--workdir STR", "(required)"],
    "needs": ["--activation MODULE:NAME", "(required)"],
    "taken": ["Taken.help: --help is the flag that shows the help", "another name"],
}


@pytest.mark.parametrize("words", BAD)
def test_wrong_words_are_told_on_one_screen(run, words):
    done = run(words)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) <= 40
    for said in BAD[words]:
        assert said in done.stderr


@pytest.mark.slow
def test_help(run):
    done = run("train --help")
    assert done.returncode == 0
    text = " ".join(done.stdout.replace("│", " ").split())
    for said in (
        "--width INT Units of a layer. (default: 8)",
        "--other.rate FLOAT Step size. (default: 0.001)",
        "--activation MODULE:NAME (default: jax.nn:relu)",
        "--every {None}|INT (default: None)",
        "--act {relu,gelu} (default: relu)",
        "optimizer:adam Adaptive steps.",
    ):
        assert said in text
    assert "Measures a model." in run("union --help").stdout
    assert "Step size." in run("union train optimizer:adam --help").stdout
