"""The rules of a mesh: which arrays are spread along which axis, and which batches and settings are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.errors import DataError, EquikdError
from equikd.sharding import Spread, check_processes, everywhere, micro_batches, place, settle, spread_of, uneven
from tests.train._small import arrays, quick

SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24]), max_size=3).map(tuple)


def spread(devices: int = 8, min_bytes: int | None = None) -> Spread:
    mesh = ek.sharding.data_parallel(devices) if min_bytes is None else ek.sharding.fsdp(devices, min_bytes=min_bytes)
    found = spread_of(quick(mesh=mesh))
    assert found is not None
    return found


@given(shape=SIZES, devices=st.integers(1, 8), min_bytes=st.sampled_from([0, 1, 64, 1024]))
def test_an_array_is_spread_along_its_largest_divisible_axis(
    shape: tuple[int, ...], devices: int, min_bytes: int
) -> None:
    leaf = jax.ShapeDtypeStruct(shape, np.float32)
    where = spread(devices, min_bytes).of(leaf)
    fitting = [size for size in shape if size and size % devices == 0]
    if not fitting or leaf.size * 4 < max(min_bytes, 1):
        assert where.is_fully_replicated or devices == 1
        assert where.shard_shape(shape) == shape
        return
    axis = shape.index(max(fitting))
    expected = tuple(size // devices if at == axis else size for at, size in enumerate(shape))
    assert where.shard_shape(shape) == expected


@given(shape=SIZES)
def test_data_parallel_leaves_the_train_state_whole(shape: tuple[int, ...]) -> None:
    assert spread().of(jax.ShapeDtypeStruct(shape, np.float32)).shard_shape(shape) == shape


def test_prng_keys_stay_whole() -> None:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    assert spread(8, 0).of(keys).is_fully_replicated


@given(rows=st.integers(1, 100), devices=st.integers(1, 8))
def test_the_sizes_that_an_error_names_are_divisible(rows: int, devices: int) -> None:
    filled = spread(devices).filled(rows)
    assert rows <= filled < rows + devices
    assert filled % devices == 0
    if rows % devices:
        text = str(uneven(rows, devices))
        assert f"batch_size={filled}" in text
        assert f"batch_size={filled - devices}" in text or filled == devices
        assert rows % int(text.partition("mesh.devices=")[2].partition(",")[0]) == 0


def test_host_arrays_stay_on_the_host_and_others_go_to_their_devices() -> None:
    batch = {"host": np.ones((16, 2)), "one": jax.device_put(np.ones(16), jax.devices()[3])}
    placed = place(batch, spread())
    assert placed["host"] is batch["host"]
    assert placed["one"].sharding == spread().rows
    assert place(placed, spread())["one"] is placed["one"]
    assert place(batch)["one"] is batch["one"]
    with pytest.raises(DataError, match="16 rows cannot be spread over 6 devices"):
        place(batch, spread(6))


def test_settling_puts_all_arrays_and_leaves_what_is_no_array() -> None:
    tree = {"w": np.ones((8, 3), np.float32), "b": jnp.ones(3), "name": "x", "key": jax.random.key(1)}
    settled = settle(tree, spread(8, 16))
    assert settled["name"] == "x"
    assert settled["w"].sharding.shard_shape((8, 3)) == (1, 3)
    assert settled["b"].sharding.is_fully_replicated
    assert len(settled["key"].devices()) == 8
    np.testing.assert_array_equal(settled["w"], tree["w"])


def test_micro_batches_are_spread_over_all_devices() -> None:
    """Or each would be computed by those devices only that hold its rows."""
    rows = jax.device_put(np.arange(64.0).reshape(32, 2), spread().rows)
    parted = jax.jit(lambda x: micro_batches(x.reshape(4, 8, 2), spread()))(rows)
    assert parted.sharding.shard_shape(parted.shape) == (4, 1, 2)
    keys = jax.jit(lambda: micro_batches(jax.random.split(jax.random.key(0), (4, 8)), spread()))()
    assert keys.sharding.shard_shape(keys.shape) == (4, 1)
    odd = jax.jit(lambda x: micro_batches(x.reshape(8, 4, 2), spread()))(rows)
    np.testing.assert_array_equal(odd, np.arange(64.0).reshape(8, 4, 2))


def test_what_stands_in_for_no_mesh_changes_no_program() -> None:
    tree = {"x": jnp.ones((4, 4))}
    assert everywhere(tree, None) is tree
    assert micro_batches(tree, None) is tree


def test_a_mesh_is_plain_data() -> None:
    for mesh in (ek.sharding.data_parallel(4), ek.sharding.fsdp(min_bytes=128), ek.sharding.fsdp(2)):
        trainer = quick(mesh=mesh, train_data=ek.lazy(arrays)())
        again = ek.config.from_json(ek.config.to_json(trainer))
        assert again.mesh == mesh
        assert spread_of(again) == spread_of(trainer)
        assert spread_of(again) is spread_of(trainer)  # made once
    lazily = quick(mesh=ek.lazy(ek.sharding.data_parallel)(devices=ek.ref("shared.devices")), shared={"devices": 4})
    assert spread_of(lazily.in_step) == spread(4)
    assert spread_of(ek.override(quick(mesh=ek.sharding.data_parallel()), {"mesh.devices": 2})) == spread(2)
    assert spread_of(quick()) is None


REFUSED: dict[str, Any] = {
    "too_many": lambda: ek.sharding.data_parallel(16),
    "none": lambda: ek.sharding.data_parallel(0),
    "none_by_a_node": lambda: ek.lazy(ek.sharding.fsdp)(devices=-1),
    "negative_size": lambda: ek.sharding.fsdp(min_bytes=-1),
    "no_mesh": lambda: ek.lazy(dict)(devices=4),
    "a_word": lambda: "data",
    "a_built_mesh": lambda: jax.make_mesh((8,), ("b",), axis_types=(jax.sharding.AxisType.Auto,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_be(name: str, snapshot: Any, compilations: Any) -> None:
    with pytest.raises(EquikdError) as caught:
        quick(mesh=REFUSED[name]()).init()
    snapshot(name, str(caught.value))
    assert compilations.names == []


def test_several_processes_are_refused(monkeypatch: Any, snapshot: Any) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(EquikdError) as caught:
        check_processes()
    snapshot("several_processes", str(caught.value))
    with pytest.raises(EquikdError, match="several processes"):
        quick(mesh=ek.sharding.data_parallel()).train()
