"""SIGTERM and SIGINT, whenever they come: what is there is saved, and the same command goes on to the bit."""

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import equikd as ek
from equikd.train import _checkpoint, _feed
from equikd.train._signals import Interrupted, Signals
from tests.train._experiment import Args, get_config
from tests.train._runs import assert_same, rows

ROOT = Path(__file__).parents[2]
ARGS = Args(width=4, num_steps=60, eval_every=20, log_every=15, save_every=25)
SIGNALS = [signal.SIGTERM, signal.SIGINT]
ENDINGS: dict[int, type[BaseException]] = {signal.SIGTERM: SystemExit, signal.SIGINT: KeyboardInterrupt}


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """A shell starts what runs in the background with SIGINT ignored; here it is as in the foreground."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[ek.train.Result, Path]:
    """The run that nobody interrupts."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    return get_config(ARGS).train(workdir), workdir


def send(number: int) -> None:
    """A signal to this process, handled before this returns."""
    os.kill(os.getpid(), number)
    time.sleep(0.001)


def interrupted(workdir: Path, number: int, **changes: Any) -> None:
    """Train until the signal."""
    with pytest.raises(ENDINGS[number]) as caught:
        ek.override(get_config(ARGS), changes).train(workdir)
    assert number == signal.SIGINT or caught.value.code == 143  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def steps_in(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def assert_goes_on(workdir: Path, whole: tuple[ek.train.Result, Path]) -> None:
    result, reference = get_config(ARGS).train(workdir), whole[0]
    assert_same(result.state, reference.state)
    assert rows(workdir) == rows(whole[1])
    assert result.metrics == reference.metrics


# --- wherever it comes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_while_it_steps(tmp_path, monkeypatch, whole, number):
    step, count = ek.train.Stepper.run, itertools.count(1)

    def stepping(self: Any, batch: Any) -> None:
        if next(count) == 33:
            send(number)  # the step owns the buffers: it is finished first
        step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ek.train.Stepper, "run", stepping)
        interrupted(tmp_path / "run", number)
    assert steps_in(tmp_path / "run") == [25, 33]
    assert_goes_on(tmp_path / "run", whole)


def test_while_the_first_step_compiles(tmp_path, monkeypatch, whole):
    step = ek.train.Stepper.run

    def first(self: Any, batch: Any) -> None:
        send(signal.SIGTERM)
        step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ek.train.Stepper, "run", first)
        interrupted(tmp_path / "run", signal.SIGTERM)
    assert steps_in(tmp_path / "run") == [1]
    assert_goes_on(tmp_path / "run", whole)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("number", SIGNALS)
def test_while_it_waits_for_data(tmp_path, monkeypatch, whole, number, prefetch):
    batches = ek.data.InMemory.batches

    def endless_wait(self: Any, start: int, seed: int) -> Iterator[Any]:
        yield from itertools.islice(batches(self, start, seed), 12 - start)
        send(number)
        time.sleep(60)  # a loader that has died would stand here for ever
        pytest.fail("nothing has broken in")

    with monkeypatch.context() as patch:
        patch.setattr(ek.data.InMemory, "batches", endless_wait)
        patch.setattr(_feed, "fits", lambda *arguments: False)
        interrupted(tmp_path / "run", number, prefetch=prefetch)
    (step,) = steps_in(tmp_path / "run")
    assert 12 - prefetch - 1 <= step <= 12 if prefetch else step == 12
    assert_goes_on(tmp_path / "run", whole)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_it_evaluates(tmp_path, monkeypatch, whole, number):
    epoch, count = ek.data.InMemory.epoch, itertools.count(1)

    def slow(self: Any) -> Iterator[Any]:
        first, *others = epoch(self)
        yield first
        if next(count) == 2:
            send(number)
            time.sleep(60)
        yield from others

    with monkeypatch.context() as patch:
        patch.setattr(ek.data.InMemory, "epoch", slow)
        interrupted(tmp_path / "run", number)
    assert steps_in(tmp_path / "run") == [25, 40]  # the eval of step 40 was broken off, and comes again
    assert_goes_on(tmp_path / "run", whole)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_it_saves(tmp_path, monkeypatch, whole, number):
    publish = _checkpoint._publish

    def slow(*arguments: Any) -> None:
        if arguments[1] == 25:
            os.kill(os.getpid(), number)
            time.sleep(0.2)
        publish(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_checkpoint, "_publish", slow)
        interrupted(tmp_path / "run", number)
    assert steps_in(tmp_path / "run")[0] == 25
    assert_goes_on(tmp_path / "run", whole)


def test_before_the_first_step(tmp_path, monkeypatch, whole):
    from equikd.train import _session

    begin = _session.begin

    def beginning(*arguments: Any) -> Any:
        send(signal.SIGTERM)
        return begin(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_session, "begin", beginning)
        interrupted(tmp_path / "run", signal.SIGTERM)
    assert not (tmp_path / "run/checkpoints").exists()  # before the first update there is nothing to lose
    assert_goes_on(tmp_path / "run", whole)


def test_in_the_last_save_it_is_not_forgotten(tmp_path, monkeypatch, whole):
    publish = _checkpoint._publish

    def slow(*arguments: Any) -> None:
        if arguments[1] == ARGS.num_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        publish(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_checkpoint, "_publish", slow)
        interrupted(tmp_path / "run", signal.SIGTERM)
    assert_goes_on(tmp_path / "run", whole)


def test_while_a_finished_run_is_evaluated_again(tmp_path, monkeypatch, whole):
    shutil.copytree(whole[1], tmp_path / "run")

    def endless(self: Any) -> Iterator[Any]:
        send(signal.SIGTERM)
        time.sleep(60)
        yield

    with monkeypatch.context() as patch:
        patch.setattr(ek.data.InMemory, "epoch", endless)
        interrupted(tmp_path / "run", signal.SIGTERM)
    assert_goes_on(tmp_path / "run", whole)


def test_in_the_last_step_under_a_guard_that_skips(tmp_path, monkeypatch):
    """The row of the last interval is then written by the next start."""
    trainer = ek.override(get_config(ARGS), {"guard": ek.train.SkipNonFinite(), "num_steps": 20})
    step, count = ek.train.Stepper.run, itertools.count(1)

    def stepping(self: Any, batch: Any) -> None:
        if next(count) == 20:
            send(signal.SIGTERM)
        step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ek.train.Stepper, "run", stepping)
        with pytest.raises(SystemExit):
            trainer.train(tmp_path / "run")
    assert trainer.train(tmp_path / "run").metrics["train/skipped_steps"] == 0


def test_while_the_experiment_is_checked_nothing_is_written(tmp_path, monkeypatch):
    from equikd.train import _trainer

    def preparing(*arguments: Any) -> Any:
        send(signal.SIGTERM)
        pytest.fail("it goes on")

    monkeypatch.setattr(_trainer, "prepare", preparing)
    interrupted(tmp_path / "run", signal.SIGTERM)
    assert not (tmp_path / "run").exists()


def test_without_a_work_directory_it_ends_too(monkeypatch):
    step = ek.train.Stepper.run

    def stepping(self: Any, batch: Any) -> None:
        send(signal.SIGTERM)
        step(self, batch)

    monkeypatch.setattr(ek.train.Stepper, "run", stepping)
    with pytest.raises(SystemExit) as caught:
        get_config(ARGS).train()
    assert caught.value.code == 143


def test_data_that_swallows_it(tmp_path, monkeypatch, whole):
    """What an eval has seen until then is no result, and training data that ends then has not ended."""
    epoch, batches = ek.data.InMemory.epoch, ek.data.InMemory.batches

    def swallowing(iterator: Iterator[Any], at: int) -> Iterator[Any]:
        for number, batch in enumerate(iterator):
            if number == at:
                try:
                    send(signal.SIGTERM)
                except BaseException:
                    return
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(ek.data.InMemory, "epoch", lambda self: swallowing(epoch(self), 1))
        interrupted(tmp_path / "eval", signal.SIGTERM)
    assert_goes_on(tmp_path / "eval", whole)
    with monkeypatch.context() as patch:
        patch.setattr(ek.data.InMemory, "batches", lambda self, start, seed: swallowing(batches(self, start, seed), 7))
        patch.setattr(_feed, "fits", lambda *arguments: False)
        interrupted(tmp_path / "data", signal.SIGTERM, prefetch=0)
    assert steps_in(tmp_path / "data") == [7]
    assert_goes_on(tmp_path / "data", whole)


@pytest.mark.filterwarnings("ignore")  # JAX warns of forks
def test_a_forked_child_ends_as_usual():
    with Signals():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


# --- the handlers -----------------------------------------------------------------------------------------------------


def test_a_second_interrupt_ends_at_once_and_a_second_sigterm_is_nothing_new():
    with Signals() as signals:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signals.received == signal.SIGTERM
        with pytest.raises(Interrupted), signals.interruptible:
            pytest.fail("it has come before")


def test_what_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            send(signal.SIGINT)
            assert signals.received is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_training_leaves_signals_alone(tmp_path):
    results: list[Any] = []

    def work() -> None:
        results.append(ek.override(get_config(ARGS), {"num_steps": 2, "evals": {}}).train())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert int(results[0].state.step) == 2


def test_handlers_of_others_come_back():
    handler: Callable[..., None] = lambda number, frame: None
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with Signals():
            assert signal.getsignal(signal.SIGTERM) is not handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


# --- the command line -------------------------------------------------------------------------------------------------


def command(workdir: Path, module: str = "tests.train._slow_experiment") -> list[str]:
    return [sys.executable, "-m", "equikd", "train", module, "--workdir", str(workdir)]


@pytest.mark.slow
def test_twenty_signals_over_the_life_of_a_run(tmp_path):
    """Each ends the process with 143 and a checkpoint, or the run is over; the last state is that of one whole run."""
    whole = subprocess.run(command(tmp_path / "whole"), cwd=ROOT, capture_output=True, text=True, check=True)
    assert "step 120/120" in whole.stderr
    draw, runs, stopped = random.Random(0), [tmp_path / "0"], 0
    while stopped < 20:
        run = runs[-1]
        code, said = terminated(run, draw.uniform(0.0, 2.0))
        if code == 0 or (code == -signal.SIGTERM and steps_in(run)[-1] == 120):  # over before the signal came
            runs.append(tmp_path / str(len(runs)))
            continue
        stopped += 1
        assert code == 143, said
        told = re.search(r"terminated; the same command goes on from step (\d+)$", said.rstrip())
        assert told, said
        assert steps_in(run)[-1] == int(told.group(1))
    subprocess.run(command(runs[-1]), cwd=ROOT, check=True, capture_output=True)
    for run in runs:
        assert rows(run) == rows(tmp_path / "whole")
        assert_same(saved(run), saved(tmp_path / "whole"))


@pytest.mark.slow
def test_half_a_run_a_kill_and_the_other_half_are_a_whole_one(tmp_path):
    """With an average of the parameters, accumulation, batch normalisation, dropout and evals in between."""
    subprocess.run(command(tmp_path / "whole"), cwd=ROOT, capture_output=True, check=True)
    half = [*command(tmp_path / "run"), "--cfg.num_steps=60"]
    subprocess.run(half, cwd=ROOT, capture_output=True, check=True)
    with subprocess.Popen(command(tmp_path / "run"), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while steps_in(tmp_path / "run")[-1] < 80:
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    subprocess.run(command(tmp_path / "run"), cwd=ROOT, capture_output=True, check=True)
    assert_same(saved(tmp_path / "run"), saved(tmp_path / "whole"))
    # The first half had an end, at which there is a row more.
    whole, run = rows(tmp_path / "whole"), rows(tmp_path / "run")
    assert [row for row in run if row in whole] == whole


def terminated(workdir: Path, seconds: float) -> tuple[int, str]:
    """Start or go on, and send SIGTERM some time after there is something to save: exit code, standard error."""
    with subprocess.Popen(
        command(workdir), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while not (workdir / ".lock").exists():
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
    return process.returncode, said


def saved(workdir: Path) -> Any:
    """The state at the end of a run."""
    from tests.train._slow_experiment import get_config

    state = get_config().restore(workdir)
    assert int(state.step) == 120
    return state
