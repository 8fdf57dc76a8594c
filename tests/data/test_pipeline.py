"""Batches: what becomes one and what is refused; padding; and what `pipeline` takes."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.data import (
    Batch,
    InMemory,
    Iterable,
    Pipeline,
    as_batch,
    batch_size,
    element_spec,
    pad,
    pipeline,
)
from equikd.errors import DataError

TWO = [{"x": np.zeros((2, 3), np.float32)}, {"x": np.ones((2, 3), np.float32)}]


def first(stream):
    return next(stream.batches(0, 0))


# ---- as_batch


def test_a_bare_pytree_is_all_real_and_its_mask_is_shared_and_read_only():
    batch = as_batch({"x": np.zeros((3, 2), np.float32)})
    assert batch.mask.tolist() == [True] * 3
    assert batch.mask.dtype == bool
    assert as_batch(np.zeros((3, 7), np.float32)).mask is batch.mask
    with pytest.raises(ValueError, match="read-only"):
        batch.mask[0] = False


def test_a_batch_is_a_pytree_of_its_data_and_mask():
    batch = as_batch((np.zeros((3, 2), np.float32), np.arange(3, dtype=np.int32)))
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: x + x, b))(batch)
    assert isinstance(doubled, Batch)
    assert doubled.data[1].tolist() == [0, 2, 4]
    assert list(ek.tree.named_leaves(batch)) == ["data[0]", "data[1]", "mask"]


def test_its_own_mask_is_kept_and_a_batch_that_needs_no_change_comes_back_itself():
    batch = Batch(np.zeros((2, 1), np.float32), np.array([True, False]))
    assert as_batch(batch) is batch
    converted = as_batch(Batch(np.zeros((2, 1)), [True, False]))
    assert converted.data.dtype == np.float32
    assert converted.mask.tolist() == [True, False]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("float64", "float32"),
        ("int64", "int32"),
        ("uint64", "uint32"),
        ("complex128", "complex64"),
        ("float16", "float16"),
        ("uint8", "uint8"),
        ("int8", "int8"),
        ("bool", "bool"),
        (jnp.bfloat16, "bfloat16"),
    ],
)
def test_dtypes_are_those_that_jax_computes_with(given, wanted):
    batch = as_batch(np.ones(3, given))
    assert batch.data.dtype.name == wanted
    assert batch.data.tolist() == [1, 1, 1]
    assert jax.jit(lambda x: x)(batch.data).dtype == batch.data.dtype


def test_nothing_is_narrowed_under_x64():
    with jax.enable_x64(True):
        assert as_batch(np.array([2**40])).data.tolist() == [2**40]
        assert as_batch(np.array([1e300])).data.dtype == np.float64
    with pytest.raises(DataError, match="1099511627776 in int64"):
        as_batch(np.array([2**40]))


def test_nan_and_inf_are_no_overflow():
    assert np.isinf(as_batch(np.array([np.inf, 1.0])).data[0])
    assert np.isnan(as_batch(np.array([np.nan, 1.0])).data[0])


def test_arrays_of_jax_tracers_and_specs_stay():
    x = jnp.ones((2, 3))
    assert as_batch({"x": x}).data["x"] is x
    spec = jax.ShapeDtypeStruct((2, 3), np.float32)
    assert as_batch(spec).data is spec

    @jax.jit
    def total(data):
        batch = as_batch(data)
        return jnp.where(batch.mask, batch.data, 0).sum()

    assert total(jnp.arange(4)).item() == 6


def test_what_numpy_reads_as_an_array_is_one():
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.full((2, 2), 5)

    assert as_batch({"x": Tensor()}).data["x"].tolist() == [[5, 5], [5, 5]]


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("rows_disagree", {"image": np.zeros((3, 8)), "label": np.zeros(2), "meta": {"id": np.zeros(3)}}),
        (
            "no_arrays_inside",
            {"a": 3, "b": "text", "c": np.array(["cat", "dog"]), "d": np.array([object()]), "ok": np.zeros(2)},
        ),
        ("values_do_not_fit", {"ids": np.array([0, -(2**31) - 1]), "x": np.array([[1.0], [-3e300]])}),
        ("empty", {}),
        ("no_rows", np.zeros((0, 3))),
        ("mask_of_other_size", Batch(np.zeros((3, 2)), np.ones(2, bool))),
        ("mask_of_numbers", Batch(np.zeros((3, 2)), np.ones(3))),
    ],
)
def test_what_is_no_batch(name, element, snapshot):
    with pytest.raises(DataError) as error:
        as_batch(element)
    snapshot(name, str(error.value))


@pytest.mark.parametrize("dtype", ["M8[s]", "longdouble", [("a", "f4")]])
def test_dtypes_that_jax_lacks_are_refused(dtype):
    with pytest.raises(DataError, match="is nothing that JAX computes with"):
        as_batch(np.zeros(3, dtype))


def test_spec_has_the_shapes_and_dtypes_and_no_values():
    spec = element_spec(as_batch({"x": np.zeros((4, 2)), "y": np.zeros(4, np.uint8)}))
    assert spec.data["x"] == jax.ShapeDtypeStruct((4, 2), np.float32)
    assert spec.data["y"] == jax.ShapeDtypeStruct((4,), np.uint8)
    assert spec.mask == jax.ShapeDtypeStruct((4,), bool)
    assert batch_size(spec) == 4


# ---- pad


@given(st.integers(1, 9), st.integers(0, 9), st.data())
def test_padding_keeps_the_rows_and_repeats_a_real_one(rows, more, data):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    batch = Batch({"x": np.arange(rows * 2.0).reshape(rows, 2)}, mask)
    padded = pad(batch, rows + more)
    assert batch_size(padded) == rows + more
    np.testing.assert_array_equal(padded.data["x"][:rows], batch.data["x"])
    np.testing.assert_array_equal(padded.data["x"][rows:], np.repeat(batch.data["x"][:1], more, 0))
    assert padded.mask.tolist() == [*mask.tolist(), *[False] * more]


# ---- pipeline


class Own:
    def batches(self, start, seed):
        yield from map(as_batch, TWO[start:])

    def epoch(self):
        return self.batches(0, 0)

    def spec(self):
        return element_spec(as_batch(TWO[0]))


@ek.config.config
class OwnConfig:
    source: object
    scale: float = 2.0

    def batches(self, start, seed):
        for batch in self.source.batches(start, seed):
            yield jax.tree.map(lambda x: x * self.scale if x.dtype != bool else x, batch)

    def epoch(self):
        return self.batches(0, 0)

    def spec(self):
        return self.source.spec()


def numbers(count):
    for number in range(count):
        yield np.full((2, 1), number, np.float32)


def loader(count):
    return [np.full((2, 1), number, np.float32) for number in range(count)]


def ragged():
    yield np.zeros(2)
    yield np.zeros(3)


def reader_of(count):
    def read(seed):
        yield np.full((2, 1), seed + count, np.float32)

    return read


def test_a_pipeline_comes_back_itself():
    own, memory = Own(), InMemory(np.zeros((64, 1)))
    assert isinstance(own, Pipeline)
    assert pipeline(own) is own
    assert pipeline(memory) is memory


def test_functions_lists_and_loaders_of_batches():
    for data in (lambda: iter(TWO), lambda: TWO, TWO, collections.deque(TWO)):
        stream = pipeline(data)
        for _ in range(2):  # it can be started again
            assert [batch.data["x"][0, 0].item() for batch in stream.batches(0, 0)] == [0.0, 1.0]
        assert stream.spec().data["x"].shape == (2, 3)


def test_nodes_are_resolved_and_one_that_gives_an_iterator_is_called_anew():
    assert first(pipeline(ek.lazy(loader)(3))).data[0, 0] == 0
    stream = pipeline(ek.lazy(numbers)(3))
    assert [[b.data[0, 0].item() for b in stream.epoch()] for _ in range(2)] == [[0, 1, 2]] * 2
    assert stream.spec().data.shape == (2, 1)
    assert first(pipeline(ek.lazy(Own)())).data["x"].shape == (2, 3)
    assert next(pipeline(ek.lazy(reader_of)(10)).batches(0, 5)).data[0, 0] == 15
    assert next(pipeline(Iterable(ek.lazy(reader_of)(10))).batches(0, 5)).data[0, 0] == 15


def test_references_are_looked_up_in_the_root():
    root = {
        "size": 2,
        "count": 3,
        "memory": InMemory(np.arange(6.0), batch_size=ek.ref("size")),
        "other": ek.ref("memory"),
    }
    assert batch_size(first(pipeline(root["memory"], root=root, path="memory"))) == 2
    assert batch_size(first(pipeline(root["other"], root=root, path="other"))) == 2
    root = ek.override(root, {"size": 3})
    assert batch_size(first(pipeline(root["memory"], root=root, path="memory"))) == 3
    stream = pipeline(Iterable(ek.lazy(numbers)(ek.ref("count"))), root=root, path="data")
    assert len(list(stream.batches(0, 0))) == 3


def test_a_config_of_ones_own_is_resolved():
    stream = pipeline(OwnConfig(ek.lazy(Own)(), scale=4.0))
    assert [batch.data["x"][0, 0].item() for batch in stream.epoch()] == [0.0, 4.0]


def test_an_error_while_loading_names_the_path():
    def load():
        raise FileNotFoundError("digits.npz")

    with pytest.raises(FileNotFoundError) as error:
        first(pipeline(InMemory(ek.lazy(load)()), path="train_data"))
    assert "while resolving train_data.arrays = " in error.value.__notes__[0]


def test_arrays_that_do_not_fit_are_found_at_once_under_their_path():
    with pytest.raises(DataError, match=r"^evals\.test\.data: InMemory: its arrays disagree"):
        pipeline(InMemory((np.zeros(3), np.zeros(4))), path="evals.test.data")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("one_shot", iter(TWO)),
        ("bare_dict", {"image": np.zeros((9, 8)), "label": np.zeros(9)}),
        ("bare_array", np.zeros((9, 8))),
        ("tuple_of_arrays", (np.zeros((9, 8)), np.zeros(9))),
        ("one_batch", as_batch(np.zeros((9, 8)))),
        ("none", None),
        ("text", "data/train"),
        ("number", 3),
        ("class_not_instance", InMemory),
    ],
)
def test_what_is_no_pipeline(name, data, snapshot):
    with pytest.raises(DataError) as error:
        pipeline(data, path="train_data")
    snapshot(name, str(error.value))


def test_exhausted(snapshot):
    snapshot("exhausted", f"{ek.data.exhausted(7, 100)}\n\n{ek.data.exhausted(0, 100, 'evals.test.data')}")


def test_messages_name_the_path_of_a_loader_and_of_a_node():
    for data in ([np.zeros(2), np.zeros(3)], ek.lazy(ragged)()):
        with pytest.raises(DataError, match=r"^element 1 of evals\.test\.data is not like the first"):
            list(pipeline(data, path="evals.test.data").batches(0, 0))
    with pytest.raises(DataError, match=r"^element 1 of data\.make is not like the first"):
        list(pipeline(Iterable(ek.lazy(ragged)())).batches(0, 0))
