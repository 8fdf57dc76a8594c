"""A run directory from end to end: what training leaves, and that it is enough to make the run again."""

import dataclasses
import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import equikd as ek
from equikd.config import from_json, to_json
from equikd.train import Checkpoints, CheckpointStore, TensorBoard
from equikd.train._writers import read_records
from equikd.tree import named_leaves
from tests.train._experiment import Args, get_config


def experiment(num_steps: int = 120, keep: int = 2) -> ek.Trainer:
    trainer = get_config(Args(num_steps=num_steps))
    return dataclasses.replace(trainer, writers=(TensorBoard(),), checkpoints=Checkpoints(every=25, keep=keep), seed=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run: its directory and its result."""
    workdir = tmp_path_factory.mktemp("runs") / "a"
    return workdir, experiment().train(workdir)


def arrays(state: Any) -> dict[str, bytes]:
    """The bits of parameters and optimizer state by path."""
    leaves = named_leaves(eqx.filter((state.model, state.opt_state), eqx.is_array))
    return {path: np.asarray(leaf).tobytes() for path, leaf in leaves.items()}


def test_it_holds_five_things(run):
    workdir, _ = run
    names = {path.name for path in workdir.iterdir()}
    assert names == {"config.json", "environment.json", "metrics.jsonl", "tensorboard", "checkpoints"}
    hidden = [path for path in workdir.rglob("*") if path.name.startswith(".") or path.name.endswith("tmp")]
    assert hidden == []


def test_the_config_trains_the_same_model_again(run):
    workdir, result = run
    text = (workdir / "config.json").read_text()
    trainer = from_json(text)
    assert trainer == experiment()
    assert json.loads(to_json(trainer)) == json.loads(text)
    again = trainer.train()
    assert again.metrics == result.metrics
    assert arrays(again.state) == arrays(result.state)


def test_the_environment_names_what_a_repetition_needs(run):
    facts = json.loads((run[0] / "environment.json").read_text())
    assert facts["seed"] == 3
    assert facts["python"] == platform.python_version()
    assert facts["packages"]["jax"] == importlib.metadata.version("jax")
    device = jax.devices()[0]
    devices = [{"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()}]
    assert facts["devices"] == devices
    assert facts["directory"] == str(Path.cwd())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", facts["started"])
    if facts["git"] is not None:
        assert re.fullmatch(r"[0-9a-f]{40}", facts["git"]["commit"])


def test_the_rows_are_those_of_the_result(run):
    workdir, result = run
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    for line in lines:
        assert [name for name in json.loads(line) if name != "speed"] == ["step", "split", "metrics", "seconds"]
    records = read_records(workdir / "metrics.jsonl")
    assert [(r.step, r.split, r.metrics) for r in records] == [(r.step, r.split, r.metrics) for r in result.history]
    assert [(r.step, r.split) for r in records] == [
        (30, "train"),
        (60, "train"),
        (70, "test"),
        (90, "train"),
        (120, "train"),
        (120, "test"),
    ]
    seconds = [r.seconds for r in records]
    assert seconds == sorted(seconds)
    assert {f"{records[-1].split}/{k}": v for k, v in records[-1].metrics.items()}.items() <= result.metrics.items()


def points(workdir: Path, split: str, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(workdir / "tensorboard" / split), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_holds_the_same_rows(run):
    workdir, result = run
    for split, name in (("test", "accuracy"), ("test", "loss"), ("train", "losses/ce"), ("train", "accuracy")):
        rows = [(row.step, np.float32(row.metrics[name])) for row in result.history if row.split == split]
        assert points(workdir, split, name) == rows
    assert [step for step, _ in points(workdir, "test", "accuracy")] == [70, 120]


def test_the_newest_checkpoints_are_kept(run):
    store = CheckpointStore(run[0] / "checkpoints", keep=2)
    assert store.steps() == (100, 120)
    facts = store.read_facts(120)
    assert (facts["step"], facts["seed"]) == (120, 3)
    assert facts["seconds"] == pytest.approx(run[1].history[-1].seconds, abs=5)


def test_a_resume_adds_to_the_same_files(tmp_path):
    whole = experiment().train(tmp_path / "whole")
    experiment(num_steps=70).train(tmp_path / "run")
    result = experiment().train(tmp_path / "run")
    assert points(tmp_path / "run", "test", "accuracy") == points(tmp_path / "whole", "test", "accuracy")
    assert [step for step, _ in points(tmp_path / "run", "train", "loss")] == [30, 60, 70, 90, 120]
    seconds = [record.seconds for record in read_records(tmp_path / "run/metrics.jsonl")]
    assert seconds == sorted(seconds)  # those of both sessions
    assert arrays(result.state) == arrays(whole.state)
    assert (tmp_path / "run/config.70.json").exists()
