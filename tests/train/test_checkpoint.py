"""Checkpoints: exact round trips, whole or absent, errors that surface, one line of steps."""

import asyncio
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from equikd.errors import CheckpointError
from equikd.train import _checkpoint, _leaves
from equikd.train._checkpoint import CheckpointStore

DTYPES = [
    *("float32", "float16", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64", "complex64", "bool"),
    *("bfloat16", "float8_e4m3fn", "int4", "uint4", "uint2", "float4_e2m1fn"),
]


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": jnp.full((2, 3), value, jnp.float32), "count": jnp.int32(value)}


@pytest.fixture
def store(tmp_path):
    with CheckpointStore(tmp_path / "checkpoints", keep=3) as made:
        yield made


def saved(store: CheckpointStore, step: int, **arrays: Any) -> None:
    store.save(step, arrays, {"at": step})
    store.wait()


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(left: Any, right: Any) -> None:
    """Structure, dtypes, shapes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert _leaves.to_host({"": a})[0][""].tobytes() == _leaves.to_host({"": b})[0][""].tobytes()


class Pair(NamedTuple):
    left: Any
    right: Any


class Layer(eqx.Module):
    weight: Any
    bias: Any
    size: int = eqx.field(static=True, default=3)


@st.composite
def arrays(draw) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8).reshape(*shape, dtype.itemsize)
    if dtype.name == "bool":
        return (data[..., 0] % 2).astype(bool)
    limits = {"int4": 15, "uint4": 15, "float4_e2m1fn": 15, "uint2": 3}
    data = data & limits.get(dtype.name, 255)  # the bits above are padding
    return np.ascontiguousarray(data).view(dtype).reshape(shape)


def trees(leaves: st.SearchStrategy) -> st.SearchStrategy:
    def node(children: st.SearchStrategy) -> st.SearchStrategy:
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=4), children, max_size=3),
            st.dictionaries(st.integers(), children, max_size=2),
            st.builds(Pair, children, children),
            st.builds(Layer, children, children),
        )

    return st.recursive(st.one_of(leaves, st.none()), node, max_leaves=6)


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=5), trees(arrays()), max_size=3))
def test_any_tree_comes_back_to_the_bit(tree):
    with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder, keep=1) as store:
        store.save(0, tree, {})
        template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        assert_same(store.restore(0, template)[0], tree)


def test_the_names_that_break_others(store):
    names = ("a.b", "a/b", "a", "a/0", "'", '"', "\\", "[0]", "", ".", "..", "a\nb", "\0", "\ud800", "x" * 400, "é")
    tree = {"s": {name: np.full((), index) for index, name in enumerate(names)}, "": [np.ones(1)], "s.a": np.ones(2)}
    saved(store, 1, **tree)
    assert_same(store.restore(1, tree)[0], tree)


def test_nothing_to_save_is_saved(store):
    saved(store, 1, state={}, data=[None, np.zeros((0, 2), np.float32)])
    empty = {"state": {}, "data": [None, np.ones((0, 2), np.float32)]}
    assert_same(store.restore(1, empty)[0], empty)
    saved(store, 2)
    assert store.restore(2, {}) == ({}, {"at": 2})


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_prng_keys_come_back_with_their_implementation(store, impl):
    keys = {"one": jax.random.key(3, impl=impl), "many": jax.random.split(jax.random.key(4, impl=impl), (2, 3))}
    keys["none"] = keys["many"][:0]
    saved(store, 1, keys=keys)
    restored = store.restore(1, jax.eval_shape(lambda: {"keys": keys}))[0]
    assert_same(restored, {"keys": keys})
    assert jax.random.uniform(restored["keys"]["one"]) == jax.random.uniform(keys["one"])


def test_keys_of_another_implementation_are_refused(store):
    saved(store, 1, key=jax.random.key(0))
    with pytest.raises(CheckpointError, match=r"key<fry>\[\] in the checkpoint, key<rbg>\[\] in the template"):
        store.restore(1, {"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(CheckpointError, match=r"key<fry>\[\] in the checkpoint, uint32\[2\] in the template"):
        store.restore(1, {"key": jax.random.PRNGKey(0)})


def test_the_type_of_the_template_comes_back(store):
    model = eqx.filter(eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)), eqx.is_array)
    tree = {"model": model, "opt": optax.adam(1e-3).init(model)}
    saved(store, 1, **tree)
    restored = store.restore(1, jax.eval_shape(lambda: tree))[0]
    assert_same(restored, tree)
    assert type(restored["model"]) is eqx.nn.MLP
    assert type(restored["opt"][0]) is type(tree["opt"][0])


def test_sharded_arrays_are_saved_as_global_values(store):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    value = np.arange(32.0, dtype=np.float32).reshape(16, 2)
    split = jax.device_put(value, NamedSharding(mesh, PartitionSpec("d")))
    copied = jax.device_put(value, NamedSharding(mesh, PartitionSpec()))
    saved(store, 1, split=split, copied=copied)
    assert_same(store.restore(1, {"split": split, "copied": value})[0], {"split": value, "copied": value})


def test_the_caller_may_donate_and_overwrite_at_once(store):
    step = jax.jit(lambda leaves: [leaf * 0 - 1 for leaf in leaves], donate_argnums=0)
    leaves, own, facts = [jnp.arange(1e5) for _ in range(4)], np.ones(3), {"list": [1]}
    expected = np.asarray(leaves[0]).copy()
    for number in range(1, 4):
        buffers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
        store.save(number, {"leaves": leaves, "own": own}, facts)
        leaves = step(leaves)
        assert [leaf.unsafe_buffer_pointer() for leaf in leaves] == buffers  # the save holds no view of them
        own[:], facts["list"] = number + 1, [number + 1]
        restored, back = store.restore(number, {"leaves": leaves, "own": own})
        assert all((leaf == expected).all() for leaf in restored["leaves"])
        assert (restored["own"] == number).all()
        assert back == {"list": [number]}
        expected = np.full(100_000, -1, np.float32)


def test_saving_and_restoring_compile_nothing(store, compilations):
    tree = {"w": jnp.ones((3, 4)), "key": jax.random.key(0)}
    compilations.clear()
    saved(store, 1, **tree)
    store.restore(1, tree)
    assert compilations.names == []


def test_only_the_last_are_kept(store):
    assert (store.steps(), store.latest()) == ((), None)
    for step in (2, 3, 5, 8, 13):
        store.save(step, {"s": state(step)}, {})
    store.wait()
    assert (store.steps(), store.latest()) == ((5, 8, 13), 13)
    assert store.restore(5, {"s": state()})[0]["s"]["count"] == 5


def test_facts_are_json_and_read_alone(store):
    facts = {"position": [3, {"epoch": 1}], "loss": float("inf"), "none": None, "text": "é"}
    store.save(1, {}, facts)
    store.wait()
    assert store.read_facts(1) == store.restore(1, {})[1] == facts
    with pytest.raises(CheckpointError, match="facts of checkpoint 2 are not JSON"):
        store.save(2, {}, {"path": Path()})
    saved(store, 2)
    assert store.steps() == (1, 2)


def test_every_mismatch_is_listed_at_once(store, snapshot):
    layer = {"weight": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    saved(store, 7, state={"layers": [layer], "step": jnp.int32(1), "old": jnp.ones(1)})
    template = {
        "state": {
            "layers": [{"weight": jnp.ones((2, 3), jnp.bfloat16), "biass": jnp.ones(3)}],
            "step": jnp.ones(1, jnp.int32),
            "new": jax.ShapeDtypeStruct((4,), jnp.float32),
        }
    }
    with pytest.raises(CheckpointError) as error:
        store.restore(7, template)
    snapshot("mismatches", str(error.value).replace(str(store._directory), "runs/digits/checkpoints"))
    assert "state.layers[0].weight" in str(error.value)


def fail(*args: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("place", ["write_stored", "write_atomically"])
@pytest.mark.parametrize("surface", ["save", "wait", "close", "restore"])
def test_an_error_in_the_background_surfaces_once(tmp_path, monkeypatch, place, surface):
    store = CheckpointStore(tmp_path, keep=1)
    saved(store, 1, s=state(1))
    with monkeypatch.context() as patch:
        patch.setattr(_checkpoint, place, fail)
        store.save(2, {"s": state(2)}, {})
        act = {
            "save": lambda: store.save(3, {"s": state(3)}, {}),
            "wait": store.wait,
            "close": store.close,
            "restore": lambda: store.restore(1, {"s": state()}),
        }[surface]
        with pytest.raises(CheckpointError, match="checkpoint 2 was not saved") as error:
            act()
    assert isinstance(error.value.__cause__, OSError)
    assert "No space left" in str(error.value)
    assert listing(tmp_path) == ["1"]  # neither half of 2, nor 3, and 1 is not evicted
    if surface == "close":
        store.close()
        return
    saved(store, 2, s=state(2))  # the store goes on
    assert store.steps() == (2,)
    store.close()


def test_an_older_step_that_cannot_be_removed_is_said(tmp_path, monkeypatch):
    with CheckpointStore(tmp_path, keep=1) as store:
        saved(store, 1)
        with monkeypatch.context() as patch:
            patch.setattr(_checkpoint, "_remove", fail)
            with pytest.raises(CheckpointError, match=r"checkpoint 2 is saved, but older ones .*\n.*\n.*No space left"):
                saved(store, 2)
        assert store.steps() == (1, 2)
        saved(store, 2)
        saved(store, 3)
        assert store.steps() == (3,)


def test_the_failure_of_orbax_itself_is_raised_and_not_logged(store, monkeypatch, capfd, caplog):
    bad = {"x": np.ones(3, ml_dtypes.uint4)}
    monkeypatch.setattr(_checkpoint, "storable", lambda host, keys: (bad, {}))
    store.save(1, {"x": np.ones(3)}, {})
    with pytest.raises(CheckpointError, match="Unsupported data type"):
        store.wait()
    assert store.steps() == ()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_the_newest_save_waits_for_the_one_before(tmp_path, monkeypatch):
    with CheckpointStore(tmp_path, keep=3) as store:
        go, write = threading.Event(), _checkpoint.write_stored
        monkeypatch.setattr(_checkpoint, "write_stored", lambda *args: (go.wait(10), write(*args)))
        begin = time.perf_counter()
        store.save(1, {"s": state(1)}, {})
        assert time.perf_counter() - begin < 5  # it did not wait for the disk
        assert store.steps() == ()  # what is not finished does not count
        assert store.latest() is None
        threading.Timer(0.2, go.set).start()
        store.save(2, {"s": state(2)}, {})
        assert store.steps() == (1,)
        store.wait()
        assert store.steps() == (1, 2)


def test_the_same_step_of_the_same_run_is_saved_once(tmp_path):
    with CheckpointStore(tmp_path, keep=3) as store:
        saved(store, 5, s=state(1))
        before = (tmp_path / "5").stat().st_ino
        saved(store, 5, s=state(2))
        with pytest.raises(CheckpointError, match="steps must grow"):
            store.save(4, {"s": state(1)}, {})
        with pytest.raises(CheckpointError, match="not negative"):
            store.save(-1, {"s": state(1)}, {})
    with CheckpointStore(tmp_path, keep=3) as resumed:
        assert resumed.restore(5, {"s": state()})[0]["s"]["count"] == 1
        saved(resumed, 5, s=state(2))  # a run that resumes at its end
        assert (tmp_path / "5").stat().st_ino == before
        saved(resumed, 6, s=state(6))
        assert resumed.steps() == (5, 6)


def test_a_run_does_not_mix_with_another(tmp_path, snapshot):
    with CheckpointStore(tmp_path, keep=3) as store:
        saved(store, 100, s=state(1))
        saved(store, 200, s=state(2))
    with CheckpointStore(tmp_path, keep=3) as stranger:
        with pytest.raises(CheckpointError) as error:
            stranger.save(50, {"s": state(9)}, {})
        snapshot("foreign_steps", str(error.value).replace(str(tmp_path), "runs/digits/checkpoints"))
        with pytest.raises(CheckpointError, match="did not make"):
            stranger.save(200, {"s": state(9)}, {})
        assert stranger.restore(200, {"s": state()})[0]["s"]["count"] == 2


def test_going_back_leaves_the_later_line(tmp_path):
    with CheckpointStore(tmp_path, keep=3) as store:
        for step in (10, 20, 30):
            saved(store, step, s=state(step))
    with CheckpointStore(tmp_path, keep=3) as back:
        back.restore(10, {"s": state()})
        assert back.steps() == (10, 20, 30)  # looking back destroys nothing
        saved(back, 20, s=state(-20))
        assert back.steps() == (10, 20)
        assert back.restore(20, {"s": state()})[0]["s"]["count"] == -20


@pytest.mark.parametrize("breakage", ["missing", "format", "json", "arrays", "truncated", "lie"])
def test_what_cannot_be_read_is_said(store, breakage):
    saved(store, 3, s=state(3))
    folder = store._directory / "3"
    document = json.loads((folder / "checkpoint.json").read_text())
    match breakage:
        case "missing":
            with pytest.raises(CheckpointError, match=r"there is no checkpoint 4[^$]*one of: 3"):
                store.restore(4, {"s": state()})
            return
        case "format":
            (folder / "checkpoint.json").write_text(json.dumps(document | {"format": 99}))
        case "json":
            (folder / "checkpoint.json").write_text("{")
        case "arrays":
            (folder / "arrays").rename(folder / "gone")
        case "truncated":
            for file in (folder / "arrays").rglob("*"):
                if file.is_file():
                    file.write_bytes(file.read_bytes()[:10])
        case "lie":
            document["leaves"]["s.w"]["shape"] = [6]
            (folder / "checkpoint.json").write_text(json.dumps(document))
    template = {"s": state()} if breakage != "lie" else {"s": state() | {"w": jnp.ones(6)}}
    with pytest.raises(
        CheckpointError, match="unknown format" if breakage == "format" else "3 cannot be read"
    ) as error:
        store.restore(3, template)
    assert breakage == "format" or error.value.__cause__ is not None


def test_orbax_alone_reads_a_checkpoint(store):
    import orbax.checkpoint as ocp

    saved(store, 3, s=state(3), b=jnp.ones(2, jnp.bfloat16))
    with ocp.PyTreeCheckpointer() as reader:
        arrays = reader.restore(store._directory / "3" / "arrays")
    expected = {"s.w": np.full((2, 3), 3, np.float32), "s.count": np.full((), 3, np.int32)}
    assert_same(arrays, expected | {"b": np.ones(2, ml_dtypes.bfloat16)})
    with ocp.CheckpointManager(store._directory) as manager:
        assert manager.latest_step() == 3
        restored = manager.restore(3, args=ocp.args.Composite(arrays=ocp.args.StandardRestore()))
    assert_same(restored["arrays"], arrays)


def test_restoring_works_inside_a_running_event_loop(store):
    saved(store, 1, s=state(1))

    async def notebook() -> Any:
        store.save(2, {"s": state(2)}, {})
        return store.restore(2, {"s": state()})[0]

    assert asyncio.run(notebook())["s"]["count"] == 2


def test_a_closed_store_saves_no_more(store):
    saved(store, 1, s=state(1))
    store.close()
    store.close()
    assert store.restore(1, {"s": state()})[0]["s"]["count"] == 1
    with pytest.raises(CheckpointError, match="the store is closed"):
        store.save(2, {"s": state(2)}, {})


@pytest.mark.parametrize("keep", [0, -1, True, 1.0])
def test_keep_is_at_least_one(tmp_path, keep):
    with pytest.raises(CheckpointError, match="keep"):
        CheckpointStore(tmp_path, keep)
