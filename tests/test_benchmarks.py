"""The arithmetic of the benchmarks; that they run and print their figures is for CI, which runs them."""

import itertools
import json
import sys

import jax
import numpy as np
import pytest

from benchmarks import _timing as timing
from benchmarks import metrics
from benchmarks._task import TINY, Clock, shuffled
from benchmarks.peers import FILES, Peer, available
from benchmarks.peers._peer import on_device
from benchmarks.peers.bare import PEER, start_scanned, start_without_loss


def test_every_contestant_has_one_turn_a_round_and_the_warmup_is_thrown_away() -> None:
    turns, clock = [], itertools.count()

    def contestant(name: str) -> timing.Contestant:
        def run() -> float:
            turns.append(name)
            return float(next(clock))

        return run

    rounds = timing.interleave({name: contestant(name) for name in "abc"}, rounds=20, warmup=2)
    by_round = [turns[start : start + 3] for start in range(0, len(turns), 3)]
    assert len(by_round) == 22
    assert all(sorted(names) == ["a", "b", "c"] for names in by_round)
    assert len(set(map(tuple, by_round))) > 1  # the order changes
    assert sorted(np.concatenate(list(rounds.values())).tolist()) == list(range(6, 66))


def test_ratios_are_taken_within_a_round() -> None:
    slow_second_round = {"bare": np.array([1.0, 10.0, 2.0]), "ours": np.array([2.0, 20.0, 4.0])}
    assert timing.ratios(slow_second_round, "ours", "bare") == (2.0, 2.0, 2.0)
    assert timing.times(slow_second_round, "ours").median == 4.0


def test_quartiles() -> None:
    assert timing.Quartiles.of([4.0, 0.0, 1.0, 2.0, 3.0]) == (1.0, 2.0, 3.0)
    assert timing.Quartiles(1.0, 2.0, 3.0).times(1e3) == (1e3, 2e3, 3e3)
    for nothing in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="quartiles of"):
            timing.Quartiles.of(nothing)


def test_time_is_divided_by_the_steps() -> None:
    clock = iter([5.0, 9.0]).__next__
    assert timing.stopwatch(lambda: None, steps=8, clock=clock)() == 0.5


def test_the_last_line_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = {"bare": np.array([1e-4, 1e-4]), "ours": np.array([1.1e-4, 1.2e-4])}
    timing.show(rounds, "bare")
    timing.finish(ours_over_bare=timing.ratios(rounds, "ours", "bare"), steps=3, seconds=0.123456)
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["bare", "100.000", "(100.000"],
        ["ours", "115.000", "(112.500"],
    ]
    kind, _, text = last.partition(" ")
    result = json.loads(text)
    assert kind == "RESULT"
    assert (result["ours_over_bare"], result["ours_over_bare_quartiles"]) == (1.15, [1.125, 1.175])
    assert (result["steps"], result["seconds"]) == (3, 0.1235)
    assert {"python", "jax", "cores", "load"} <= set(result["machine"])


def test_a_figure_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        timing.finish(ratio=float("nan"))


def test_quick() -> None:
    assert timing.quick("what it measures", ["--quick"])
    assert not timing.quick("what it measures", [])


def test_contestants_of_the_sums_compute_the_same() -> None:
    draw = np.random.default_rng(0)
    columns = {name: draw.normal(size=(3, metrics.ROWS)).astype(np.float32) for name in "ab"}
    masks = draw.random((3, metrics.ROWS)) < 0.5
    for name, scan in metrics.SCANS.items():
        for column, result in jax.jit(scan)(columns, masks).items():
            expected = columns[column].mean(dtype=np.float64, where=masks)
            np.testing.assert_allclose(metrics.mean_of(result), expected, rtol=1e-4, err_msg=name)
    assert len(metrics.TEN) == 10


def losses_of(peer: Peer, steps: int) -> list[float]:
    assert peer.start is not None
    batches = itertools.starmap(peer.place, itertools.islice(shuffled(TINY), steps))
    return [float(loss) for loss in peer.start(TINY)(batches)]


def test_peers_written_with_equinox_make_the_same_steps() -> None:
    expected = losses_of(PEER, 5)
    assert len(set(expected)) == 5
    np.testing.assert_allclose(losses_of(available(["filter_jit"])["filter_jit"], 5), expected, rtol=1e-5)


def test_a_training_starts_anew_each_time_it_is_called() -> None:
    assert PEER.start is not None
    training = PEER.start(TINY)
    first, second = ([float(loss) for loss in training(itertools.islice(shuffled(TINY), 3))] for _ in range(2))
    assert first == second


def test_a_scan_by_hand_makes_as_many_steps_as_it_says() -> None:
    batch = on_device(*next(shuffled(TINY)))
    (scanned,) = start_scanned(TINY, 4)([batch])
    *_, stepped = start_without_loss(TINY)([batch] * 4)
    for one, other in zip(scanned, stepped, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_peer_that_is_not_installed_is_skipped_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, f"benchmarks.peers.{FILES['linen']}", None)
    assert list(available(["linen", "filter_jit"])) == ["filter_jit"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("skipped: the peer linen")


def test_the_clock_counts_whole_intervals_and_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0.0, 5.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    clock = Clock(10)
    for step in range(1, 46):
        clock.tick(step)
    assert len(clock.marks) == 4  # at steps 15, 25, 35 and 45
    assert clock.seconds_per_step()[0] == 0.5
