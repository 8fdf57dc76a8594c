"""When training ends: limits besides `num_steps`, and results that improve no more."""

import time
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.errors import ConfigError
from equikd.train import EarlyStop, Record, StopAfter
from equikd.train._ending import EarlyStopState, Ending
from tests.train._experiment import Args, get_config
from tests.train._runs import assert_same, rows

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
DATA = ek.data.InMemory({"x": X, "y": X.sum(1, keepdims=True)}, batch_size=8)


def make(**fields: Any) -> ek.Trainer:
    standard: dict[str, Any] = {
        "model": ek.lazy(eqx.nn.MLP)(4, 1, 8, 1),
        "inputs": {"x": "batch.x"},
        "losses": {"mse": ek.losses.SquaredError(preds="preds", targets="batch.y")},
        "optimizer": ek.lazy(optax.adam)(1e-2),
        "train_data": DATA,
        "evals": {"test": ek.evals.Eval(data=DATA, every=4), "last": ek.evals.Eval(data=DATA)},
        "num_steps": 60,
        "log_every": 10,
        "writers": (),
        "checkpoints": ek.train.Checkpoints(every=7),
    }
    return ek.Trainer(**standard | fields)


def steps_in(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


# --- early stopping ---------------------------------------------------------------------------------------------------


def test_it_stops_and_the_final_evals_and_the_last_save_come(tmp_path, capsys, snapshot):
    trainer = make(early_stop=EarlyStop("test/loss", patience=3, min_delta=1e6))
    result = trainer.train(tmp_path / "run")
    assert int(result.state.step) == 16  # the first value, and three that are no million better
    assert [(row["step"], row["split"]) for row in rows(tmp_path / "run")] == [
        (4, "test"),
        (8, "test"),
        (10, "train"),
        (12, "test"),
        (16, "test"),
        (16, "train"),
        (16, "last"),
    ]
    assert steps_in(tmp_path / "run") == [7, 14, 16]
    snapshot("early_stop", capsys.readouterr().err.splitlines()[-1])
    before = rows(tmp_path / "run")
    again = trainer.train(tmp_path / "run")  # it is over, and stays so
    assert_same(again.state, result.state)
    assert rows(tmp_path / "run") == before
    assert "has ended at step 16 of 60: test/loss has not improved for 3 values" in capsys.readouterr().err
    patient = ek.override(trainer, {"early_stop.patience": 5}).train(tmp_path / "run")
    assert int(patient.state.step) == 24


def test_a_training_result_counts_one_interval_late():
    result = make(early_stop=EarlyStop("train/loss", patience=2, min_delta=1e6), evals={}).train()
    assert int(result.state.step) == 40  # the rows of 10, 20 and 30, and that of 30 is read at 40


def test_a_result_that_improves_stops_nothing():
    result = make(early_stop=EarlyStop("test/loss", patience=1)).train()
    assert int(result.state.step) == 60


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(5,), (19, 24), (20,), (30, 31)])
@pytest.mark.parametrize("name", ["train/loss", "test/loss"])
def test_an_interrupted_run_ends_where_it_would_have(tmp_path, name, stops):
    """Whatever was written early, for a save that nobody had planned."""
    trainer = make(early_stop=EarlyStop(name, patience=3, min_delta=1e6), evals={"test": ek.evals.Eval(DATA, every=9)})
    whole = trainer.train(tmp_path / "whole")
    for step in stops:
        with interrupting(step), pytest.raises(SystemExit):
            trainer.train(tmp_path / "run")
    result = trainer.train(tmp_path / "run")
    assert int(result.state.step) == int(whole.state.step) < 60
    assert_same(result.state, whole.state)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def interrupting(at: int) -> Any:
    """A signal while a step runs."""
    import contextlib
    import os
    import signal

    @contextlib.contextmanager
    def patched() -> Any:
        step = ek.train.Stepper.run

        def stepping(self: Any, batch: Any) -> None:
            step(self, batch)
            if int(self.borrow()[0].step) == at:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ek.train.Stepper, "run", stepping)
            yield

    return patched()


@given(
    st.lists(st.one_of(st.floats(-9, 9), st.just(float("nan"))), min_size=1),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 2.0]),
)
def test_what_was_seen_follows_the_definition(values, patience, min_delta):
    """It ends with the first value after which `patience` values in a row are no better than the best before them."""
    rule = EarlyStop("test/loss", patience=patience, min_delta=min_delta)
    seen, best, since, expected = EarlyStopState(), None, 0, None
    for step, value in enumerate(values):
        seen = seen.after(rule, step, value)
        improved = not np.isnan(value) and (best is None or value < best - min_delta)
        best, since = (value, 0) if improved else (best, since + 1)
        if since == patience and expected is None:
            expected = step
    assert seen.over == expected


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=12), st.integers(0, 12))
def test_facts_restore_what_was_seen(values, cut):
    rule = EarlyStop("test/loss", patience=3)
    whole, first, second = (Ending(100, early=rule) for _ in range(3))
    records = [Record(step, "test", {"loss": value}, 0.0) for step, value in enumerate(values)]
    for record in records:
        whole.observe(record)
    for record in records[:cut]:
        first.observe(record)
    second.resume(0, first.facts())
    for record in records[max(cut - 1, 0) :]:  # the last one comes twice
        second.observe(record)
    assert second.seen == whole.seen


def test_larger_may_be_better():
    rule = EarlyStop("test/accuracy", mode="max", min_delta=0.1)
    assert rule.better(0.5, None)
    assert rule.better(0.7, 0.5)
    assert not rule.better(0.59, 0.5)
    assert not rule.better(float("inf"), 0.5)


def test_a_result_that_there_will_not_be_is_refused(tmp_path, snapshot):
    with pytest.raises(ConfigError) as caught:
        make(early_stop=EarlyStop("test/los")).train(tmp_path / "run")
    snapshot("no_such_result", str(caught.value))
    assert not (tmp_path / "run").exists()


def test_a_result_that_comes_once_is_refused(snapshot):
    with pytest.raises(ConfigError) as caught:
        make(early_stop=EarlyStop("last/loss")).train()
    snapshot("comes_once", str(caught.value))


def test_what_was_seen_of_another_kind_counts_nothing():
    """The best of the least is no best of the largest; and a run that starts again has seen nothing."""
    ending = Ending(100, early=EarlyStop("test/loss"))
    ending.observe(Record(1, "test", {"loss": 2.0}, 0.0))
    other = Ending(100, early=EarlyStop("test/loss", mode="max"))
    other.resume(1, ending.facts())
    assert other.seen == EarlyStopState()
    ending.resume(0, {})
    assert ending.seen == EarlyStopState()


def test_rows_off_schedule_are_not_looked_at(tmp_path):
    """Where a limit ends a session there are rows that an uninterrupted run does not have."""
    trainer = make(early_stop=EarlyStop("test/loss", patience=3, min_delta=1e6))
    whole = trainer.train(tmp_path / "whole")
    ek.override(trainer, {"stop_after": StopAfter(steps=6)}).train(tmp_path / "run")
    assert_same(trainer.train(tmp_path / "run").state, whole.state)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_number_of_steps_that_schedules_do_not_see(tmp_path):
    trainer = make(
        optimizer=ek.lazy(optax.sgd)(ek.optim.Linear(0.1, 0.0, ek.ref("num_steps"))), stop_after=StopAfter(steps=23)
    )
    short = trainer.train(tmp_path / "run")
    assert int(short.state.step) == 23
    assert [row["step"] for row in rows(tmp_path / "run")][-2:] == [23, 23]
    assert steps_in(tmp_path / "run") == [14, 21, 23]
    whole = ek.override(trainer, {"stop_after": None})
    assert_same(whole.train(tmp_path / "run").state, whole.train().state)


def test_seconds_are_those_of_one_session(tmp_path, capsys):
    trainer = make(stop_after=StopAfter(seconds=0.3), num_steps=10**7, log_every=1000, evals={}, checkpoints=None)
    trainer.train()
    started = time.monotonic()
    first = trainer.train()
    assert 0.3 <= time.monotonic() - started < 5
    assert 0 < int(first.state.step) < 10**7
    assert "stopped: stop_after.seconds is 0.3" in capsys.readouterr().err
    resumable = ek.override(trainer, {"checkpoints": ek.train.Checkpoints()})
    one, other = resumable.train(tmp_path / "run"), resumable.train(tmp_path / "run")
    assert int(one.state.step) < int(other.state.step)


def test_a_session_makes_a_step_however_little_time_it_has(tmp_path):
    trainer = make(stop_after=StopAfter(seconds=1e-6), evals={})
    assert [int(trainer.train(tmp_path / "run").state.step) for _ in range(3)] == [1, 2, 3]


def test_whichever_comes_first():
    limits = {"stop_after": StopAfter(steps=50), "early_stop": EarlyStop("test/loss", patience=2, min_delta=1e6)}
    assert int(make(**limits).train().state.step) == 12
    assert int(make(**limits | {"stop_after": StopAfter(steps=9)}).train().state.step) == 9
    assert int(make(stop_after=StopAfter(steps=100)).train().state.step) == 60


@pytest.mark.parametrize(
    "wrong",
    [
        StopAfter(),
        StopAfter(steps=0),
        StopAfter(seconds=0.0),
        StopAfter(seconds=float("nan")),
        EarlyStop("test/loss", patience=0),
        EarlyStop("test/loss", min_delta=-1.0),
    ],
    ids=map(str, range(6)),
)
def test_settings_without_sense_are_refused(wrong):
    field = "stop_after" if isinstance(wrong, StopAfter) else "early_stop"
    with pytest.raises((ConfigError, ValueError)):
        make(**{field: wrong}).train()


@pytest.mark.slow
def test_batch_norm_dropout_and_accumulators_end_the_same(tmp_path):
    """A run that is ended by a limit and goes on is one run."""
    args = Args(width=4, num_steps=60, eval_every=20, log_every=15, save_every=25)
    whole = get_config(args).train(tmp_path / "whole")
    for steps in (13, 40):
        ek.override(get_config(args), {"stop_after": StopAfter(steps=steps)}).train(tmp_path / "run")
    assert_same(get_config(args).train(tmp_path / "run").state, whole.state)
