"""What no step changes is on disk once: small checkpoints, whole at any moment, and never mixed up."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import CheckpointError
from equikd.train import Checkpoints, _checkpoint, _constant, _source
from equikd.train._checkpoint import CheckpointStore
from equikd.train._checkpoint_files import is_whole, read_document
from equikd.train._constant import digest_of, parted
from tests.train._runs import rows
from tests.train._small import CLASSES, FEATURES, assert_same, differs, evaluated, quick, small

WIDE = 512  # a matrix of it has as many bytes as are worth a directory


class Adapted(eqx.Module):
    """A wide layer with two small matrices beside it, as in LoRA."""

    first: eqx.nn.Linear
    wide: eqx.nn.Linear
    lora_a: jax.Array
    lora_b: jax.Array
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, rate: float = 0.25, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.first = eqx.nn.Linear(FEATURES, WIDE, key=keys[0])
        self.wide = eqx.nn.Linear(WIDE, WIDE, key=keys[1])
        self.lora_a = jax.random.normal(keys[2], (2, WIDE)) / WIDE
        self.lora_b = jnp.zeros((WIDE, 2))
        self.dropout = eqx.nn.Dropout(rate)
        self.last = eqx.nn.Linear(WIDE, CLASSES, key=keys[3])

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        x = jax.nn.relu(self.first(x))
        return self.last(self.dropout(self.wide(x) + self.lora_b @ (self.lora_a @ x), key=key))


def lora(num_steps: int = 6, **fields: Any) -> ek.Trainer:
    made = {"trainable": ("lora_a", "lora_b"), "checkpoints": Checkpoints(every=2, keep=2), "log_every": 5}
    return small(num_steps=num_steps, **{"model": ek.lazy(Adapted)()} | made | fields)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def constants(run: Path) -> list[str]:
    folder = run / "checkpoints" / "constant"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def inside(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "a"
    return folder, lora().train(folder)


@pytest.fixture
def copied(whole: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole[0], tmp_path / "a"))


# A run


def test_a_checkpoint_holds_what_changes(whole):
    folder, result = whole
    state = result.state
    assert len(constants(folder)) == 1
    frozen = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(state.model, eqx.is_array)))
    trained = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params(), state.opt_state)))
    assert size(folder / "checkpoints" / "constant") > (frozen - trained) // 2  # compressed
    for step in (4, 6):
        assert size(folder / "checkpoints" / str(step)) < trained + 30_000 < frozen // 10
        leaves = read_document(folder / "checkpoints" / str(step))["leaves"]
        names = {name for name, entry in leaves.items() if "constant" in entry}
        own = {"state.model.lora_a", "state.model.lora_b", "state.model.dropout.p"}
        assert {name for name in leaves if name.startswith("state.model.")} - names <= own
        assert "state.model.wide.weight" in names
        assert "state.key" not in names
        assert not [name for name in names if "opt_state" in name or "accumulators" in name]
    assert_same(lora().restore(folder).model, state.model)
    assert_same(lora().restore(folder, 4).model.wide, state.model.wide)
    assert differs(lora().restore(folder, 4).model.lora_b, state.model.lora_b)
    assert lora(evals=evaluated()).evaluate(lora().restore(folder), "test")  # as `equikd eval` does


def test_a_resume_ends_as_a_run_that_was_not_stopped(whole, tmp_path):
    folder, result = whole
    lora(num_steps=4).train(tmp_path / "b")
    before = contents(tmp_path / "b/checkpoints/constant")
    inode = (tmp_path / "b/checkpoints/constant" / constants(folder)[0]).stat().st_ino
    resumed = lora().train(tmp_path / "b")
    assert_same(resumed.state, result.state)
    assert [row for row in rows(tmp_path / "b") if row["step"] == 5] == [r for r in rows(folder) if r["step"] == 5]
    assert contents(tmp_path / "b/checkpoints/constant") == before
    assert (tmp_path / "b/checkpoints/constant" / constants(folder)[0]).stat().st_ino == inode  # not written again


@pytest.mark.slow
def test_a_live_model_goes_on_with_its_own_arrays(tmp_path):
    live, other = (Adapted(key=jax.random.key(seed)) for seed in (7, 8))
    trainer = ek.override(lora(), {"model": None})
    whole = trainer.train(model=live)
    ek.override(trainer, {"num_steps": 4}).train(tmp_path / "b", model=live)
    resumed = trainer.train(tmp_path / "b", model=other)  # only its structure counts now
    assert_same(resumed.state, whole.state)
    assert_same(resumed.model.wide, live.wide)


def test_another_run_starts_from_it(whole, tmp_path, capsys, monkeypatch):
    folder, result = whole
    onward = lora(num_steps=2, init_from=str(folder), seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(_source, "read_arrays", None)
        assert "8 of 8 arrays" in str(ek.inspect.check(onward))  # by metadata alone
    assert_same(onward.init().model, eqx.tree_at(lambda m: m.dropout.p, result.model, onward.init().model.dropout.p))
    place = ek.train.InitFrom(folder, step=4, include=("wide.**", "lora_b"))
    state = lora(num_steps=2, init_from=place, seed=1).init()
    assert_same((state.model.wide, state.model.lora_b), _at_step_4(folder))
    assert differs(state.model.first, result.model.first)
    read, names = _checkpoint.read_stored, []
    monkeypatch.setattr(_checkpoint, "read_stored", lambda path, some: (names.extend(some), read(path, some))[1])
    lora(init_from=ek.train.InitFrom(folder, include="wide.**")).init()
    assert sorted(names) == ["state.model.wide.bias", "state.model.wide.weight"]
    onward.train(tmp_path / "b")
    assert constants(tmp_path / "b") == constants(folder)  # the same arrays have the same name


def _at_step_4(folder: Path) -> Any:
    model = lora().restore(folder, 4).model
    return model.wide, model.lora_b


@pytest.mark.slow
def test_what_is_trained_may_change(copied):
    """With an optimizer that keeps no state; with another the structure differs, and is refused as ever."""
    other = lora(trainable="last.**", optimizer=ek.lazy(optax.sgd)(0.1))
    shutil.rmtree(copied)
    lora(num_steps=4, optimizer=ek.lazy(optax.sgd)(0.1)).train(copied)
    (first,) = constants(copied)
    before = lora(optimizer=other.optimizer).restore(copied).model
    after = ek.override(other, {"num_steps": 6}).train(copied)
    assert_same((after.model.wide, after.model.lora_a, after.model.lora_b), (before.wide, before.lora_a, before.lora_b))
    assert differs(after.model.last, before.last)
    assert len(constants(copied)) == 2  # step 4 needs the old one
    assert_same(other.restore(copied, 4).model, before)
    assert_same(other.restore(copied, 6).model, after.model)
    ek.override(other, {"num_steps": 8}).train(copied)
    assert len(constants(copied)) == 1
    assert first not in constants(copied)


def test_another_optimizer_state_is_refused_as_ever(copied):
    with pytest.raises(CheckpointError, match="another structure now"):
        lora(num_steps=8, trainable="last.**").train(copied)


def test_another_seed_keeps_them(copied):
    before = contents(copied / "checkpoints/constant")
    lora(num_steps=8, seed=3).train(copied)
    assert contents(copied / "checkpoints/constant") == before


def parts(trainer: ek.Trainer) -> tuple[Any, Any]:
    """What each checkpoint of a trainer holds, and what is there once."""
    stepper = ek.train.Stepper(trainer, trainer.init())
    return parted(eqx.filter(stepper.state, eqx.is_array), stepper.changed)


def test_small_models_are_as_before():
    state, constant = parts(quick(trainable="first.**"))
    assert constant is None
    assert len(jax.tree.leaves(state.model)) == 4
    _, constant = parts(lora())
    assert len(jax.tree.leaves(constant)) == 6
    assert constant.key is None


def test_checkpoints_of_format_1_go_on(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(_constant, "LEAST", 2**40)
        lora(num_steps=4).train(tmp_path / "b")
    assert read_document(tmp_path / "b/checkpoints/4")["format"] == 1
    assert constants(tmp_path / "b") == []
    assert_same(lora().train(tmp_path / "b").state, whole[1].state)
    assert [read_document(tmp_path / "b/checkpoints" / str(step))["format"] for step in (4, 6)] == [1, 2]
    assert constants(tmp_path / "b") == constants(whole[0])


@ek.config.config
class ChangesFrozen:
    """The default step, which also moves a leaf that is not trained."""

    def __call__(self, config: Any, state: Any, batch: Any) -> Any:
        context = ek.train.loss_and_gradients(config, state, batch)
        state, context = ek.train.apply_updates(config, state, context)
        state = eqx.tree_at(lambda s: s.model.first.bias, state, replace_fn=lambda x: x + 1)
        return state, ek.train.collect(config, context)


def test_a_step_may_change_what_is_not_trained():
    changing, constant = parts(lora(step=ChangesFrozen()))
    assert constant.model.first.bias is None
    assert changing.model.first.bias is not None
    assert constant.model.first.weight is not None


@pytest.mark.slow
def test_arrays_spread_over_devices(whole, tmp_path):
    mesh = ek.sharding.fsdp(min_bytes=0)
    lora(num_steps=4, mesh=mesh).train(tmp_path / "b")
    assert constants(tmp_path / "b") == constants(whole[0])
    result = lora(mesh=mesh).train(tmp_path / "b")
    assert_same(result.model.wide, whole[1].model.wide)
    assert_same(lora().restore(tmp_path / "b").model, result.model)


# Damage


def test_what_is_missing_or_damaged_is_said(copied, monkeypatch, snapshot):
    monkeypatch.chdir(copied.parent)
    folder = copied / "checkpoints/constant" / constants(copied)[0]
    kept, told = shutil.copytree(folder, copied.parent / "kept"), []

    def say(*acts: Any) -> None:
        for act in acts:
            with pytest.raises(CheckpointError) as error:
                act()
            told.append(re.sub(r"/\w{16}\b", "/DIGEST", str(error.value).replace(str(copied.parent), "RUNS")))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)

    shutil.rmtree(folder)
    say(lambda: lora().restore("a"), lambda: lora(num_steps=8).train("a"), lambda: lora(init_from="a").init())
    (folder / "constant.json").write_text("{")
    say(lambda: lora().restore("a"))
    file = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:1000])
    say(lambda: _read_step(copied))
    document = json.loads((folder / "constant.json").read_text())
    document["leaves"]["state.model.wide.bias"]["shape"] = [3]
    (folder / "constant.json").write_text(json.dumps(document))
    say(lambda: lora().restore("a"))
    text = re.sub(r"cut short: .*", "cut short: (files)", "\n\n".join(told))
    snapshot("damaged", re.sub(r"is no JSON: .*", "is no JSON: ...", text))
    assert_same(lora().restore("a").model.wide, lora().init().model.wide)  # whole again


def _read_step(folder: Path) -> Any:
    return _checkpoint.read_arrays(folder / "checkpoints/6", read_document(folder / "checkpoints/6"))


def test_arrays_under_the_name_of_others(copied):
    """A directory that is whole, but holds other arrays: of another run, say."""
    lora(num_steps=2, seed=5).train(copied.parent / "other")
    (name,), (foreign,) = constants(copied), constants(copied.parent / "other")
    assert name != foreign
    shutil.rmtree(copied / "checkpoints/constant" / name)
    shutil.copytree(copied.parent / "other/checkpoints/constant" / foreign, copied / "checkpoints/constant" / name)
    with pytest.raises(CheckpointError, match="not those that the name of the directory stands for"):
        _read_step(copied)


def test_a_name_is_no_way_out(copied):
    document = copied / "checkpoints/6/checkpoint.json"
    plain = json.loads(document.read_text())
    for name in ("../../b", 3, "0123456789abcdeg", None):
        document.write_text(json.dumps(plain | {"constant": name}))
        with pytest.raises(CheckpointError, match="6 cannot be read"):
            read_document(copied / "checkpoints/6")


def test_the_next_run_mends_it(copied):
    """A step that needs no constant arrays any more would be refused; a store that has them writes them again."""
    arrays = {"w": np.arange(4.0)}
    with CheckpointStore(copied.parent / "store", keep=3) as store:
        store.save(1, {}, {}, constant=arrays)
        store.wait()
        folder = copied.parent / "store/constant"
        (folder / inside(folder)[0] / "constant.json").unlink()
        assert not is_whole(copied.parent / "store/1")
        store.save(2, {}, {}, constant=arrays)
        store.wait()
        assert is_whole(copied.parent / "store/1")
        for step in (1, 2):
            assert_same(store.restore(step, arrays)[0], arrays)


# The store


def test_a_store_takes_both_kinds(tmp_path):
    key, bits = jax.random.key(3), jnp.arange(4, dtype=jnp.bfloat16)
    fixed = {"s": {"key": key, "bits": bits, "é\n": np.zeros((0, 2), np.int8), "f": np.float32(3), "w": None}}
    moving = {"s": {"key": None, "bits": None, "é\n": None, "f": None, "w": np.ones(2)}}
    both = {"s": {"key": key, "bits": bits, "é\n": np.zeros((0, 2), np.int8), "f": np.float32(3), "w": np.ones(2)}}
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(1, moving, {"at": 1}, constant=fixed)
        store.wait()
        arrays, facts = store.restore(1, both)
        assert facts == {"at": 1}
        assert_same(arrays, both)
        with pytest.raises(CheckpointError, match=r"both constant and not\n  - s\.w"):
            store.save(2, moving, {}, constant=moving)
        store.save(2, {}, {}, constant=both)
        store.save(3, both, {}, constant={})
        store.wait()
        assert_same(store.restore(2, both)[0], both)
        assert_same(store.restore(3, both)[0], both)
    assert len(inside(tmp_path / "constant")) == 1


def test_jax_arrays_are_looked_at_once_and_others_each_time(tmp_path, monkeypatch):
    digests: list[str] = []
    monkeypatch.setattr(_checkpoint, "digest_of", lambda *given: digests.append(digest_of(*given)) or digests[-1])
    fixed, own = {"f": jnp.ones(3)}, {"f": np.ones(3)}
    with CheckpointStore(tmp_path, keep=9) as store:
        for step in range(3):
            store.save(step, {}, {}, constant=fixed)
        store.wait()
        assert len(digests) == 1
        for step in range(3, 6):
            own["f"][0] = step
            store.save(step, {}, {}, constant=own)
        store.wait()
        assert len(digests) == 4
        for step in range(3, 6):
            assert store.restore(step, own)[0]["f"][0] == step
        store.save(6, {}, {}, constant={"f": jnp.ones(3)})  # other objects, the same values
        store.wait()
    assert len(inside(tmp_path / "constant")) == 4


def test_an_error_leaves_a_store_that_goes_on(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    fixed = {"f": jnp.ones(3)}
    with CheckpointStore(tmp_path, keep=2) as store:
        with monkeypatch.context() as patch:
            patch.setattr(_checkpoint, "write_stored", fail)
            store.save(1, {}, {}, constant=fixed)
            with pytest.raises(CheckpointError, match="checkpoint 1 was not saved"):
                store.wait()
        assert inside(tmp_path / "constant") == []
        store.save(1, {}, {}, constant=fixed)
        store.wait()
        assert_same(store.restore(1, fixed)[0], fixed)


def test_going_back_and_eviction_leave_what_is_needed(tmp_path):
    one, two = ({"f": jnp.full(3, value)} for value in (1.0, 2.0))
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(1, {}, {}, constant=one)
        store.save(2, {}, {}, constant=two)
        store.wait()
        store.restore(1, one)
        store.save(2, {}, {}, constant=one)  # the line of step 1; the step 2 before it gives way, and its arrays too
        store.wait()
        assert len(inside(tmp_path / "constant")) == 1
        store.save(3, two, {})
        store.save(4, two, {})
        store.wait()
        assert not (tmp_path / "constant").exists()
        (tmp_path / "constant").mkdir()
        (tmp_path / "constant" / "mine.txt").write_text("")
        store.save(5, two, {})
    assert inside(tmp_path / "constant") == ["mine.txt"]


def test_what_a_broken_step_needs_stays(tmp_path):
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(1, {}, {}, constant={"f": jnp.ones(3)})
        store.wait()
        (tmp_path / "1/checkpoint.json").write_text("{")
        store.save(2, {"f": jnp.ones(3)}, {})
        store.wait()
        assert len(inside(tmp_path / "constant")) == 1


def test_orbax_alone_reads_them(tmp_path):
    import orbax.checkpoint as ocp

    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(1, {"s": {"w": jnp.ones(2)}}, {}, constant={"s": {"f": jnp.full(3, 2.0)}})
    (name,) = inside(tmp_path / "constant")
    with ocp.PyTreeCheckpointer() as reader:
        assert_same(reader.restore(tmp_path / "constant" / name / "arrays"), {"s.f": np.full(3, 2, np.float32)})
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 1


# Killed anywhere


def values(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run saves at a step; from step 3 on its constant arrays are others."""
    return {"w": np.full(3, step, np.float32)}, {"f": np.full(50, step >= 3, np.float32), "g": np.zeros(2)}


def check_whole(folder: Path) -> int:
    """All steps are whole; the next save works and tidies up."""
    with CheckpointStore(folder, keep=2) as store:
        steps = store.steps()
        for step in steps:
            changing, fixed = values(step)
            arrays, facts = store.restore(step, {**changing, **fixed})
            assert facts == {"at": step}
            assert_same(arrays, {**changing, **fixed})
        changing, fixed = values(9)
        store.save(9, changing, {"at": 9}, constant=fixed)
        store.wait()
        assert store.steps() == (*steps[-1:], 9)
        needed = {read_document(folder / str(step))["constant"] for step in store.steps()}
        assert set(inside(folder / "constant")) == needed
        assert set(inside(folder)) == {"constant", *map(str, store.steps())}
    return len(steps)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_whole_after_each_thing_done_to_the_disk(tmp_path, monkeypatch, every):
    """What a kill would leave, at each moment of five saves: a copy of the directory at that moment."""
    moments: list[Path] = []

    def moment(act: Any) -> Any:
        def watched(*given: Any, **named: Any) -> Any:
            if str(given[0]).startswith(str(tmp_path / "run")):
                moments.append(Path(shutil.copytree(tmp_path / "run", tmp_path / f"at{len(moments)}")))
            return act(*given, **named)

        return watched

    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        for place, name in ((Path, "rename"), (_checkpoint, "write_stored"), (_checkpoint, "write_atomically")):
            patch.setattr(place, name, moment(getattr(place, name)))
        patch.setattr(shutil, "rmtree", moment(shutil.rmtree))
        with CheckpointStore(tmp_path / "run", keep=2) as store:
            for step in range(1, 5):
                changing, fixed = values(step)
                store.save(step, changing, {"at": step}, constant=fixed)
            store.wait()
    names = {name for place in moments if (place / "constant").exists() for name in inside(place / "constant")}
    assert any(name.endswith(".removed.orbax-checkpoint-tmp") for name in names)
    assert any(re.fullmatch(r"\w{16}\.orbax-checkpoint-tmp", name) for name in names)
    assert len(moments) > 20
    found = [check_whole(place) for place in moments[::every]]
    assert found[0] == 0
    assert set(found) >= {0, 2, 3}


KILLED = """
import sys
from pathlib import Path
from equikd.train._checkpoint import CheckpointStore
from tests.train.test_constant import values

with CheckpointStore(Path(sys.argv[1]), keep=2) as store:
    for step in range(8):
        changing, fixed = values(step)
        store.save(step, changing, {"at": step}, constant=fixed)
        print(step, flush=True)
    store.wait()
    print("end", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("after", "seconds"), [("0", 0.01), ("3", 0.0), ("3", 0.03), ("4", 0.02)])
def test_killed(tmp_path, after, seconds):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, **pipes) as child:
        for line in child.stdout or ():
            if line.strip() == after:
                time.sleep(seconds)
                child.kill()
    assert child.returncode == -signal.SIGKILL
    check_whole(tmp_path)
