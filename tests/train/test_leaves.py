"""Leaves by name: what can be saved, what differs, and messages that list it all."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from equikd.errors import CheckpointError
from equikd.train import _leaves
from equikd.train._leaves import differences, entry_of, is_array, named, spell, to_host


def test_names_are_those_of_paths_everywhere():
    assert named({"layers": [{"w": 1}], "a b": 2}) == {"['a b']": 2, "layers[0].w": 1}
    assert named(3) == {"": 3}


def test_two_leaves_of_one_name_are_refused():
    class Key:
        def __init__(self, order: int) -> None:
            self.order = order

        def __lt__(self, other: "Key") -> bool:
            return self.order < other.order

        def __str__(self) -> str:
            return "same"

    with pytest.raises(CheckpointError, match=r"two leaves have one name\n  - s.same"):
        named({"s": {Key(0): np.ones(1), Key(1): np.ones(2)}})


def test_all_leaves_that_cannot_be_saved_are_listed(snapshot):
    gone = jnp.ones(2)
    gone.delete()
    leaves = {"rate": 0.1, "act": jax.nn.relu, "text": np.array(["a"]), "gone": gone, "w": jnp.ones(1)}
    with pytest.raises(CheckpointError) as error:
        to_host(named(leaves))
    snapshot("not_arrays", str(error.value))


def test_a_tracer_is_not_saved():
    with pytest.raises(CheckpointError, match="x: a tracer; save outside jit"):
        jax.jit(lambda x: to_host({"x": x}))(1.0)


@pytest.mark.parametrize(
    "array",
    [
        np.array([None]),
        np.zeros(2, ">f4"),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, np.longdouble),
        np.zeros(2, "V4"),
        np.zeros(2, "M8[s]"),
        1.0,
        [1.0],
    ],
)
def test_only_arrays_of_numbers_are_arrays(array):
    assert not is_array(array)


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex128", "bfloat16", "int2", "float8_e5m2"])
def test_every_dtype_of_jax_is_an_array(dtype):
    assert is_array(np.zeros(2, jnp.dtype(dtype)))
    assert spell(entry_of(jax.ShapeDtypeStruct((2,), jnp.dtype(dtype)))) == f"{dtype}[2]"


def test_copies_own_their_memory_in_c_order():
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    host, keys = to_host({"f": array, "s": np.float32(2), "j": jnp.ones((2, 2)), "k": jax.random.key(0)})
    assert all(copy.flags.owndata and copy.flags.c_contiguous and copy.flags.writeable for copy in host.values())
    assert keys == {"k": {"dtype": "key<fry>", "shape": [], "key": "threefry2x32"}}
    assert host["s"].shape == ()
    assert (host["f"] == array).all()


def test_an_accelerator_gives_the_same_copies(monkeypatch):
    leaves = {"j": jnp.arange(3), "k": jax.random.key(7), "n": np.ones(2)}
    expected = to_host(leaves)
    fetched = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_get", lambda tree: fetched.append(len(tree)) or device_get(tree))
    host, keys = to_host(leaves)
    assert fetched == [3]  # one transfer
    assert keys == expected[1]
    assert all((host[path] == expected[0][path]).all() and host[path].flags.owndata for path in leaves)


def test_differences_name_both_sides_and_a_renamed_leaf():
    old, new = entry_of(np.zeros((2, 3), np.float32)), entry_of(np.zeros((2, 3), ml_dtypes.bfloat16))
    assert differences({"a": old, "b": old}, {"a": old, "b": old}, "file") == []
    assert differences({"a": old, "layer.bias": old}, {"a": new, "layer.biass": old}, "file") == [
        "a: float32[2, 3] in the file, bfloat16[2, 3] in the template",
        "layer.bias: float32[2, 3] in the file, nothing in the template",
        "layer.biass: not in the file, float32[2, 3] in the template (near: layer.bias)",
    ]


def test_a_long_listing_stays_on_one_screen_and_counts_the_rest():
    lines = [f"leaf {number}" for number in range(600)]
    text = _leaves.cut("600 leaves differ", lines, where="here", fix="mend")
    assert len(text.splitlines()) <= 40
    assert "- leaf 28\n  - ... and 571 more" in text
    assert "more" not in _leaves.cut("30 leaves differ", lines[:30])
