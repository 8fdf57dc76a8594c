"""`Iterable`: positions, passes, padding in evals, and errors that say which element."""

import gc
import itertools
import re
import traceback
import weakref

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.data import Batch, Iterable, as_batch
from equikd.errors import DataError


def element(number, rows=2):
    return {"x": np.full((rows, 3), number, np.float32), "y": np.full(rows, number, np.int32)}


def count_to(end):
    return lambda: map(element, range(end))


def numbers(batches):
    return [batch.data["y"][0].item() for batch in batches]


# ---- training


@given(st.integers(1, 8), st.integers(0, 8))
def test_a_start_equals_skipping(end, start):
    start = min(start, end)
    assert numbers(Iterable(count_to(end)).batches(start, 0)) == list(range(start, end))


@given(st.integers(1, 5), st.integers(0, 23))
def test_repeating_starts_again_and_counts_on(end, start):
    stream = Iterable(count_to(end), repeat=True)
    whole = [number % end for number in range(start + 12)]
    assert numbers(itertools.islice(stream.batches(start, 0), 12)) == whole[start:]


def test_seed_and_pass_are_given_where_the_function_has_arguments_for_them():
    def make(epoch, *, seed=-1):
        yield element(10 * seed + epoch)

    assert numbers(itertools.islice(Iterable(make, repeat=True).batches(0, 4), 3)) == [40, 41, 42]
    assert numbers(Iterable(make).epoch()) == [0]
    seen = []
    list(Iterable(lambda **other: seen.append(other) or [element(0)]).batches(0, 4))
    assert seen == [{}]


def test_a_function_may_return_anything_that_can_be_iterated():
    assert numbers(Iterable(lambda: [element(3), element(4)]).batches(0, 0)) == [3, 4]


def test_elements_become_batches():
    def make():
        yield Batch({"x": np.zeros((2, 3)), "y": np.arange(2)}, np.array([True, False]))
        yield {"x": np.zeros((2, 3)), "y": np.arange(2)}

    masked, bare = Iterable(make).batches(0, 0)
    assert masked.mask.tolist() == [True, False]
    assert bare.mask.tolist() == [True, True]
    assert bare.data["y"].dtype == np.int32


def test_spec_is_that_of_the_first_element_and_takes_nothing_away():
    drawn = []

    def make():
        for number in range(3):
            drawn.append(number)
            yield element(number)

    stream = Iterable(make)
    assert stream.spec().data["x"] == jax.ShapeDtypeStruct((2, 3), np.float32)
    assert stream.spec().mask == jax.ShapeDtypeStruct((2,), bool)
    assert drawn == [0]
    assert numbers(stream.batches(0, 0)) == [0, 1, 2]


def test_drawing_is_lazy():
    drawn = []

    def make():
        for number in itertools.count():
            drawn.append(number)
            yield element(number)

    source = Iterable(make)
    stream = source.batches(2, 0)
    assert drawn == []
    next(stream)
    assert drawn == [0, 1, 2]
    source.spec()  # known from the elements that were drawn
    assert drawn == [0, 1, 2]


def test_a_stream_that_is_left_is_closed():
    closed = []

    def make():
        try:
            while True:
                yield element(0)
        finally:
            closed.append(True)

    stream = Iterable(make)
    batches = stream.batches(0, 0)
    next(batches)
    batches.close()
    gc.collect()
    assert closed == [True]
    Iterable(make).spec()
    gc.collect()
    assert closed == [True, True]


def test_a_loader_that_resets_and_returns_the_same_iterator_is_fine():
    class Workers:  # as a loader of torch with persistent workers
        def __iter__(self):
            return self

        def __next__(self):
            if self.left:
                self.left -= 1
                return element(self.left)
            raise StopIteration

    workers = Workers()

    def make():
        workers.left = 3
        return workers

    stream = Iterable(make, repeat=True)
    stream.spec()
    assert numbers(itertools.islice(stream.batches(0, 0), 6)) == [2, 1, 0, 2, 1, 0]


def test_batches_keep_their_values_when_a_loader_writes_over_its_arrays():
    def make():
        x, mask = np.zeros((4, 2), np.float32), np.array([True, True, True, False])
        for number in range(3):
            x[:] = number
            yield {"x": x}
        for number in range(3, 6):
            x[:], mask[:] = number, number % 2
            yield Batch({"x": x}, mask)
            mask[:] = True

    batches = list(Iterable(make).batches(0, 0))
    assert [batch.data["x"][0, 0].item() for batch in batches] == [0, 1, 2, 3, 4, 5]
    assert [batch.mask.sum().item() for batch in batches] == [4, 4, 4, 4, 0, 4]
    assert [batch.data["x"][0, 0].item() for batch in Iterable(make).epoch()] == [0, 1, 2, 3, 4, 5]


def test_training_reads_what_a_loader_gave_not_what_it_wrote_later():
    def reuse():
        x = np.zeros((256, 64), np.float32)
        for number in range(60):
            x[:] = number
            yield {"x": x}

    trainer = ek.Trainer(
        model=ek.lazy(eqx.nn.Linear)(64, 1),
        inputs={"x": "batch.x"},
        losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.x[:, :1]")},
        metrics={"x": ek.metrics.Mean("batch.x[:, 0]")},
        optimizer=ek.lazy(optax.sgd)(0.0),
        train_data=Iterable(reuse),
        num_steps=60,
        log_every=3,
        writers=(),
    )
    means = [row.metrics["x"] for row in trainer.train().history]
    assert means == [3 * interval + 1 for interval in range(20)]


def test_one_builtin_iterator_for_all_calls_is_refused(snapshot):
    shared = map(element, range(3))
    stream = Iterable(named(lambda: shared))
    stream.spec()
    with pytest.raises(DataError) as error:
        list(stream.batches(0, 0))
    snapshot("same_iterator", re.sub(r" at 0x\w+", "", str(error.value)))


# ---- evals


@pytest.mark.parametrize("size", [1, 7, 64, 360, 1000])
def test_an_eval_pads_to_the_size_of_the_first(size):
    rows = np.arange(360)
    stream = Iterable(lambda: (rows[i : i + size] for i in range(0, 360, size)))
    read = list(stream.epoch())
    first = min(size, 360)
    assert {batch.data.shape for batch in read} == {batch.mask.shape for batch in read} == {(first,)}
    assert np.concatenate([batch.data[batch.mask] for batch in read]).tolist() == rows.tolist()
    assert sum(batch.mask.sum() for batch in read) == 360


def test_masks_of_the_source_survive_the_padding():
    def make():
        yield as_batch(np.arange(4))
        yield Batch(np.arange(3), np.array([True, False, True]))

    assert [batch.mask.tolist() for batch in Iterable(make).epoch()] == [[True] * 4, [True, False, True, False]]


def test_an_eval_is_read_again_and_again():
    stream = Iterable(count_to(3))
    assert [numbers(stream.epoch()) for _ in range(3)] == [[0, 1, 2]] * 3


# ---- errors


def changed(**changes):
    def make():
        yield element(0)
        yield element(1)
        yield {name: value for name, value in {**element(2), **changes}.items() if value is not None}

    make.__qualname__, make.__module__ = "read", "data"
    return make


def named(function, name="read"):
    function.__qualname__, function.__module__ = name, "data"
    return function


GENERATOR = (element(number) for number in range(3))


def used_generator():
    make = named(lambda: GENERATOR)
    stream = Iterable(make)
    stream.spec()
    return stream.batches(0, 0)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("shape", lambda: Iterable(changed(x=np.zeros((2, 4)))).batches(0, 0)),
        ("several", lambda: Iterable(changed(x=np.zeros((2, 3, 1)), y=np.zeros(2), z=np.zeros(2))).batches(0, 0)),
        ("missing", lambda: Iterable(changed(y=None)).batches(0, 0)),
        ("ragged", lambda: Iterable(changed(**element(2, rows=1))).batches(0, 0)),
        (
            "containers",
            lambda: Iterable(named(lambda: iter([[np.zeros(2)], (np.zeros(2),)]))).batches(0, 0),
        ),
        ("second_pass", lambda: Iterable(named(lambda epoch: [np.zeros((2, 1 + epoch))]), repeat=True).batches(0, 0)),
        ("eval_larger", lambda: Iterable(changed(**element(2, rows=5))).epoch()),
        ("eval_shape", lambda: Iterable(changed(x=np.zeros((1, 4)), y=np.zeros(1, int))).epoch()),
        ("no_batch", lambda: Iterable(changed(y=np.zeros(5), x="text")).batches(0, 0)),
        ("nothing", lambda: Iterable(named(lambda: iter(()))).batches(0, 0)),
        ("nothing_repeated", lambda: Iterable(named(lambda: iter(())), repeat=True).batches(0, 0)),
        ("nothing_eval", lambda: Iterable(named(lambda: iter(()))).epoch()),
        ("ended_before_start", lambda: Iterable(named(count_to(3))).batches(5, 0)),
        ("no_iterator", lambda: Iterable(named(lambda: 3)).batches(0, 0)),
        ("same_generator", used_generator),
    ],
)
def test_errors(name, make, snapshot):
    with pytest.raises(DataError) as error:
        list(make())
    snapshot(name, str(error.value))


def test_a_stream_that_ends_where_the_run_goes_on_just_ends():
    assert list(Iterable(count_to(3)).batches(3, 0)) == []


def test_spec_of_nothing_is_an_error():
    with pytest.raises(DataError, match="yields no batch at all"):
        Iterable(lambda: iter(())).spec()


@pytest.mark.parametrize("training", [True, False])
def test_an_error_of_the_function_passes_with_the_number_of_the_element(training):
    def read():
        yield element(0)
        raise KeyError("label")

    with pytest.raises(KeyError, match="label") as error:
        list(Iterable(read).batches(0, 0) if training else Iterable(read).epoch())
    assert error.value.__notes__ == [f"while drawing element 1 of {__name__}:{read.__qualname__}"]
    assert traceback.extract_tb(error.value.__traceback__)[-1].name == "read"


def test_an_error_of_the_call_passes_with_a_note():
    def read():
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError, match="gone") as error:
        Iterable(read).spec()
    assert error.value.__notes__ == [f"while starting {__name__}:{read.__qualname__}"]


def test_the_source_is_not_kept_open():
    def make():
        yield element(0)

    made = []
    stream = Iterable(lambda: made.append(make()) or made[-1])
    assert len(list(stream.batches(0, 0))) == 1
    last = weakref.ref(made.pop())
    gc.collect()
    assert last() is None


def test_its_function_goes_through_json():
    stream = Iterable(ek.lazy(np.ones)((3, 2, 4)), repeat=True)
    again = ek.config.from_json(ek.config.to_json(stream))
    assert again == stream
    assert [batch.data.shape for batch in itertools.islice(again.batches(0, 0), 4)] == [(2, 4)] * 4
