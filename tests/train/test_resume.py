"""Going on: a run that was stopped, anyhow and anywhere, ends as one that was not."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.config import from_json
from equikd.errors import CheckpointError, ConfigError, DataError, EquikdError
from equikd.train._checkpoint import CheckpointStore
from tests.train._experiment import Args, Net, Stop, get_config, load
from tests.train._runs import assert_same, rows

ROOT = Path(__file__).parents[2]


def contents(folder: Path) -> dict[str, str]:
    """Hash of each file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stop(trainer: ek.Trainer, workdir: Path, at: int, how: str = "interrupt") -> None:
    """Train until a step, and stop there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_AT", str(at))
        patch.setenv("STOP_HOW", how)
        with pytest.raises(KeyboardInterrupt if how == "interrupt" else OSError):
            trainer.train(workdir)


# --- nothing is lost --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_ends_as_an_uninterrupted_one(tmp_path):
    whole = get_config().train(tmp_path / "whole")
    command = [
        sys.executable,
        "-m",
        "equikd",
        "train",
        "tests.train._experiment",
        "--workdir",
        str(tmp_path / "killed"),
    ]
    killed = subprocess.run(command, cwd=ROOT, env=os.environ | {"STOP_AT": "137", "STOP_HOW": "kill"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(p.name for p in (tmp_path / "killed/checkpoints").iterdir() if p.name.isdigit()) == ["100", "50"]

    resumed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "at step 100 of 200" in resumed.stderr
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    again = get_config().train(tmp_path / "killed")  # at its end: what the last checkpoint holds
    assert_same(again.state, whole.state)
    assert again.metrics == whole.metrics
    assert_same(next(get_config().batches(again.state)), next(get_config().batches(whole.state)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs by their settings, each made once."""
    made: dict[Args, tuple[ek.train.Result, Path]] = {}

    def run(args: Args) -> tuple[ek.train.Result, Path]:
        if args not in made:
            workdir = tmp_path_factory.mktemp("whole") / "run"
            made[args] = get_config(args).train(workdir), workdir
        return made[args]

    return run


@pytest.mark.parametrize(
    ("stops", "log_every", "save_every", "eval_every"),
    [
        ((137,), 50, 50, 70),  # intervals end at checkpoints
        pytest.param((137, 151), 30, 50, 70, marks=pytest.mark.slow),  # stopped twice
        pytest.param((49,), 30, 50, 20, marks=pytest.mark.slow),  # before the first checkpoint
        pytest.param((51, 99, 100, 101), 7, 50, 33, marks=pytest.mark.slow),
        pytest.param((199,), 1000, 45, 1000, marks=pytest.mark.slow),  # one interval over all
        ((60,), 1, 20, 20),
    ],
)
def test_wherever_it_stops_it_ends_the_same(tmp_path, whole, compilations, stops, log_every, save_every, eval_every):
    args = Args(log_every=log_every, save_every=save_every, eval_every=eval_every)
    reference, workdir = whole(args)
    for step in stops:
        stop(get_config(args), tmp_path / "run", step)
    compilations.clear()
    result = get_config(args).train(tmp_path / "run")
    assert not [name for name in compilations.names if "step" in name or "eval" in name]
    assert_same(result.state, reference.state)
    assert rows(tmp_path / "run") == rows(workdir)
    assert result.metrics == reference.metrics


def test_a_failing_writer_loses_nothing(tmp_path, whole):
    reference, workdir = whole(Args())
    stop(get_config(), tmp_path / "run", 137, "error")
    assert all(row["step"] <= 120 for row in rows(tmp_path / "run"))  # whole lines
    result = get_config().train(tmp_path / "run")
    assert_same(result.state, reference.state)
    assert rows(tmp_path / "run") == rows(workdir)


def test_streaming_data_goes_on_at_the_next_element(tmp_path):
    def read() -> Any:
        for number in range(40):
            yield {"x": np.full((4, 2), number, np.float32)}

    def trainer(num_steps: int) -> ek.Trainer:
        return small(train_data=ek.data.Iterable(read), num_steps=num_steps)

    whole = trainer(30).train()
    trainer(17).train(tmp_path / "run")
    assert_same(trainer(30).train(tmp_path / "run").state, whole.state)


def test_data_that_ends_early_keeps_what_was_made(tmp_path):
    def read() -> Any:
        for number in range(25):
            yield {"x": np.full((4, 2), number, np.float32)}

    trainer = small(train_data=read, num_steps=100, log_every=10)
    with pytest.raises(DataError, match="25 batches, but num_steps is 100"):
        trainer.train(tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == [10, 20]
    result = ek.override(trainer, {"num_steps": 25}).train(tmp_path / "run")
    assert int(result.state.step) == 25


def small(**changes: Any) -> ek.Trainer:
    """A linear model on two numbers."""
    given: dict[str, Any] = {
        "model": ek.lazy(eqx.nn.Linear)(2, 2),
        "inputs": {"x": "batch.x"},
        "losses": {"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        "optimizer": ek.lazy(optax.adam)(0.1),
        "train_data": ek.data.InMemory({"x": np.arange(32, dtype=np.float32).reshape(16, 2) / 32}, batch_size=4),
        "num_steps": 20,
        "writers": (),
        "checkpoints": ek.train.Checkpoints(every=10),
    }
    return ek.Trainer(**given | changes)


def test_a_live_model_goes_on_too(tmp_path):
    model = eqx.nn.Linear(2, 2, key=jax.random.key(7))
    trainer = small(model=None, num_steps=20)
    whole = trainer.train(model=model)
    ek.override(trainer, {"num_steps": 10}).train(tmp_path / "run", model=model)
    other = eqx.nn.Linear(2, 2, key=jax.random.key(8))  # only its structure counts now
    assert_same(trainer.train(tmp_path / "run", model=other).state, whole.state)


# --- a run at its end -------------------------------------------------------------------------------------------------


def test_a_finished_run_gives_its_results_again(tmp_path, whole, capsys, compilations):
    reference, _ = whole(Args())
    first = get_config().train(tmp_path / "run")
    before = contents(tmp_path / "run")
    capsys.readouterr()
    compilations.clear()
    again = get_config().train(tmp_path / "run")
    assert not [name for name in compilations.names if "step" in name or "eval" in name]
    assert contents(tmp_path / "run") == before
    assert_same(again.state, first.state)
    assert again.metrics == first.metrics == reference.metrics
    assert {row.split for row in again.history} == {"train", "test"}
    assert "run is complete at step 200; to train on, raise num_steps" in capsys.readouterr().err


def test_more_steps_go_on(tmp_path, whole):
    reference, _ = whole(Args())
    get_config(Args(num_steps=150)).train(tmp_path / "run")
    result = get_config().train(tmp_path / "run")
    assert_same(result.state, reference.state)
    written = rows(tmp_path / "run")
    assert [row["step"] for row in written if row["split"] == "train"] == [30, 60, 90, 120, 150, 180, 200]


def test_fewer_steps_than_were_made_are_refused(tmp_path, snapshot):
    get_config(Args(num_steps=100)).train(tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        get_config(Args(num_steps=80)).train(tmp_path / "run")
    snapshot("fewer_steps", str(error.value).replace(str(tmp_path), "RUNS"))
    assert contents(tmp_path / "run") == before


def test_a_run_cut_short_at_its_checkpoint_is_completed(tmp_path, whole):
    reference, workdir = whole(Args(num_steps=100))
    stop(get_config(), tmp_path / "run", 137)
    result = get_config(Args(num_steps=100)).train(tmp_path / "run")  # its last rows were never made
    assert rows(tmp_path / "run") == rows(workdir)
    assert_same(result.state, reference.state)
    assert result.metrics == reference.metrics


def test_a_finished_run_without_its_rows_gets_no_empty_ones(tmp_path):
    first = get_config(Args(num_steps=60)).train(tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").unlink()
    again = get_config(Args(num_steps=60)).train(tmp_path / "run")
    assert [row["split"] for row in rows(tmp_path / "run")] == ["test"]
    assert again.metrics == {name: value for name, value in first.metrics.items() if name.startswith("test/")}


def test_a_new_eval_of_a_finished_run_is_added(tmp_path):
    get_config(Args(num_steps=60)).train(tmp_path / "run")
    before = rows(tmp_path / "run")
    trainer = get_config(Args(num_steps=60))
    trainer = dataclasses.replace(trainer, evals={**trainer.evals, "other": trainer.evals["test"]})
    result = trainer.train(tmp_path / "run")
    assert rows(tmp_path / "run")[:-1] == before
    assert rows(tmp_path / "run")[-1] | {"split": "test"} == before[-1]
    assert result.metrics["other/loss"] == result.metrics["test/loss"]


# --- another config ---------------------------------------------------------------------------------------------------


def test_the_config_wins_and_says_so(tmp_path, capsys):
    get_config(Args(num_steps=100)).train(tmp_path / "run")
    old_text = (tmp_path / "run/config.json").read_text()
    capsys.readouterr()
    changes = {
        "num_steps": 130,
        "optimizer.learning_rate.peak_value": 0.5,
        "model.dropout": 0.0,
        "losses.ce.weight": 2.0,
        "log_every": 10,
    }
    trainer = ek.override(get_config(Args(num_steps=100)), changes)
    result = trainer.train(tmp_path / "run")

    error = capsys.readouterr().err
    assert "at step 100 of 130, with a changed config:" in error
    for path in changes:
        assert re.search(rf"^{re.escape(path)} +\S+ -> ", error, re.MULTILINE), path
    assert len(error.splitlines()) == 1 + len(changes)
    assert from_json((tmp_path / "run/config.json").read_text()) == trainer
    assert (tmp_path / "run/config.100.json").read_text() == old_text

    state = get_config(Args(num_steps=100)).train().state  # the same by hand: new rates on the old state
    for batch, _ in zip(trainer.batches(state), range(30), strict=False):
        state, _ = ek.train.step(trainer, state, batch)
    assert_same(result.state, state)


def test_a_changed_seed_changes_data_and_keys_alike(tmp_path):
    get_config(Args(num_steps=50)).train(tmp_path / "run")
    trainer = ek.override(get_config(Args(num_steps=60)), {"seed": 5})
    result = trainer.train(tmp_path / "run")
    assert_same(result.state.key, trainer.init().key)
    state = eqx.tree_at(lambda s: s.key, get_config(Args(num_steps=50)).train().state, trainer.init().key)
    for batch, _ in zip(trainer.batches(state), range(10), strict=False):
        state, _ = ek.train.step(trainer, state, batch)
    assert_same(result.state, state)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("width", {"model.width": 24}),
        ("optimizer", {"optimizer": ek.lazy(optax.sgd)(0.1)}),
        ("trainable", {"trainable": "last.*"}),
    ],
)
def test_another_structure_is_refused(tmp_path, snapshot, name, changes):
    get_config(Args(num_steps=100)).train(tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(CheckpointError) as error:
        ek.override(get_config(Args(num_steps=120)), changes).train(tmp_path / "run")
    text = str(error.value).replace(str(tmp_path), "RUNS")
    assert "new work directory" in text
    assert len(text.splitlines()) < 40
    snapshot(f"structure_{name}", text)
    assert contents(tmp_path / "run") == before


def test_other_metrics_begin_a_new_interval(tmp_path, capsys):
    stop(get_config(), tmp_path / "run", 137)
    trainer = get_config()
    more = ek.metrics.Mean(values="preds")
    trainer = dataclasses.replace(trainer, metrics={**trainer.metrics, "mean": more})
    trainer.train(tmp_path / "run")
    assert "metrics.mean" in capsys.readouterr().err
    names = {row["step"]: set(row["metrics"]) for row in rows(tmp_path / "run") if row["split"] == "train"}
    assert "mean" not in names[90]
    assert "mean" in names[120]


@pytest.mark.slow
def test_a_metric_of_something_else_begins_a_new_interval(tmp_path):
    def largest(path, workdir):
        trainer = dataclasses.replace(get_config(), metrics={"largest": ek.metrics.Max(values=path)})
        return trainer, lambda: {r["step"]: r["metrics"].get("largest") for r in rows(workdir) if r["split"] == "train"}

    one, _ = largest("batch.x", tmp_path / "run")
    stop(one, tmp_path / "run", 110)
    other, found = largest("batch.x[:, 0]", tmp_path / "run")
    other.train(tmp_path / "run")
    alone, expected = largest("batch.x[:, 0]", tmp_path / "alone")
    alone.train(tmp_path / "alone")
    assert found()[90] > expected()[90]
    assert found()[120] <= expected()[120]  # not that of all columns before the stop
    assert found()[150] == expected()[150]


def test_a_run_without_a_checkpoint_starts_again(tmp_path, capsys, whole):
    reference, workdir = whole(Args())
    stop(get_config(), tmp_path / "run", 20)
    capsys.readouterr()
    result = get_config().train(tmp_path / "run")
    assert "holds no checkpoint: starting at step 0" in capsys.readouterr().err
    assert_same(result.state, reference.state)
    assert rows(tmp_path / "run") == rows(workdir)


def test_no_checkpoints_are_saved_on_request(tmp_path):
    trainer = small(checkpoints=None)
    first = trainer.train(tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()
    assert_same(trainer.train(tmp_path / "run").state, first.state)


def test_a_broken_checkpoint_says_how_to_go_on(tmp_path, snapshot):
    get_config(Args(num_steps=100)).train(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/100/arrays/d")
    with pytest.raises(CheckpointError) as error:
        get_config(Args(num_steps=150)).train(tmp_path / "run")
    text = re.sub(r"got:.*", "got:      (the cause)", str(error.value))
    snapshot("broken", text.replace(str(tmp_path), "RUNS"))
    shutil.rmtree(tmp_path / "run/checkpoints/100")
    assert int(get_config(Args(num_steps=150)).train(tmp_path / "run").state.step) == 150

    (tmp_path / "run/checkpoints/150/checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match="checkpoint 150 cannot be read"):
        get_config(Args(num_steps=150)).train(tmp_path / "run")


# --- what only this process has ---------------------------------------------------------------------------------------


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    return load(64, seed)


def with_arrays(**data: dict[str, np.ndarray]) -> ek.Trainer:
    trainer = get_config(Args(num_steps=20))
    test = ek.evals.Eval(data=ek.data.InMemory(data["test"], batch_size=32))
    return dataclasses.replace(trainer, train_data=ek.data.InMemory(data["train"], batch_size=32), evals={"test": test})


def test_the_same_arrays_go_on(tmp_path, capsys):
    with_arrays(train=arrays(), test=arrays(1)).train(tmp_path / "run")
    assert "train_data.arrays: holds arrays, which JSON does not" in capsys.readouterr().err
    plain = json.loads((tmp_path / "run/config.json").read_text())
    spec = plain["train_data"]["arrays"]["__opaque__"]["['x']"]
    assert (spec["dtype"], spec["shape"]) == ("float32", [64, 6])
    assert len(spec["hash"]) == 16
    again = ek.override(with_arrays(train=arrays(), test=arrays(1)), {"num_steps": 30})
    whole = ek.override(with_arrays(train=arrays(), test=arrays(1)), {"num_steps": 30}).train()
    assert_same(again.train(tmp_path / "run").state, whole.state)
    assert capsys.readouterr().err.splitlines()[1:] == ["num_steps  20 -> 30"]


def test_other_arrays_are_refused(tmp_path, snapshot):
    with_arrays(train=arrays(), test=arrays(1)).train(tmp_path / "run")
    before = contents(tmp_path / "run")
    other = {"x": arrays(2)["x"], "label": arrays()["label"]}
    fewer = {name: column[:32] for name, column in arrays(1).items()}
    with pytest.raises(ConfigError) as error:
        with_arrays(train=other, test=fewer).train(tmp_path / "run")
    snapshot("other_arrays", str(error.value))
    assert contents(tmp_path / "run") == before


def test_what_cannot_be_loaded_trains_and_says_why(tmp_path, capsys, snapshot):
    class Local(eqx.nn.Linear):
        pass

    def trainer(num_steps: int) -> ek.Trainer:
        optimizer = ek.lazy(lambda rate: optax.chain(optax.clip(1.0), optax.sgd(rate)))(rate=0.1)
        return small(model=ek.lazy(Local)(2, 2), optimizer=optimizer, num_steps=num_steps)

    trainer(10).train(tmp_path / "run")
    snapshot("unloadable_note", capsys.readouterr().err.replace(str(tmp_path), "RUNS"))
    with pytest.raises(ConfigError, match="exists only in the process that wrote this config"):
        from_json((tmp_path / "run/config.json").read_text())
    result = trainer(20).train(tmp_path / "run")
    assert "num_steps  10 -> 20" in capsys.readouterr().err
    assert_same(result.state, trainer(20).train().state)


def test_directories_that_are_no_runs_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(EquikdError, match="not a run directory"):
        small().train(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]


def test_a_wrong_experiment_leaves_no_directory(tmp_path):
    wrong = [
        small(inputs={"x": "batch.y"}),
        small(writers=("console",)),
        small(num_steps=0),
        small(train_data=ek.data.InMemory({"x": np.zeros((3, 2), np.float32)}, batch_size=4)),
        small(optimizer=ek.lazy(optax.constant_schedule)(0.1)),
        small(evals={"test": ek.evals.Eval(data=ek.data.InMemory({"y": np.zeros((4, 2))}))}),
    ]
    for trainer in wrong:
        with pytest.raises(EquikdError):
            trainer.train(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_is_readable_alone(tmp_path):
    get_config(Args(num_steps=50)).train(tmp_path / "run")
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=1)
    assert store.read_facts(50)["step"] == 50
    assert isinstance(get_config().init().model, Net)
    assert Stop() in get_config().writers
