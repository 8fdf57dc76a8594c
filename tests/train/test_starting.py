"""Starting in a directory that holds something: nothing of it is lost, and a start that fails leaves it as it was."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest

import equikd as ek
from equikd.errors import CheckpointError, EquikdError
from equikd.train import Checkpoints, TensorBoard, load_model, save_model
from equikd.train._directory import RunDirectoryError
from tests.train._small import quick


def contents(path: Path) -> dict[str, bytes | None]:
    return {str(file): file.read_bytes() if file.is_file() else None for file in path.rglob("*")}


def short(**fields: Any) -> ek.Trainer:
    return quick(**{"num_steps": 4, "log_every": 2, "checkpoints": Checkpoints(every=2)} | fields)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run with checkpoints and rows."""
    path = tmp_path_factory.mktemp("stopped") / "a"
    short(writers=(TensorBoard(),)).train(path)
    return path


@pytest.fixture
def run(stopped, tmp_path) -> Path:
    return shutil.copytree(stopped, tmp_path / "a")


def refused(trainer: ek.Trainer, path: Path, kind: type[EquikdError] = RunDirectoryError) -> str:
    before = contents(path.parent)
    with pytest.raises(kind) as caught:
        trainer.train(path)
    assert contents(path.parent) == before
    text = str(caught.value)
    assert len(text.splitlines()) < 20
    return text.replace(str(path.parent), "TMP")


# --- what is there already --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"name": "a web app"}', "[]", "3", '{"__format__": 1, "__qualname__": "optax:sgd"}'])
def test_the_config_of_something_else(tmp_path, snapshot, text):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(text)
    snapshot("foreign_config", refused(short(), tmp_path / "a"))


@pytest.mark.parametrize("text", ["", '{"__format__": 1, ', "[" * 100_000, "\udcff"])
def test_a_broken_config(run, text):
    (run / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "config.json" in refused(short(), run)


def test_rows_of_an_earlier_start_are_kept(tmp_path, capsys):
    path = tmp_path / "a"
    rows = []
    for seed in (0, 0, 1):
        short(checkpoints=None, seed=seed).train(path)
        rows.append((path / "metrics.jsonl").read_bytes())
        said = capsys.readouterr().err
        kept = f"the rows of the earlier start are kept in metrics.{len(rows) - 1}.jsonl"
        assert (kept in said) == (len(rows) > 1)
    assert (path / "metrics.1.jsonl").read_bytes() == rows[0]
    assert (path / "metrics.2.jsonl").read_bytes() == rows[1]
    assert not (path / "metrics.3.jsonl").exists()
    assert json.loads((path / "config.0.json").read_text())["seed"] == 0


# --- starts that fail -------------------------------------------------------------------------------------------------


@ek.config.config
class Refusing:
    """A writer whose service cannot be reached."""

    def open(self, run: Any) -> Any:
        raise ConnectionError("no route to host")


def test_a_writer_that_cannot_open_leaves_no_directory(tmp_path):
    for writers in ((Refusing(), TensorBoard()), (TensorBoard(), Refusing())):
        with pytest.raises(ConnectionError):
            short(writers=writers).train(tmp_path / "runs" / "a")
        assert contents(tmp_path) == {}


def test_a_writer_that_cannot_open_leaves_a_run_as_it_was(run):
    before = contents(run)
    with pytest.raises(ConnectionError):
        short(writers=(TensorBoard(), Refusing()), num_steps=8).train(run)
    assert contents(run) == before


def test_broken_rows_leave_a_run_as_it_was(run):
    rows = run / "metrics.jsonl"
    rows.write_bytes(b"no row\n" + rows.read_bytes())
    assert "metrics.jsonl:1" in refused(short(writers=(TensorBoard(),), num_steps=8), run)


def test_rows_that_are_a_directory(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl: cannot be read" in refused(short(num_steps=8), run)
    shutil.rmtree(run / "checkpoints")
    assert "metrics.jsonl: cannot be read" in refused(short(num_steps=8), run)


# --- broken files -----------------------------------------------------------------------------------------------------


def document(**changes: Any) -> Any:
    return lambda plain: plain | changes


def without(*path: str) -> Any:
    def change(plain: dict[str, Any]) -> dict[str, Any]:
        above = plain
        for name in path[:-1]:
            above = above[name]
        del above[path[-1]]
        return plain

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: {"format": 1},
        lambda plain: [1],
        document(facts=3),
        document(leaves=[1]),
        document(leaves={"state.step": 3}),
        document(leaves={"": {"dtype": "int32", "shape": []}}),
        document(leaves={"state.[": {"dtype": "int32", "shape": []}}),
        document(leaves={"state.step": {"dtype": 3, "shape": 4}}),
        document(files=[3]),
        document(files=7),
        document(facts={"seconds": "long"}),
        without("facts", "seconds"),
        without("leaves"),
    ],
    ids=range(13),
)
def test_an_odd_checkpoint(run, change):
    path = run / "checkpoints" / "4" / "checkpoint.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert "checkpoint" in refused(short(num_steps=8), run, CheckpointError)


def test_a_checkpoint_that_nests_too_deep(run):
    (run / "checkpoints" / "4" / "checkpoint.json").write_text("[" * 100_000)
    assert "checkpoint 4 cannot be read" in refused(short(num_steps=8), run, CheckpointError)


@pytest.mark.parametrize(
    "change",
    [
        document(entries=5),
        document(entries={"weight": 5}),
        document(structure={"odd": [3]}),
        document(structure={"__qualname__": 5}),
        document(arrays=5),
        document(arrays=".."),
        without("structure"),
        without("entries"),
    ],
    ids=range(8),
)
def test_an_odd_model(tmp_path, change):
    save_model(tmp_path / "m", {"weight": jax.numpy.ones(2)})
    path = tmp_path / "m" / "model.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("deep", [400, 100_000])
def test_a_model_that_nests_too_deep(tmp_path, deep):
    save_model(tmp_path / "m", {"weight": jax.numpy.ones(2)})
    path = tmp_path / "m" / "model.json"
    plain = json.loads(path.read_text())
    structure = json.dumps(plain.pop("structure"))
    head = json.dumps(plain)[:-1]
    path.write_text(f'{head}, "structure": {"[" * deep}{structure}{"]" * deep}}}')
    with pytest.raises(CheckpointError):
        load_model(tmp_path / "m")
