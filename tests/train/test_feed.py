"""How batches reach the step: from the device, from the host, and drawn ahead."""

import itertools
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.data._memory import Order
from equikd.train import _feed
from equikd.train._prefetch import Prefetched
from tests.train._small import arrays, assert_same, quick


@given(st.integers(1, 40), st.integers(1, 12), st.booleans(), st.booleans(), st.integers(0, 90), st.integers(1, 30))
def test_row_numbers_are_those_of_the_stream(
    rows: int, size: int, shuffle: bool, drop_remainder: bool, start: int, count: int
) -> None:
    if drop_remainder and rows < size:
        return
    data = ek.data.InMemory(np.arange(rows), batch_size=size, shuffle=shuffle, drop_remainder=drop_remainder, seed=3)
    order = data.order(0)
    picks, real = order.batches(start, count, count + 2)
    assert picks.shape == (count + 2, size)
    for place, batch in enumerate(itertools.islice(data.batches(start, 0), count)):
        np.testing.assert_array_equal(picks[place], batch.data)
        np.testing.assert_array_equal(np.ones(size, bool) if real is None else real[place], batch.mask)
        alone, kept = order.batch(start + place)
        np.testing.assert_array_equal(alone, batch.data)
        assert kept == batch.mask.sum()


def test_an_order_is_of_the_seed_and_the_epoch_alone() -> None:
    """Whatever was asked before (maxtext 2543)."""
    one, other = (Order(rows=9, size=2, seed=1, shuffle=True, drop_remainder=True) for _ in range(2))
    for number in (17, 3, 0, 11):
        one.batch(number)
    np.testing.assert_array_equal(one.batch(6)[0], other.batch(6)[0])


def test_data_on_the_device_trains_as_data_from_the_host(monkeypatch: Any) -> None:
    trainer = quick(num_steps=12, train_data=ek.data.InMemory(arrays(37), batch_size=10, drop_remainder=False))
    kinds = []
    run = ek.train.Stepper.run

    def noted(self: Any, fed: Any) -> None:
        kinds.append(fed.kind.gathered)
        assert fed.table is None or all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(fed.table))
        run(self, fed)

    monkeypatch.setattr(ek.train.Stepper, "run", noted)
    on_device = trainer.train()
    assert kinds == [True] * 12
    monkeypatch.setattr(_feed, "free_bytes", lambda where: 10)
    on_host = trainer.train()
    assert kinds == [True] * 12 + [False] * 12
    assert_same(on_device.state, on_host.state)
    assert on_device.metrics == on_host.metrics


def test_data_is_put_on_the_device_once(monkeypatch: Any) -> None:
    data = ek.data.InMemory(arrays(), batch_size=10)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert data.table.on_device(where)["x"] is data.table.on_device(where)["x"]


class Augmented:
    """A pipeline that changes what an `InMemory` gives."""

    def __init__(self) -> None:
        self.inner = ek.data.InMemory(arrays(), batch_size=10)

    def batches(self, start: int, seed: int) -> Iterator[Any]:
        for batch in self.inner.batches(start, seed):
            yield ek.data.Batch({**batch.data, "x": -batch.data["x"]}, batch.mask)

    def epoch(self) -> Iterator[Any]:
        return self.inner.epoch()

    def spec(self) -> Any:
        return self.inner.spec()


def test_a_pipeline_around_data_in_memory_is_asked_for_its_batches() -> None:
    negated = quick(train_data=ek.lazy(Augmented)()).train()
    by_hand = {**arrays(), "x": -arrays()["x"]}
    assert_same(negated.state, quick(train_data=ek.data.InMemory(by_hand, batch_size=10)).train().state)


# --- drawn ahead ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 20), st.integers(1, 5))
def test_the_thread_gives_what_the_iterator_gives(length: int, most: int) -> None:
    with Prefetched(iter(range(length)), most) as ahead:
        assert list(ahead) == list(range(length))
        assert next(ahead, None) is None


def test_the_thread_draws_so_many_ahead_and_no_more() -> None:
    drawn = []

    def source() -> Iterator[int]:
        for number in range(100):
            drawn.append(number)
            yield number

    with Prefetched(source(), 3) as ahead:
        assert next(ahead) == 0
        deadline = time.monotonic() + 5
        while len(drawn) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(drawn) == 5  # one taken, three ready, one in hand
    assert not any(thread.name == "equikd-prefetch" and thread.is_alive() for thread in threading.enumerate())


def test_an_error_comes_with_the_traceback_of_its_place() -> None:
    def reads_a_broken_file() -> Iterator[dict[str, np.ndarray]]:
        yield arrays(8)
        yield arrays(8)
        raise OSError("bad sector")

    with pytest.raises(OSError, match="bad sector") as caught:
        quick(train_data=reads_a_broken_file).train()
    assert "reads_a_broken_file" in "".join(traceback.format_exception(caught.value))
    assert any("while drawing element 2" in note for note in caught.value.__notes__)


def test_a_source_that_is_left_is_closed() -> None:
    closed = []

    def source() -> Iterator[dict[str, np.ndarray]]:
        try:
            while True:
                yield arrays(8)
        finally:
            closed.append(threading.current_thread().name)

    quick(train_data=source, num_steps=3).train()
    assert "equikd-prefetch" in closed


def test_without_a_thread_data_is_drawn_where_training_runs() -> None:
    threads = set()

    def source() -> Iterator[dict[str, np.ndarray]]:
        while True:
            threads.add(threading.current_thread().name)
            yield arrays(8)

    quick(train_data=source, num_steps=3, prefetch=0).train()
    assert threads == {threading.current_thread().name}


def test_the_thread_computes_in_the_precision_of_the_caller() -> None:
    wide = []

    def source() -> Iterator[int]:
        wide.append(jnp.asarray(np.float64(1)).dtype.name)
        yield 1

    for x64 in (True, False):
        with jax.enable_x64(x64), Prefetched(source(), 1) as ahead:
            assert list(ahead) == [1]
    assert wide == ["float64", "float32"]


def test_arrays_that_a_source_fills_anew_are_not_mixed_up() -> None:
    def filled_anew() -> Iterator[dict[str, np.ndarray]]:
        held = arrays(8)
        for number in itertools.count():
            held["x"][:] = number % 5
            yield held

    def fresh() -> Iterator[dict[str, np.ndarray]]:
        for number in itertools.count():
            yield {**arrays(8), "x": np.full_like(arrays(8)["x"], number % 5)}

    assert_same(quick(train_data=filled_anew).train().state, quick(train_data=fresh).train().state)


@pytest.mark.parametrize("field", ["prefetch", "max_compilations"])
@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_numbers_that_are_none(field: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=field):
        quick(**{field: value}).train()
