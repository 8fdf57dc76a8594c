"""Many steps in one dispatch: results are those of single steps, and what is due comes after the same ones."""

import itertools
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.errors import ConfigError, DataError, NonFiniteError
from equikd.train import _feed
from equikd.train._boundaries import boundary
from tests.train import _experiment
from tests.train._runs import assert_same, rows
from tests.train._small import BatchNormed, Dropping, arrays, evaluated, leaves, quick, small

MANY = [7, 64]


class Custom:
    """A pipeline of somebody's own, whose batches are Batch objects of fresh numpy arrays."""

    def batches(self, start: int, seed: int) -> Iterator[ek.data.Batch]:
        for number in itertools.count(start):
            draw = np.random.default_rng((seed, number))
            label = draw.integers(0, 3, 8).astype(np.int32)
            x = (draw.normal(size=(8, 6)) + label[:, None]).astype(np.float32)
            yield ek.data.Batch({"x": x, "label": label}, draw.random(8) < 0.8)

    def epoch(self) -> Iterator[ek.data.Batch]:
        return itertools.islice(self.batches(0, 0), 4)

    def spec(self) -> ek.data.Batch:
        return ek.data.element_spec(next(self.epoch()))


def stream() -> Iterator[dict[str, np.ndarray]]:
    """Bare elements, made anew in the same arrays."""
    held = arrays(8, seed=5)
    for number in itertools.count():
        held["x"][:] = arrays(8, seed=number)["x"]
        held["label"][:] = arrays(8, seed=number)["label"]
        yield held


KINDS: dict[str, dict[str, Any]] = {
    "dropout": {},
    "ragged end": {"train_data": ek.data.InMemory(arrays(37), batch_size=10, drop_remainder=False)},
    "batch norm and averages": {
        "model": ek.lazy(BatchNormed)(momentum=0.9),
        "optimizer": ek.optim.Ema(ek.lazy(optax.adamw)(1e-2), decay=0.5),
    },
    "accumulation": {"accumulate": 2, "train_data": ek.data.InMemory(arrays(), batch_size=20)},
    "in order": {"train_data": ek.data.InMemory(arrays(), batch_size=8, shuffle=False)},
    "another pipeline": {"train_data": ek.lazy(Custom)()},
    "a stream": {"train_data": stream},
    "a stream without a thread": {"train_data": stream, "prefetch": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_single_steps(kind: str, tmp_path: Path) -> None:
    trainer = small(
        **{"evals": evaluated(every=6), "num_steps": 83, "log_every": 10} | KINDS[kind],
        checkpoints=ek.train.Checkpoints(every=35, keep=9),
    )
    single = trainer.train(tmp_path / "1")
    state = trainer.init()
    for batch in itertools.islice(trainer.batches(state), trainer.num_steps):
        state, _ = ek.train.step(trainer, state, batch)
    assert_same(single.state, state)
    assert 10 < len(rows(tmp_path / "1"))
    for most in MANY:
        many = ek.override(trainer, {"steps_per_call": most}).train(tmp_path / f"{most}")
        assert_close(many.state, single.state)
        assert_rows_close(rows(tmp_path / f"{most}"), rows(tmp_path / "1"))
        assert many.metrics.keys() == single.metrics.keys()
        folders = [
            sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("1", f"{most}")
        ]
        assert folders[0] == folders[1]
        for step in (35, 70, 83):
            assert_close(trainer.restore(tmp_path / f"{most}", step), trainer.restore(tmp_path / "1", step))


def assert_close(one: Any, other: Any) -> None:
    for ours, theirs in zip(leaves(one), leaves(other), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def assert_rows_close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [(row["step"], row["split"]) for row in ours] == [(row["step"], row["split"]) for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [ek.sharding.data_parallel(), ek.sharding.fsdp(min_bytes=32)])
def test_on_several_devices(mesh: Any) -> None:
    trainer = quick(train_data=ek.data.InMemory(arrays(48), batch_size=16), num_steps=23, evals=evaluated(), mesh=mesh)
    single = trainer.train()
    for most in MANY:
        many = ek.override(trainer, {"steps_per_call": most}).train()
        for ours, theirs in zip(leaves(many.state), leaves(single.state), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert many.metrics == pytest.approx(single.metrics, rel=1e-5)


def test_every_step_counts_and_the_remainder_too(monkeypatch: Any) -> None:
    """A mean over an interval of 10 that ends in the middle of a call is over all 10 steps (keras 20411)."""
    calls = []
    run = ek.train.Stepper.run

    def counted(self: Any, fed: Any) -> None:
        calls.append(fed.steps)
        run(self, fed)

    monkeypatch.setattr(ek.train.Stepper, "run", counted)
    many = quick(num_steps=23, log_every=10, steps_per_call=8).train()
    assert calls == [8, 2, 6, 4, 3]
    single = quick(num_steps=23, log_every=10).train()
    assert [row.step for row in many.history] == [10, 20, 23]
    assert [row.metrics for row in many.history] == [pytest.approx(row.metrics, rel=1e-6) for row in single.history]


def test_one_program_serves_every_number_of_steps(compilations: Any) -> None:
    quick(num_steps=100, log_every=13, evals=evaluated(every=17), steps_per_call=16).train()
    assert compilations.names.count("jit(flat_step)") == 1
    compilations.clear()
    quick(num_steps=50, log_every=9, evals=evaluated(every=5), steps_per_call=16).train()
    assert compilations.names.count("jit(flat_step)") == 0


@pytest.mark.slow
def test_nothing_compiles_a_second_time_in_1000_steps_with_all_there_is(compilations: Any, tmp_path: Path) -> None:
    """Evals, logging, checkpoints, intermediates and a ragged last batch."""
    for most in (1, 64):
        trainer = quick(
            num_steps=1000,
            log_every=30,
            steps_per_call=most,
            evals=evaluated(every=110),
            metrics={"norm": ek.metrics.Norm("interms.first"), "grads": ek.metrics.Norm("grads.interms.first")},
            train_data=ek.data.InMemory(arrays(50), batch_size=16, drop_remainder=False),
            checkpoints=ek.train.Checkpoints(every=130),
            max_compilations=1,
        )
        compilations.clear()
        trainer.train(tmp_path / f"{most}")
        assert compilations.names.count("jit(flat_step)") == 1
        assert compilations.names.count("jit(_eval_and_merge)") == (1 if most == 1 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "error", "kill"])
def test_an_interrupted_run_goes_on_to_the_bit(how: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Whatever ends it, and whoever goes on: calls end after the same steps."""
    root = Path(__file__).parents[2]
    args = _experiment.Args(num_steps=200)
    trainer = ek.override(_experiment.get_config(args), {"steps_per_call": 16})
    whole = trainer.train(tmp_path / "whole")
    code = (
        "import equikd as ek; from tests.train._experiment import Args, get_config\n"
        "ek.override(get_config(Args(num_steps=200)), {'steps_per_call': 16}).train('run')"
    )
    environment = {
        "STOP_AT": "140",
        "STOP_HOW": how,
        "PYTHONPATH": str(root),
        "PATH": "/usr/bin:/bin",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0, done.stderr
    monkeypatch.delenv("STOP_AT", raising=False)
    again = trainer.train(tmp_path / "run")
    assert_same(again.state, whole.state)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
def test_a_failure_inside_a_call_names_its_step() -> None:
    def broken() -> Iterator[dict[str, np.ndarray]]:
        for number in itertools.count(1):
            yield {"x": np.full((4, 6), np.nan if number == 11 else 1, np.float32), "label": np.zeros(4, np.int32)}

    messages = []
    for most in (1, 7):
        with pytest.raises(NonFiniteError) as caught:
            quick(train_data=broken, steps_per_call=most, num_steps=30, log_every=6).train()
        assert caught.value.step == 11
        assert int(caught.value.state.step) == 10
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_data_that_ends_in_the_middle_of_a_call() -> None:
    trainer = quick(train_data=lambda: itertools.islice(stream(), 10), num_steps=30, steps_per_call=7, log_every=20)
    with pytest.raises(DataError, match="the data ended after 10 batches, but num_steps is 30"):
        trainer.train()


class Changing(Custom):
    """Its batches lose a row at the fifth."""

    def batches(self, start: int, seed: int) -> Iterator[ek.data.Batch]:
        for number, batch in enumerate(super().batches(start, seed), start):
            yield batch if number < 5 else jax.tree.map(lambda leaf: leaf[:7], batch)


def test_batches_of_several_shapes_cannot_be_one_array(snapshot: Any) -> None:
    with pytest.raises(DataError) as caught:
        quick(train_data=ek.lazy(Changing)(), steps_per_call=4, num_steps=12).train()
    snapshot("several_shapes", str(caught.value))


@pytest.mark.parametrize("value", [0, -1, 1.5, "fast", True, None])
def test_numbers_that_are_none(value: Any) -> None:
    with pytest.raises((ConfigError, ValueError), match="steps_per_call"):
        quick(steps_per_call=value).train()


# --- what is fastest --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_auto_tries_once_and_changes_nothing(compilations: Any, caplog: Any) -> None:
    fields = {"optimizer": ek.lazy(optax.adamax)(1e-2)}  # a structure that no other test has compiled
    trainer = quick(num_steps=40, log_every=20, steps_per_call="auto", max_compilations=0, **fields)
    with caplog.at_level(logging.INFO, "equikd"):
        first = trainer.train()
        said = [record.getMessage() for record in caplog.records if "auto takes" in record.getMessage()]
        assert len(said) == 1
        assert any(f"auto takes {most} " in said[0] for most in (1, 20))
        assert compilations.names.count("jit(flat_step)") == 2
        compilations.clear()
        again = trainer.train()
        assert len([r for r in caplog.records if "auto takes" in r.getMessage()]) == 1
    assert compilations.names.count("jit(flat_step)") == 0
    assert_same(first.state, again.state)
    assert_close(first.state, quick(num_steps=40, log_every=20, **fields).train().state)


@pytest.mark.slow
def test_auto_of_data_from_the_host(monkeypatch: Any) -> None:
    monkeypatch.setattr(_feed, "fits", lambda *arguments: False)
    monkeypatch.setattr("equikd.train._auto.fits", lambda *arguments: False)
    trainer = quick(num_steps=20, log_every=10, steps_per_call="auto")
    assert_close(trainer.train().state, quick(num_steps=20, log_every=10).train().state)


# --- where calls end --------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 70),
    st.integers(1, 300),
    st.integers(1, 50),
    st.lists(st.tuples(st.none() | st.integers(1, 60), st.lists(st.integers(0, 400), max_size=3)), max_size=2),
    st.none() | st.integers(1, 90),
    st.none() | st.integers(1, 300),
)
def test_calls_end_where_something_is_due_and_only_the_step_says_where(
    most: int, num_steps: int, log_every: int, evals: Any, save_every: int | None, stop_at: int | None
) -> None:
    settings = tuple(ek.evals.Eval(data=None, every=every, at=tuple(at)) for every, at in evals)
    given = {"log_every": log_every, "evals": settings, "save_every": save_every, "stop_at": stop_at}
    steps = [0]
    while steps[-1] < num_steps:
        steps.append(boundary(steps[-1], most, num_steps=num_steps, **given))
    assert steps[-1] == num_steps
    assert all(0 < after - before <= most for before, after in itertools.pairwise(steps))
    due = {step for step in range(1, num_steps) if step % log_every == 0 or step == stop_at}
    due |= {step for step in range(1, num_steps) if save_every is not None and step % save_every == 0}
    due |= {step for step in range(1, num_steps) for one in settings if one.due(step, last=False)}
    assert due <= set(steps)
    for start in range(num_steps):  # a run that goes on from anywhere falls in with the others at the next end
        assert boundary(start, most, num_steps=num_steps, **given) in steps


def test_each_row_says_what_was_computed_when(tmp_path: Path) -> None:
    trainer = quick(num_steps=30, log_every=7, steps_per_call=5, evals=evaluated(every=4))
    trainer.train(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines if row["split"] == "train"] == [7, 14, 21, 28, 30]
    assert [row["step"] for row in lines if row["split"] == "test"] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert all(np.isfinite(list(row["metrics"].values())).all() for row in lines)


@pytest.mark.slow
def test_dropout_of_a_step_does_not_depend_on_its_call() -> None:
    trainer = small(ek.lazy(Dropping)(rate=0.5), num_steps=13)
    results = [ek.override(trainer, {"steps_per_call": most}).train() for most in (1, 4, 13)]
    for one in results[1:]:
        assert_close(one.state, results[0].state)
