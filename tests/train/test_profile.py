"""A profile of a few steps: what it measures, what it writes, and what it leaves alone."""

import dataclasses
import gzip
import json
import os
import pathlib
import re
from typing import Any

import jax
import pytest

import equikd as ek
from equikd.errors import ConfigError, DataError, EquikdError
from equikd.train import Profile
from equikd.train._costs import Costs
from equikd.train._directory import RunDirectoryError
from tests.train._small import BATCH, BatchNormed, arrays, assert_same, evaluated, leaves, quick


def files(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def events(profile: Profile) -> list[dict[str, Any]]:
    (path,) = profile.directory.glob("*.trace.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def steps_of(profile: Profile) -> list[int]:
    return [int(one["args"]["step_num"]) for one in events(profile) if one.get("name") == "train"]


def test_a_trace_is_written_with_each_step_in_it(tmp_path):
    profile = quick().profile(tmp_path / "run", steps=4, warmup=1)
    assert profile.directory.parent == tmp_path / "run" / "profile" / "plugins" / "profile"
    assert sorted(steps_of(profile)) == [0, 1, 2, 3]
    assert sum(one.get("name") == "data" for one in events(profile)) == 4
    (planes,) = profile.directory.glob("*.xplane.pb")
    named = [
        event.name
        for plane in jax.profiler.ProfileData.from_file(str(planes)).planes
        for each in plane.lines
        for event in each.events
        if event.name == "train"
    ]
    assert len(named) == 4


def test_what_is_measured(tmp_path, compilations):
    profile = quick().profile(tmp_path, steps=3, warmup=0)
    assert compilations.names.count("jit(flat_step)") <= 1  # the costs are those of the program that has run
    assert (profile.steps, profile.rows) == (3, BATCH)
    assert 0 < profile.data_seconds + profile.dispatch_seconds < profile.seconds_per_step < 10
    assert profile.speed["examples_per_second"] == BATCH * profile.speed["steps_per_second"]
    assert profile.costs == ek.inspect.costs(quick())
    assert "model_flops_utilization" not in profile.speed  # a CPU has no peak that we know


def test_only_its_own_folder_is_written_and_nothing_is_trained_for_keeps(tmp_path):
    trainer = quick(num_steps=3)
    before = trainer.train(tmp_path)
    kept = files(tmp_path)
    profiles = [trainer.profile(tmp_path, steps=1, warmup=0) for _ in range(3)]  # within one second, perhaps
    assert len({one.directory for one in profiles}) == 3
    after = files(tmp_path)
    assert {path: data for path, data in after.items() if not path.startswith("profile/")} == kept
    assert_same(trainer.restore(tmp_path), before.state)


def test_a_run_may_begin_where_a_profile_was_taken(tmp_path):
    trainer = quick(num_steps=3)
    trainer.profile(tmp_path, steps=1, warmup=0)
    assert not (tmp_path / "config.json").exists()
    assert int(trainer.train(tmp_path).state.step) == 3


def test_no_eval_and_no_writer_is_asked(tmp_path, monkeypatch):
    def never(*args: Any, **fields: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("equikd.train._loop.run_eval", never)
    monkeypatch.setattr(ek.train.Console, "open", never)
    quick(evals=evaluated(every=1), writers=(ek.train.Console(),)).profile(tmp_path, steps=1, warmup=0)


def test_a_live_model_stays_the_callers(tmp_path):
    live = dataclasses.replace(quick(), model=None)
    model = quick().init().model
    before = leaves(model)
    live.profile(tmp_path, steps=2, warmup=0, model=model)
    assert_same(before, leaves(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": ek.sharding.data_parallel(2)},
        {"mesh": ek.sharding.fsdp(min_bytes=32)},
        {"precision": ek.optim.Precision()},
        {"accumulate": 4},
        {"model": ek.lazy(BatchNormed)()},
        {"guard": None},
        {"num_steps": 1},
    ],
    ids=str,
)
def test_with_all_that_a_trainer_may_have(tmp_path, fields):
    profile = quick(**fields).profile(tmp_path, steps=2, warmup=1)
    assert sorted(steps_of(profile)) == [0, 1]
    assert profile.costs.flops


def test_bad_arguments_are_refused_together_and_nothing_is_written(tmp_path, snapshot):
    with pytest.raises(ConfigError) as error:
        quick().profile(None, steps=0, warmup=-1)
    snapshot("arguments", str(error.value))
    for steps, warmup in ((2.0, 1), (True, 1), (1, None)):
        with pytest.raises(ConfigError, match="must be an int of at least"):
            quick().profile(tmp_path / "new", steps=steps, warmup=warmup)
    assert not (tmp_path / "new").exists()


def test_a_directory_of_others_is_refused(tmp_path, snapshot):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(RunDirectoryError) as error:
        quick().profile(tmp_path)
    snapshot("other_files", str(error.value).replace(str(tmp_path), "DIRECTORY"))
    assert files(tmp_path) == {"thesis.tex": b"all of it"}


def test_a_place_without_permission_is_refused(tmp_path, snapshot, monkeypatch):
    """By the mode of the directory; root may write anywhere, so for root `access` is made to answer."""
    tmp_path.chmod(0o555)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    try:
        with pytest.raises(RunDirectoryError) as error:
            quick().profile(tmp_path / "run")
    finally:
        tmp_path.chmod(0o755)
    snapshot("no_permission", str(error.value).replace(str(tmp_path), "DIRECTORY"))
    assert files(tmp_path) == {}


@pytest.mark.parametrize("given", [1, 6])
def test_data_that_ends_too_early_is_refused_and_leaves_no_trace(tmp_path, snapshot, given):
    """In the first window; and while the trace is taken."""
    rows = arrays(BATCH)
    data = lambda: iter([rows] * given)
    with pytest.raises(DataError) as error:
        quick(train_data=ek.data.Iterable(data)).profile(tmp_path, steps=2, warmup=2)
    snapshot(f"data_ends_{given}", str(error.value))
    assert files(tmp_path) == {}
    quick().profile(tmp_path, steps=1, warmup=0)  # the profiler has been stopped


def test_a_profile_inside_another_is_refused(tmp_path, snapshot):
    with jax.profiler.trace(tmp_path / "outer"), pytest.raises(EquikdError) as error:
        quick().profile(tmp_path / "inner", steps=1, warmup=0)
    snapshot("inside_another", str(error.value))
    assert files(tmp_path / "inner") == {}


def test_a_trace_that_is_not_written_is_an_error(tmp_path, monkeypatch, snapshot):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **options: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    with pytest.raises(RunDirectoryError) as error:
        quick().profile(tmp_path, steps=1, warmup=0)
    text = re.sub(r"\d{4}(_\d\d){5}", "TIME", str(error.value))
    snapshot("not_written", text.replace(str(tmp_path), "DIRECTORY"))


def test_the_experiment_is_checked_first(tmp_path):
    with pytest.raises(EquikdError, match="nowhere"):
        quick(inputs={"x": "batch.nowhere"}).profile(tmp_path)
    assert files(tmp_path) == {}


def test_the_table(snapshot):
    costs = Costs(2.5e12, 1e10, {"bfloat16": 2.4e12}, "NVIDIA H100 80GB HBM3", 1)
    profile = Profile(pathlib.Path("runs/a/profile"), 20, 256, 0.005, 0.001, 0.0004, costs)
    snapshot("table", str(profile))
    assert profile.speed["model_flops_utilization"] == pytest.approx(2.4e12 / 989.5e12 / 0.005)
