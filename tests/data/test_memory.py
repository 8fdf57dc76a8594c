"""`InMemory`: laws of the order, padding, positions; conversion and refusal of arrays."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.data import InMemory, batch_size, element_spec
from equikd.errors import ConfigError, DataError

SEEDS = st.integers(0, 2**32 - 1)


def numbered(rows, **options):
    return InMemory({"row": np.arange(rows, dtype=np.int32)}, **options)


def real_rows(batches):
    """Numbers of the real rows, batch by batch."""
    return [batch.data["row"][batch.mask].tolist() for batch in batches]


def taken(data, count, *, start=0, seed=0):
    return list(itertools.islice(data.batches(start, seed), count))


def flat(lists):
    return [row for part in lists for row in part]


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b))
    )


# ---- order


@given(st.integers(1, 60), st.integers(1, 70), SEEDS, st.integers(0, 3))
def test_each_row_once_an_epoch_in_the_documented_order(rows, size, seed, epoch):
    data = numbered(rows, batch_size=size, drop_remainder=False)
    batches = data.batches_per_epoch
    read = flat(real_rows(taken(data, batches, start=epoch * batches, seed=seed)))
    assert sorted(read) == list(range(rows))
    assert read == np.random.default_rng((seed, epoch)).permutation(rows).tolist()


@given(st.integers(1, 60), st.integers(1, 60), SEEDS)
def test_the_ragged_end_is_dropped_by_default(rows, size, seed):
    size = min(size, rows)
    data = numbered(rows, batch_size=size)
    for epoch in range(2):
        read = taken(data, data.batches_per_epoch, start=epoch * data.batches_per_epoch, seed=seed)
        assert all(batch.mask.all() and batch_size(batch) == size for batch in read)
        order = np.random.default_rng((seed, epoch)).permutation(rows)
        assert flat(real_rows(read)) == order[: rows - rows % size].tolist()


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 30), SEEDS, st.booleans(), st.booleans())
def test_a_start_equals_skipping(rows, size, start, seed, shuffle, drop):
    data = numbered(rows, batch_size=min(size, rows), shuffle=shuffle, drop_remainder=drop)
    late, early = taken(data, 7, start=start, seed=seed), taken(data, start + 7, seed=seed)[start:]
    assert all(map(same, late, early))
    again = numbered(rows, batch_size=min(size, rows), shuffle=shuffle, drop_remainder=drop)  # nothing kept in between
    assert all(map(same, late, taken(again, 7, start=start, seed=seed)))


def test_a_start_far_ahead_draws_nothing_before_it(monkeypatch):
    epochs = []
    default_rng = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: epochs.append(seed) or default_rng(seed))
    taken(numbered(10, batch_size=2), 1, start=5 * 10**9 + 3, seed=4)
    assert epochs == [(4, 10**9)]


def test_epochs_and_seeds_differ():
    data = numbered(100, batch_size=100)
    orders = [real_rows(taken(data, 3, seed=seed)) for seed in range(3)]
    assert len({tuple(order) for order in flat(orders)}) == 9


def test_the_order_depends_on_nothing_else():
    np.random.seed(0)  # noqa: NPY002  # the global generator must not matter
    reference = flat(real_rows(taken(numbered(60, batch_size=6), 10, seed=5)))
    np.random.seed(1)  # noqa: NPY002
    assert flat(real_rows(taken(numbered(60, batch_size=20), 3, seed=5))) == reference
    other = InMemory({"a": np.zeros((60, 9)), "row": np.arange(60)}, batch_size=12)
    assert flat(real_rows(taken(other, 5, seed=np.uint32(5)))) == reference
    interleaved = numbered(60, batch_size=6)
    streams = [interleaved.batches(0, 5), interleaved.batches(0, 6)]
    assert flat(real_rows([next(streams[0]) for _ in range(10) if next(streams[1])])) == reference


def test_its_own_seed_goes_before_the_trainers():
    assert real_rows(taken(numbered(50, seed=3), 1, seed=0)) == real_rows(taken(numbered(50), 1, seed=3))


def test_without_shuffling_rows_come_as_they_stand():
    data = numbered(7, batch_size=3, shuffle=False)
    assert real_rows(taken(data, 3)) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    data = numbered(7, batch_size=3, shuffle=False, drop_remainder=False)
    assert real_rows(taken(data, 4)) == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]


def test_all_arrays_of_a_row_stay_together():
    data = InMemory(
        (np.arange(50), {"square": np.arange(50) ** 2, "twice": np.arange(100).reshape(50, 2)}), batch_size=7
    )
    for batch in taken(data, 20):
        number, rest = batch.data
        np.testing.assert_array_equal(rest["square"], number**2)
        np.testing.assert_array_equal(rest["twice"], np.stack([2 * number, 2 * number + 1], 1))


# ---- evals and padding


@pytest.mark.parametrize("size", [1, 7, 64, 360, 1000])
def test_an_eval_reads_each_row_once_in_batches_of_one_size(size):
    data = numbered(360, batch_size=size)
    read = list(data.epoch())
    assert len(read) == -(-360 // size)
    assert flat(real_rows(read)) == list(range(360))
    assert all(same(element_spec(batch), data.spec()) for batch in read)
    assert all(batch.mask.all() for batch in read[:-1])
    padding = read[-1].data["row"][~read[-1].mask]
    assert padding.size == len(read) * size - 360
    assert (padding == read[-1].data["row"][0]).all()  # a real row


@given(st.integers(1, 40), st.integers(1, 50), SEEDS, st.booleans())
def test_every_batch_fits_the_spec(rows, size, seed, shuffle):
    data = numbered(rows, batch_size=size, drop_remainder=False, shuffle=shuffle)
    spec = data.spec()
    for batch in [*taken(data, 2 * data.batches_per_epoch, seed=seed), *data.epoch()]:
        assert same(element_spec(batch), spec)
        assert (np.isin(batch.data["row"], batch.data["row"][batch.mask])).all()  # padding repeats real rows


def test_an_eval_is_in_order_whatever_training_does():
    assert real_rows(numbered(5, batch_size=2, seed=9).epoch()) == [[0, 1], [2, 3], [4]]


# ---- arrays


def test_arrays_are_converted_once_to_what_jax_computes_with():
    arrays = {
        "x": np.linspace(0, 1, 10),
        "y": np.arange(10),
        "image": np.arange(10, dtype=np.uint8),
        "half": jnp.ones(10, jnp.bfloat16),
    }
    batch = taken(InMemory(arrays, batch_size=4), 1)[0]
    dtypes = {name: array.dtype.name for name, array in batch.data.items()}
    assert dtypes == {"x": "float32", "y": "int32", "image": "uint8", "half": "bfloat16"}
    assert all(type(array) is np.ndarray for array in batch.data.values())


def test_conversion_follows_x64():
    data = InMemory(np.linspace(0, 1, 10))
    assert data.spec().data.dtype == np.float32
    with jax.enable_x64(True):
        assert data.spec().data.dtype == np.float64
        assert next(data.epoch()).data.dtype == np.float64
    assert next(data.epoch()).data.dtype == np.float32


def test_fitting_arrays_are_not_copied():
    x = np.zeros((100, 3), np.float32)
    data = InMemory(x, batch_size=10, shuffle=False)
    assert np.shares_memory(next(data.epoch()).data, x)
    assert np.shares_memory(taken(data, 1)[0].data, x)
    shuffled = taken(InMemory(x, batch_size=10), 1)[0].data
    assert not np.shares_memory(shuffled, x)


def test_nobody_writes_into_the_data_through_a_batch():
    x = np.zeros((10, 3), np.float32)
    data = InMemory(x, batch_size=5, shuffle=False)
    for batch in [*taken(data, 1), next(data.epoch())]:
        with pytest.raises(ValueError, match="read-only"):
            batch.data[0] = 1
    x[0] = 1  # the caller's own array stays writable


def test_batches_are_fresh_memory():
    data = InMemory(np.arange(100, dtype=np.float32), batch_size=10)
    one, two = taken(data, 2)
    assert not np.shares_memory(one.data, two.data)
    assert one.data.flags.c_contiguous


def test_arrays_in_any_memory_order():
    x = np.asfortranarray(np.arange(40, dtype=np.float32).reshape(10, 4))
    for arrays in (x, x[::2], x.T, jnp.asarray(x)):
        read = np.concatenate([batch.data[batch.mask] for batch in InMemory(arrays, batch_size=3).epoch()])
        np.testing.assert_array_equal(read, np.asarray(arrays))
    assert next(InMemory(x, batch_size=3).epoch()).data.flags.c_contiguous  # else each `take` would copy all of it


def test_a_node_loads_them_once():
    calls = []

    def load(rows):
        calls.append(rows)
        return {"row": np.arange(rows)}

    data = InMemory(ek.lazy(load)(20), batch_size=5)
    assert calls == []
    data.spec(), list(data.epoch()), taken(data, 2), data.rows
    ek.data.pipeline(data).spec()
    assert calls == [20]
    assert real_rows(taken(data, 4)) == real_rows(taken(numbered(20, batch_size=5), 4))


def test_a_node_goes_through_json():
    data = InMemory(ek.lazy(np.ones)((10, 3)), batch_size=4, seed=1)
    again = ek.config.from_json(ek.config.to_json(data))
    assert again == data
    assert taken(again, 1)[0].data.tolist() == np.ones((4, 3)).tolist()


def test_pickling_carries_the_arrays_once():
    data = InMemory(np.zeros((1000, 10)), batch_size=4)
    before = len(pickle.dumps(data))
    taken(data, 1), list(data.epoch())
    assert len(pickle.dumps(data)) == before
    assert same(taken(pickle.loads(pickle.dumps(data)), 1), taken(data, 1))


def test_changing_its_settings_keeps_the_arrays():
    data = numbered(10, batch_size=5)
    assert batch_size(taken(ek.override(data, {"batch_size": 2}), 1)[0]) == 2
    assert ek.override(data, {"batch_size": 2}).arrays is data.arrays


def test_its_size():
    assert (numbered(10, batch_size=4).rows, numbered(10, batch_size=4).batches_per_epoch) == (10, 2)
    assert numbered(10, batch_size=4, drop_remainder=False).batches_per_epoch == 3


# ---- errors


def load_unequal(train):
    return {"image": np.zeros((9, 8)), "label": np.zeros(8)}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("batch_larger_than_data", lambda: numbered(360, batch_size=1000).batches(0, 0)),
        ("rows_disagree", lambda: InMemory({"image": np.zeros((9, 8)), "label": np.zeros(8)}).spec()),
        ("loaded_rows_disagree", lambda: InMemory(ek.lazy(load_unequal)(train=True)).spec()),
        ("objects", lambda: InMemory({"a": np.array([{}, {}]), "b": np.array(["x"]), "c": np.zeros(2)}).spec()),
        ("number_too_large", lambda: InMemory({"id": np.array([1, 2**40])}).spec()),
        ("keys", lambda: InMemory(jax.random.split(jax.random.key(0), 3)).spec()),
        ("nothing", lambda: InMemory({}).spec()),
        ("no_rows", lambda: InMemory({"x": np.zeros((0, 3))}).spec()),
        ("listed", lambda: InMemory({"x": np.zeros((2000, 3)), "label": [1] * 2000, "deep": [[1, 2]] * 2}).spec()),
        ("listed_texts", lambda: InMemory({"label": ("a", "b")}).spec()),
        ("many_wrong", lambda: InMemory({f"x{i}": 3 for i in range(30)}).spec()),
        ("scalar", lambda: InMemory({"x": np.zeros(3), "n": 3}).spec()),
        ("batch_size_0", lambda: numbered(3, batch_size=0).spec()),
        ("negative_seed", lambda: next(numbered(3, batch_size=1).batches(0, -1))),
    ],
)
def test_errors(name, make, snapshot):
    with pytest.raises(DataError) as error:
        make()
    snapshot(name, str(error.value))


def test_validate_names_the_path(snapshot):
    cfg = {"train_data": numbered(3, batch_size=0), "test": numbered(3, seed=-1)}
    with pytest.raises(ConfigError) as error:
        ek.config.validate(cfg)
    snapshot("validate", str(error.value))


def test_a_larger_batch_is_fine_for_evals_and_with_padding():
    assert numbered(3, batch_size=5).spec().mask.shape == (5,)
    assert real_rows(numbered(3, batch_size=5).epoch()) == [[0, 1, 2]]
    assert sorted(real_rows(taken(numbered(3, batch_size=5, drop_remainder=False), 1))[0]) == [0, 1, 2]


def test_no_program_is_compiled(compilations):
    data = InMemory({"x": np.zeros((100, 3)), "y": np.arange(100)}, batch_size=7)
    data.spec(), list(data.epoch()), taken(data, 30)
    assert compilations.names == []


def test_masked_arrays_are_refused(snapshot):
    masked = np.ma.masked_array(np.zeros((4, 2), np.float32), mask=np.eye(4, 2))
    with pytest.raises(DataError) as error:
        InMemory({"x": masked, "y": np.zeros(4)}).spec()
    snapshot("masked", str(error.value))


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">u2"])
def test_foreign_byte_orders_become_native(dtype):
    batch = next(InMemory(np.arange(4).astype(dtype), batch_size=4, shuffle=False).batches(0, 0))
    assert batch.data.dtype.isnative
    assert batch.data.tolist() == [0, 1, 2, 3]
