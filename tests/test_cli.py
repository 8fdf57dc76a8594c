"""The command line: what people type, and what they are told."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import equikd
from equikd.cli import load_module, main
from equikd.config import from_json
from equikd.errors import ConfigError
from equikd.examples.digits import get_config

ROOT = Path(__file__).parents[1]
DIGITS = "equikd.examples.digits"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}


class Said(NamedTuple):
    code: object
    out: str
    error: str


@pytest.fixture
def run(capsys, monkeypatch, tmp_path) -> Callable[..., Said]:
    """The command line in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*words: str) -> Said:
        capsys.readouterr()
        try:
            code: object = main(words)
        except SystemExit as stop:
            code = stop.code
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture
def config_file(tmp_path, monkeypatch) -> Iterator[Callable[[str, str], str]]:
    """Writes a config module into a folder of its own, and forgets it afterwards."""
    written = []

    def write(stem: str, text: str) -> str:
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{stem}.py").write_text(text)
        written.append(stem)
        return f"files/{stem}.py"

    yield write
    for stem in written:
        sys.modules.pop(stem, None)


def refused(said: Said, workdir: Path = Path("runs")) -> str:
    """The text of a refusal: on one screen, with exit code 2, no traceback, and nothing written."""
    assert said.code == 2
    assert said.out == ""
    assert len(said.error.splitlines()) < 40
    assert "Traceback" not in said.error
    assert not workdir.exists()
    return said.error


EXPERIMENT = """
import equinox as eqx
import jax
import numpy as np
import optax

import equikd as ek


class Affine(eqx.Module):
    weight: jax.Array

    def __init__(self, size, *, key):
        self.weight = jax.random.normal(key, (size, size))

    def __call__(self, x):
        return self.weight @ x


def load():
    return {"x": np.random.default_rng(0).normal(size=(32, 2)).astype(np.float32)}


@ek.config.config
class Settings:
    size: int
    '''Rows and columns, which has no default.'''
    rate: float = 0.1
    '''Step size.'''
    label: str = "a"
    '''A name.'''


def get_config(settings: Settings):
    return ek.Trainer(
        model=ek.lazy(Affine)(settings.size),
        inputs={"x": "batch.x"},
        losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        optimizer=ek.lazy(optax.sgd)(settings.rate),
        train_data=ek.data.InMemory(ek.lazy(load)(), batch_size=8),
        num_steps=10,
    )
"""

# --- processes --------------------------------------------------------------------------------------------------------


def python(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT | environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.slow
def test_the_main_job_as_a_process(tmp_path):
    flags = ["--args.width=64", "--cfg.optimizer.learning_rate=1e-3", "--cfg.num_steps=20", "--workdir", "runs/a"]
    said = python("-m", "equikd", "train", DIGITS, *flags, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[0] == "equikd.examples.digits, 20 steps, in runs/a"
    assert [line.split()[:2] for line in lines[1:3]] == [["train", "loss"], ["train", "accuracy"]]
    assert any(line.split()[:2] == ["test", "accuracy"] for line in lines)
    assert re.search(r"step 20/20  test  loss \d\.\d+  accuracy 0\.\d+", said.stderr)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs"]
    config = from_json((tmp_path / "runs/a/config.json").read_text())
    wanted = {"model.width": 64, "optimizer.learning_rate": 1e-3, "num_steps": 20}
    assert config == equikd.override(get_config(), wanted)
    facts = json.loads((tmp_path / "runs/a/environment.json").read_text())
    assert facts["command"][1:] == ["train", DIGITS, *flags]
    assert (tmp_path / "runs/a/checkpoints/20").is_dir()


@pytest.mark.slow
def test_the_console_script(tmp_path):
    """It is `equikd.cli:main`, and finds modules of the current directory, which is not on its path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"equikd": "equikd.cli:main"}
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "equikd"  # what an installer writes
    script.write_text("import sys\nfrom equikd.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    (tmp_path / "mine.py").write_text(EXPERIMENT)
    said = python(str(script), "train", "mine", "--args.size=2", "--args.label", "1", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "mine, 10 steps, in runs/mine" in said.stdout

    loaded = (
        "from equikd.config import from_json; print(from_json(open('runs/mine/config.json').read()).train().metrics)"
    )
    again = python("-c", loaded, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    last = (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()[-1]
    assert f"'train/loss': {json.loads(last)['metrics']['loss']}" in again.stdout


@pytest.mark.slow
def test_a_file_works_like_a_module(tmp_path):
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/alone.py").write_text(EXPERIMENT.replace("def load()", "from beside import SEED\ndef load()"))
    (tmp_path / "deep/er/beside.py").write_text("SEED = 0\n")
    words = ["train", "deep/er/alone.py", "--args.size", "2", "--workdir", "out"]
    said = python("-m", "equikd", *words, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model"]["__qualname__"] == "alone:Affine"
    loaded = "from equikd.config import from_json; print(int(from_json(open(PATH).read()).train().state.step))"
    again = python("-c", loaded.replace("PATH", repr(str(tmp_path / "out/config.json"))), cwd=tmp_path / "deep/er")
    assert again.stdout.splitlines()[-1:] == ["10"], again.stderr


def test_wrong_words_are_told_before_data_is_loaded(tmp_path):
    program = """
import sys
from equikd.cli import main
codes = [main(["train", "equikd.examples.digits", flag]) for flag in sys.argv[1:]]
print(codes, "sklearn" in sys.modules, "orbax" in sys.modules, "jax" in sys.modules)
"""
    flags = ["--cfg.optimizer.learning_rat=1", "--cfg.num_steps=abc", "--args.dropout=2", "--cfg.num_steps=0"]
    said = python("-c", program, *flags, cwd=tmp_path)
    assert said.stdout == "[2, 2, 2, 2] False False True\n", said.stderr
    assert "'optimizer.learning_rate'" in said.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_module_as_a_process(tmp_path):
    said = python("-m", "equikd", "train", "equikd.examples.digit", cwd=tmp_path)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith("there is no module 'equikd.examples.digit'")
    assert "'equikd.examples.digits'" in said.stderr


@pytest.mark.slow
def test_an_interrupt_leaves_a_sane_terminal(tmp_path):
    """Ctrl-C in a terminal: a short line, exit code 130, the cursor visible again, the checkpoint usable."""
    master, slave = pty.openpty()
    words = ["train", DIGITS, "--cfg.num_steps=1_000_000", "--cfg.checkpoints.every=100", "--args.width=16"]
    process = subprocess.Popen(
        [sys.executable, "-m", "equikd", *words],
        cwd=tmp_path,
        env=ENVIRONMENT | {"TERM": "xterm"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    said, deadline = b"", time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                said += os.read(master, 65536)
            except OSError:  # the other end is closed
                break
        if (tmp_path / "runs/digits/checkpoints/200").exists() and b"test" in said:
            process.send_signal(signal.SIGINT)
            break
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        said += chunk
    os.close(master)
    text = said.decode()
    assert process.wait(60) == 130, text
    assert "Traceback" not in text
    last = text.rstrip().splitlines()[-1]
    assert re.search(r"interrupted; the same command goes on from step \d+$", last), text[-500:]
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


# --- training, in this process ----------------------------------------------------------------------------------------


def test_the_same_command_again_resumes(run, config_file):
    path = config_file("again", EXPERIMENT)
    words = ("train", path, "--args.size=2", "--workdir=out")
    assert run(*words).code == 0
    assert "out is complete at step 10" in run(*words).error
    more = run(*words, "--cfg.num_steps", "15", "--cfg.optimizer.learning-rate=1e-3")
    assert more.code == 0
    assert more.error.splitlines()[:3] == [
        f"resuming {Path.cwd()}/out at step 10 of 15, with a changed config:",
        "optimizer.learning_rate  0.1 -> 0.001",
        "num_steps                 10 -> 15",
    ]
    assert more.out.startswith(f"{path}, 15 steps, in out\n")


def test_the_work_directory_is_named_after_the_module(run, config_file):
    assert run("train", config_file("named", EXPERIMENT), "--args.size=2", "--cfg.writers=").code == 0
    assert [p.name for p in Path("runs").iterdir()] == ["named"]


def test_data_that_ends_early(run, config_file, snapshot):
    text = EXPERIMENT.replace("ek.data.InMemory(ek.lazy(load)(), batch_size=8)", "ek.data.Iterable(read)")
    text += "\n\ndef read():\n    for _ in range(4):\n        yield load()\n"
    said = run("train", config_file("ends", text), "--args.size=2")
    assert said.code == 2
    snapshot("data_ends", said.error)


def test_help(run, config_file):
    for words in (["--help"], ["-h"], ["train", "--help"]):
        said = run(*words)
        assert said.code == 0
        assert said.out.startswith("usage: equikd COMMAND MODULE")
    assert run().code == 2
    said = run("train", DIGITS, "--help")
    assert said.code == 0
    assert "sklearn" not in said.out
    for text in ("--args.learning_rate FLOAT", "Step size of AdamW. (default: 0.003)", "--workdir", "runs/digits"):
        assert text in said.out
    for text in ("--cfg.optimizer.learning_rate=0.003", "--cfg.evals.test.every=200", "--cfg.num_steps=1000"):
        assert f"\n  {text}\n" in said.out
    live = EXPERIMENT.replace("ek.lazy(load)()", "load()").replace("size: int\n", "size: int = 2\n")
    assert "array(" not in run("train", config_file("live", live), "--help").out
    required = run("train", config_file("required", EXPERIMENT), "--help")
    assert required.code == 0
    assert "Rows and columns, which has no default. (required)" in required.out
    assert "--args.label STR" in required.out


def test_version(run):
    assert run("--version").out == f"equikd {equikd.__version__}\n"


# --- refusals, in this process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("command", ["trian", DIGITS]),
        ("no_module", ["train"]),
        ("no_module_to_check", ["check", "--memory"]),
        ("no_module_of_paths", ["paths"]),
        ("check_data", ["check", DIGITS, "--args.batch_size=5000"]),
        ("check_key_path", ["check", DIGITS, "--cfg.inputs.x=batch.imagee"]),
        ("flag_first", ["train", "--workdir", "a", DIGITS]),
        ("module", ["train", "equikd.example.digits"]),
        ("no_such_module", ["train", "nowhere_at_all"]),
        ("not_a_module", ["train", "equikd examples"]),
        ("file", ["train", "no/such/file.py"]),
        ("path", ["train", DIGITS, "--cfg.optimizer.learning_rat=1e-3"]),
        ("paths", ["train", DIGITS, "--cfg.optimiser.b1=1", "--cfg.num_stepss=3", "--cfg.log_every=often"]),
        ("key_path", ["train", DIGITS, "--cfg.inputs.x=batch.imagee"]),
        ("key_paths", ["train", DIGITS, "--cfg.losses.ce.logits=pred", "--cfg.metrics.accuracy.labels=batch.labels"]),
        ("value_int", ["train", DIGITS, "--cfg.num_steps=abc"]),
        ("value_float", ["train", DIGITS, "--cfg.optimizer.learning_rate=fast"]),
        ("validate", ["train", DIGITS, "--args.dropout=2"]),
        ("validate_trainer", ["train", DIGITS, "--cfg.num_steps=0", "--cfg.checkpoints.keep=0"]),
        ("shape", ["train", DIGITS, "--cfg.model.pixels=10"]),
        ("batch_larger_than_data", ["train", DIGITS, "--args.batch_size=5000"]),
        ("no_value", ["train", DIGITS, "--cfg.num_steps"]),
        ("twice", ["train", DIGITS, "--cfg.num_steps=1", "--cfg.num-steps=2"]),
        ("writers", ["train", DIGITS, "--cfg.writers=console,tensorboard"]),
        ("user_error", ["train", DIGITS, "--cfg.train_data.arrays.split=validation"]),
    ],
)
def test_wrong_words(run, snapshot, name, words):
    text = refused(run(*words))
    snapshot(name, re.sub(r"(where: +)\S+\.py:\d+, in \S+", r"\1(a line)", text))


def test_wrong_flags_of_the_settings(run):
    """The texts are tyro's."""
    assert "--args.width" in refused(run("train", DIGITS, "--args.widht=3"))
    assert "abc" in refused(run("train", DIGITS, "--args.width=abc"))
    assert "nonsense" in refused(run("train", DIGITS, "nonsense"))
    assert "--workdri" in refused(run("train", DIGITS, "--workdri=3"))


BAD_MODULES = {
    "no_get_config": "def get_confg(): ...",
    "other_type": "def get_config(): return {'model': None}",
    "unknown_argument": "import optax, equikd as ek\ndef get_config(): return ek.lazy(optax.adamw)(learning_rat=1e-3)",
    "built_optimizer": """
import optax, equikd as ek
def get_config(): return ek.Trainer(optimizer=optax.adamw(1e-3), train_data=None, num_steps=3)
""",
    "no_data": """
import optax, equikd as ek
def get_config(): return ek.Trainer(optimizer=ek.lazy(optax.adamw)(1e-3), train_data=None, num_steps=3, losses={
    "mse": ek.losses.SquaredError(preds="preds", targets="batch.x")})
""",
    "missing_import": "import numpy\nimport no_such_package_at_all",
    "syntax": "import math\n\ndef get_config( return",
    "exits": "import sys\nsys.exit('no data here')",
    "relative_import": "from . import beside",
    "untyped_settings": "def get_config(args): ...",
    "two_settings": "def get_config(a: int = 1, b: int = 2): ...",
    "wrong_batch": EXPERIMENT.replace("size=(32, 2)", "size=(32, 3)").replace("size: int\n", "size: int = 2\n"),
}


@pytest.mark.parametrize("name", BAD_MODULES)
def test_wrong_modules(run, config_file, snapshot, name):
    text = refused(run("train", config_file(name, BAD_MODULES[name])))
    snapshot(f"module_{name}", text.replace(str(Path.cwd()), "CWD"))


def test_names_of_files(run, config_file, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/my-config.py").write_text("")
    (tmp_path / "files/json.py").write_text("def get_config(): ...")
    assert "rename it, such as my_config.py" in refused(run("train", "files/my-config.py"))
    assert "would hide the module 'json'" in refused(run("train", "files/json.py"))
    config_file("experiment", "def get_config(): ...")
    assert "'files/experiment.py'" in refused(run("train", "files/experimnt.py"))
    assert "'files/experiment.py'" in refused(run("train", "files/experiment"))


def test_a_file_named_like_an_installed_module(run, config_file, monkeypatch, tmp_path):
    """It is refused before the import, which would give the file to whoever imports the module."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/installed_here.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    for name in ("sched", "installed_here"):
        text = refused(run("train", config_file(name, EXPERIMENT)))
        assert f"{name}.py would hide the module '{name}'" in text
        assert "rename the file" in text
        assert name not in sys.modules


def test_a_link_is_loaded_under_its_own_name(config_file, monkeypatch, tmp_path):
    """Beside the target of the link lies another file of the name of the link."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config_file("linked", "which = 'other'\ndef get_config(): ...")
    config_file("target_of_link", "import beside_target\nwhich = 'target'\ndef get_config(): ...")
    config_file("beside_target", "")
    Path("links").mkdir()
    Path("links/linked.py").symlink_to(tmp_path / "files/target_of_link.py")
    module = load_module("links/linked.py")
    assert module.which == "target"
    assert load_module("links/linked.py") is module


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--args.size=2", "--args.size=2"], "--args.size"),
        (["--args.size", "2", "--args.size=3"], "--args.size"),
        (["--args.size=2", "--workdir", "a", "--workdir=b"], "--workdir"),
        (["--args.size=2", "--args.big", "--args.no-big"], "--args.big"),
        (["--args.size=2", "--args.big=True", "--args.big=False"], "--args.big"),
    ],
)
def test_a_flag_given_twice(run, config_file, flags, named):
    text = EXPERIMENT.replace("size: int\n", "size: int\n    big: bool = False\n")
    assert text != EXPERIMENT
    assert f"{named}: given twice" in refused(run("train", config_file("repeated", text), *flags))


MODEL_OF_ONES_OWN = """import equinox as eqx, jax.numpy as jnp, numpy as np, optax, equikd as ek
class Net(eqx.Module):
    linear: eqx.nn.Linear
    def __init__(self, *, key):
        self.linear = eqx.nn.Linear(2, 2, key=key)
    def __call__(self, x):
        return BODY
def get_config():
    data = {"x": np.ones((8, 2), np.float32)}
    return ek.Trainer(model=ek.lazy(Net)(), inputs={"x": "batch.x"}, optimizer=ek.lazy(optax.sgd)(0.1),
        losses={"a": ek.losses.SquaredError(preds="preds", targets="batch.x")}, num_steps=1,
        train_data=ek.data.InMemory(data, batch_size=4))
"""


@pytest.mark.parametrize("command", ["train", "check", "paths"])
def test_faults_of_user_code_are_told_by_their_own_lines(run, config_file, command):
    text = refused(run(command, config_file(f"fault_{command}", "def get_config():\n    return 1 / 0")))
    assert text.splitlines()[:2] == ["ZeroDivisionError: division by zero", "in your code:"]
    assert re.search(rf"  .*fault_{command}\.py:2 in get_config: return 1 / 0", text)


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("branch", "x if x.mean() > 0 else -x", "TracerBoolConversionError"),
        ("misspelt", "self.nothing_of_that_name(x)", "AttributeError"),
        ("numpy", "jnp.asarray(__import__('numpy').asarray(x))", "TracerArrayConversionError"),
    ],
)
def test_faults_in_the_model_are_one_screen(run, config_file, name, body, said):
    path = config_file(f"model_{name}", MODEL_OF_ONES_OWN.replace("BODY", body))
    for command in ("check", "train"):
        text = refused(run(command, path))
        assert text.startswith(f"{said}: ")
        assert f"model_{name}.py:7 in __call__: return {body}" in text


def test_faults_below_a_node_name_its_path_and_line(run, config_file):
    path = config_file("below", EXPERIMENT.replace("size=(32, 2)", "size=(32, -2)"))
    text = refused(run("train", path, "--args.size=2"))
    assert text.startswith("ValueError: ")
    assert "while resolving train_data.arrays = below.load()" in text
    assert re.search(r"  .*below\.py:\d+ in load: return", text)


def test_the_traceback_is_there_on_request(run, monkeypatch):
    monkeypatch.setenv("EQUIKD_TRACEBACK", "1")
    said = run("train", DIGITS, "--cfg.num_steps=abc")
    assert said.code == 2
    assert "Traceback (most recent call last):" in said.error


def test_a_resume_of_another_structure(run, config_file):
    path = config_file("structure", EXPERIMENT.replace("np.random", "(lambda: 0)() or np.random"))
    assert run("train", path, "--args.size=2", "--workdir=out").code == 0
    before = sorted((str(p), p.stat().st_mtime_ns) for p in Path("out").rglob("*"))
    said = run("train", path, "--args.size=2", "--workdir=out", "--cfg.num_steps=20", "--cfg.optimizer.momentum=0.9")
    assert "train in a new work directory" in refused(said)
    assert "optimizer" in said.error
    assert sorted((str(p), p.stat().st_mtime_ns) for p in Path("out").rglob("*")) == before


def test_a_directory_that_is_no_run(run, config_file):
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    said = run("train", config_file("norun", EXPERIMENT), "--args.size=2", "--workdir=out")
    assert said.code == 2
    assert "not a run directory" in said.error
    assert [p.name for p in Path("out").iterdir()] == ["notes.txt"]


def test_load_module_as_a_function(config_file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = load_module(config_file("loaded", EXPERIMENT))
    assert module is load_module("files/loaded.py") is sys.modules["loaded"]
    assert load_module(DIGITS).get_config is get_config
    with pytest.raises(ConfigError):
        load_module("files/missing.py")


SWITCHES = """
import equikd as ek


@ek.config.config
class Inner:
    deep: bool = True


@ek.config.config
class Settings:
    fast: bool = False
    use_it: bool = True
    inner: Inner = Inner()


def get_config(settings: Settings = Settings()):
    raise ValueError(f"{settings.fast} {settings.use_it} {settings.inner.deep}")
"""


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("--args.fast=True --args.use_it=False --args.inner.deep=no", "True False False"),
        ("--args.fast --args.no-use_it --args.inner.no-deep", "True False False"),
        ("--args.fast true --args.use-it off --args.inner.deep=1", "True False True"),
        ("--args.no-fast", "False True True"),
    ],
)
def test_bools_of_the_settings(run, config_file, words, read):
    path = config_file("switches", SWITCHES)
    assert refused(run("train", path, *words.split())).startswith(f"ValueError: {read}\n")


def test_a_bool_is_nothing_else(run, config_file):
    assert "maybe" in refused(run("train", config_file("switches", SWITCHES), "--args.fast=maybe"))


def test_examples_without_scikit_learn(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    text = refused(run("train", DIGITS))
    assert text.startswith("ModuleNotFoundError")
    assert 'pip install "equikd[examples]"' in text


# --- check and paths --------------------------------------------------------------------------------------------------


def test_check_tells_what_the_experiment_consists_of(run, tmp_path):
    said = run("check", DIGITS, "--args.batch-size=32", "--cfg.losses.ce.label_smoothing=0.2")
    assert (said.code, said.error) == (0, "")
    assert re.search(r"batch\.image +f32\[32,8,8\] +inputs\.x\n", said.out)
    assert re.search(r"optimizer\.learning_rate +traced\n", said.out)
    assert "Memory" not in said.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--memory", "--memory=true"])
def test_check_with_memory(run, flag):
    said = run("check", DIGITS, flag, "--args.width=16")
    assert re.search(r"\n  arguments +[\d.]+ KiB\n", said.out)


def test_paths_are_the_keys_that_connect(run):
    said = run("paths", DIGITS)
    assert said.code == 0
    named = re.findall(r"^  (\S+)  ", said.out, re.MULTILINE)
    assert {"batch.image", "batch.label", "preds", "mask", "grads.**"} <= {*named}
    wired = run("check", DIGITS, "--cfg.metrics.accuracy.preds=" + "preds", "--cfg.metrics.accuracy.mask=mask")
    assert wired.code == 0


def test_paths_list_the_intermediates(run):
    said = run("paths", DIGITS, "--args.width=16", "--args.batch-size=32")
    assert re.search(r"^  interms\.hidden\[1\] +f32\[32,16\]$", said.out, re.MULTILINE)
    assert re.search(r"^  interms\.dropout\[0\] +f32\[32,16\]$", said.out, re.MULTILINE)


def test_paths_of_a_step_of_ones_own_that_calls_the_model_otherwise(run):
    said = run("paths", "equikd.examples.gan")
    assert said.code == 0
    assert said.out.endswith("Intermediates\n  unknown: the trainer's own step calls the model in its own way\n")


@pytest.mark.parametrize("command", ["check", "paths"])
def test_check_and_paths_have_help_and_only_their_own_flags(run, command):
    helped = run(command, DIGITS, "--help")
    assert helped.code == 0
    assert "--args.width" in helped.out
    assert "--workdir" not in helped.out
    assert ("--memory" in helped.out) == (command == "check")
    assert "--workdir" in refused(run(command, DIGITS, "--workdir=here"))
