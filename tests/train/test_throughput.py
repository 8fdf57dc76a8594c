"""Steps a second, with a clock that the tests move: a device that computes, a host that draws, evals in between."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equikd._compat import is_ready
from equikd.train import Record, Run, Throughput, _throughput
from equikd.train._costs import products_of
from equikd.train._peak import seconds_at_peak
from equikd.train._progress import Console
from equikd.train._rows import line, read_records
from equikd.train._setup import prepare
from equikd.train._throughput import throughput_of
from equikd.train._writers import JsonLines, TensorBoard, Writers
from tests.train._small import BATCH, quick


@pytest.fixture(autouse=True)
def _results_of_machines(monkeypatch):
    """Those of a `Machine` stand for arrays."""
    real = _throughput._array_of
    monkeypatch.setattr(_throughput, "_array_of", lambda x: x if type(x).__name__ == "Results" else real(x))


class Machine:
    """A host that dispatches steps, and a device that computes them in turn."""

    def __init__(
        self, host: float, device: float, every: int, least: float | None = None, ahead: float = float("inf")
    ) -> None:
        self.now, self.free = 100.0, 0.0
        self.host, self.device, self.every = host, device, every
        self.step, self.ahead = 0, ahead
        self.waiting: int | None = None
        self.measured: dict[int, dict[str, float]] = {}
        self.throughput = Throughput(rows=10, least_seconds=least, clock=lambda: self.now)

    def results(self, ready: float) -> Any:
        """What the device has computed at a time."""
        machine = self

        class Results:
            def is_ready(self) -> bool:
                return machine.now >= ready

            def block_until_ready(self) -> None:
                machine.now = max(machine.now, ready)

        return Results()

    def train(self, steps: int, compiling: float = 0.0, at_once: int = 1) -> None:
        """The loop: dispatch, and read one interval late."""
        for _ in range(steps // at_once):
            self.now += self.host * at_once + (compiling if self.step == 0 else 0.0)
            self.free = max(self.free, self.now) + self.device * at_once
            self.step += at_once
            self.throughput.tick(self.step)
            if self.step % self.every == 0:
                self.read()
                self.throughput.ended(self.step, self.results(self.free))
                self.waiting = self.step
            self.now = max(self.now, self.free - self.ahead * self.device)  # JAX dispatches so many and no more

    def read(self) -> None:
        if self.waiting is not None:
            self.measured[self.waiting] = self.throughput.finished(self.waiting)
            self.waiting = None

    def rest(self, seconds: float) -> None:
        """An eval, or a checkpoint."""
        self.read()
        with self.throughput.paused(self.results(self.free)):
            self.now += seconds
        self.free = self.now

    def speeds(self) -> list[float]:
        return [found["steps_per_second"] for found in self.measured.values()]


SPEEDS = [(0.001, 0.1), (0.1, 0.001), (0.1, 0.09), (0.09, 0.1)]


@pytest.mark.parametrize(("host", "device"), SPEEDS)
@pytest.mark.parametrize("ahead", [0, 1, 8, float("inf")])
def test_the_speed_is_that_of_the_slower_of_host_and_device(host, device, ahead):
    machine = Machine(host, device, every=50, ahead=ahead)
    machine.train(500, compiling=30.0)
    machine.read()
    slower = 1 / (host + device) if ahead == 0 else 10
    assert machine.speeds()[1:-1] == pytest.approx([slower] * 8, rel=0.021)  # one step of the interval
    assert machine.speeds() == pytest.approx([slower] * 10, rel=0.041)
    found = machine.measured[100]
    assert found["examples_per_second"] == pytest.approx(10 * found["steps_per_second"])


@pytest.mark.parametrize(("host", "device"), SPEEDS[:2])
@pytest.mark.parametrize("at_once", [5, 50])
def test_so_it_is_with_many_steps_in_a_call(host, device, at_once):
    machine = Machine(host, device, every=50)
    machine.train(50, compiling=30.0, at_once=at_once)
    for _ in range(4):
        machine.train(150, at_once=at_once)
        machine.rest(77.0)
    assert (at_once == 50) == (machine.measured[50] == {})
    machine.measured.pop(50)
    assert machine.speeds() == pytest.approx([10] * 12, rel=0.04)


@pytest.mark.parametrize(("host", "device"), SPEEDS)
@pytest.mark.parametrize("at", [50, 73])
def test_time_in_evals_does_not_count(host, device, at):
    """At the end of an interval, or in the middle of one."""
    machine = Machine(host, device, every=50)
    machine.train(at, compiling=30.0)
    machine.rest(500.0)
    machine.train(200 - at)
    machine.rest(7.0)
    machine.rest(8.0)
    machine.train(100)
    machine.read()
    assert machine.speeds()[1:] == pytest.approx([10] * 5, rel=0.041)


def test_an_interval_of_the_first_call_alone_tells_nothing():
    machine = Machine(0.1, 0.001, every=1)
    machine.train(3, compiling=30.0)
    machine.read()
    assert machine.measured[1] == {}
    assert machine.measured[2]["steps_per_second"] == pytest.approx(10)


def test_a_change_of_speed_is_seen_where_it_happens():
    machine = Machine(0.001, 0.1, every=10)
    machine.train(50)
    machine.device = 0.2
    machine.train(50)
    machine.read()
    assert machine.speeds()[1:] == pytest.approx([10] * 4 + [5] * 5, rel=1e-6)


def test_utilisation_is_the_least_time_by_the_real_one():
    machine = Machine(0.001, 0.1, every=10, least=0.04)
    machine.train(30)
    machine.read()
    assert machine.measured[30]["model_flops_utilization"] == pytest.approx(0.4)


def test_where_the_peak_is_not_known_there_is_no_utilisation():
    machine = Machine(0.001, 0.1, every=10)
    machine.train(20)
    machine.read()
    assert sorted(machine.measured[20]) == ["examples_per_second", "steps_per_second"]


def test_what_has_not_ended_tells_nothing():
    throughput = Throughput(rows=1)
    assert throughput.finished(5) == {}
    throughput.tick(1)
    assert throughput.finished(5) == {}


def test_results_that_are_numbers_are_there():
    times = iter([0.0, 4.0, 5.0])
    throughput = Throughput(rows=1, clock=lambda: next(times))
    throughput.tick(1)
    throughput.ended(9, {"loss": 1.0})
    throughput.tick(10)
    assert throughput.finished(9)["steps_per_second"] == 2.0


def test_real_results_are_waited_for():
    throughput = Throughput(rows=3)
    throughput.tick(1)
    results = jax.jit(lambda x: jnp.linalg.matrix_power(x, 9))(jnp.eye(300))
    throughput.ended(2, {"host": np.zeros(3), "device": results})
    assert throughput.finished(2)["steps_per_second"] > 0
    assert is_ready(results)


def test_a_pause_ends_where_an_eval_fails():
    times = iter([0.0, 1.0, 9.0, 10.0, 10.0])
    throughput = Throughput(rows=1, clock=lambda: next(times))
    throughput.tick(0)
    with pytest.raises(ZeroDivisionError), throughput.paused():
        raise ZeroDivisionError
    throughput.ended(4, None)
    assert throughput.finished(4)["steps_per_second"] == 2.0


def test_of_an_experiment(monkeypatch):
    """On a CPU nothing is traced for it; on a device of known peak, its products are."""
    setup = prepare(quick())
    throughput = throughput_of(setup)
    assert (throughput._rows, throughput._least) == (BATCH, None)
    monkeypatch.setattr("equikd.train._throughput.hardware", lambda config: ("TPU v4", 2))
    assert throughput_of(setup)._least == seconds_at_peak(products_of(setup), "TPU v4", 2)


SPEED = {"steps_per_second": 123.456789, "examples_per_second": 1975.308624, "model_flops_utilization": 0.4123}


def test_rows_hold_the_speed_and_give_it_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [Record(5, "train", {"loss": 0.5}, 1.25, speed=SPEED), Record(5, "test", {"loss": 0.25}, 1.5)]
    path.write_bytes(b"".join(map(line, rows)))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["speed"] == {name: float(f"{value:.6g}") for name, value in SPEED.items()}
    assert "speed" not in second
    assert [one.speed for one in read_records(path)] == [first["speed"], {}]


def test_older_rows_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5, "split": "train", "metrics": {"loss": 0.5}, "seconds": 1.25}\n')
    assert read_records(path) == [Record(5, "train", {"loss": 0.5}, 1.25)]


def test_writers_show_the_speed(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run(tmp_path, "{}", num_steps=10, start_step=0)
    with Writers.open([JsonLines(), TensorBoard(), Console()], run) as writers:
        writers.write(Record(5, "train", {"loss": 0.5}, 1.25, speed=SPEED))
    events = EventAccumulator(str(tmp_path / "tensorboard" / "train")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", *(f"perf/{name}" for name in sorted(SPEED))]
    assert events.Scalars("perf/steps_per_second")[0].value == pytest.approx(123.456789)
    assert "step 5/10  train  loss 0.5000  (123 steps/s, MFU 41.2%)" in capsys.readouterr().err
