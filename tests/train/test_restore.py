"""The train state of a checkpoint: to the bit what the run had, and nothing is written."""

import json

import jax
import numpy as np
import pytest

import equikd as ek
from equikd.errors import EquikdError
from tests.train import _experiment
from tests.train._experiment import Args


def trainer_of(**changes):
    trainer = _experiment.get_config(Args(num_steps=60))
    evals = {"test": ek.override(trainer.evals["test"], {"every": 20}), "last": trainer.evals["test"]}
    checkpoints = ek.train.Checkpoints(every=20, keep=10)
    return ek.override(trainer, {"writers": (), "evals": evals, "checkpoints": checkpoints} | changes)


def assert_equal(tree, other):
    for leaf, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        is_key = jax.numpy.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
        np.testing.assert_array_equal(*(map(jax.random.key_data, (leaf, wanted)) if is_key else (leaf, wanted)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run") / "run"
    return workdir, trainer_of().train(workdir)


def contents(workdir):
    return {path: path.read_bytes() for path in sorted(workdir.rglob("*")) if path.is_file()}


def test_an_eval_of_a_checkpoint_is_what_training_reported(run):
    workdir, result = run
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    reported = {row["step"]: row["metrics"] for row in rows if row["split"] == "test"}
    assert list(reported) == [20, 40, 60]
    before = contents(workdir)
    for step, metrics in reported.items():
        state = trainer_of().restore(workdir, step)
        assert int(state.step) == step
        found = trainer_of().evaluate(state, "test")
        assert {name.removeprefix("test/"): value for name, value in found.items()} == metrics  # to the bit
    assert contents(workdir) == before
    newest = trainer_of().restore(workdir)
    assert_equal(newest, result.state)


def test_a_step_goes_on_from_a_restored_state(run):
    workdir, result = run
    trainer = trainer_of()
    state = trainer.restore(workdir, 40)
    for batch, _ in zip(trainer.batches(state), range(20), strict=False):
        state, _ = ek.train.step(trainer, state, batch)
    assert_equal(state, result.state)


def test_what_is_not_there(run, tmp_path, snapshot):
    workdir, _ = run
    with pytest.raises(EquikdError) as error:
        trainer_of().restore(workdir, 50)
    snapshot("no_such_step", str(error.value).replace(str(workdir), "RUN"))
    with pytest.raises(EquikdError) as error:
        trainer_of().restore(tmp_path / "nowhere")
    snapshot("no_run", str(error.value).replace(str(tmp_path), "RUNS"))
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(EquikdError) as error:
        ek.override(trainer_of(), {"model.width": 9}).restore(workdir)
    assert "another structure" in str(error.value)


def test_before_the_first_checkpoint(tmp_path):
    trainer = ek.override(trainer_of(), {"checkpoints": None, "num_steps": 3})
    trainer.train(tmp_path / "run")
    with pytest.raises(EquikdError, match="no checkpoint yet"):
        trainer.restore(tmp_path / "run")


def test_num_steps_may_be_smaller_than_the_step(run):
    workdir, _ = run
    assert int(ek.override(trainer_of(), {"num_steps": 5}).restore(workdir).step) == 60
