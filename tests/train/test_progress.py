"""The display: plain lines as documented, a live line that leaves the terminal as it was, numbers for people."""

import fcntl
import io
import math
import os
import re
import struct
import subprocess
import sys
import termios
import threading
import timeit
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from equikd.config import validate
from equikd.errors import ConfigError
from equikd.train import _progress
from equikd.train._progress import Console, final_table, number
from equikd.train._writers import Record, Run, Writers

RUN = Run(workdir=None, config="{}", num_steps=1000, start_step=0)


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Screen:
    """A terminal's screen: the few control sequences that a live line uses, on lines of any length."""

    def __init__(self, text: str):
        self.lines, self.row, self.column, self.cursor = [""], 0, 0, True
        for control, plain in re.findall(r"(\x1b\[[?0-9;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", text):
            self._control(control) if control else self._print(plain)

    def _print(self, text: str) -> None:
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
        self.column += len(text)

    def _control(self, control: str) -> None:
        if control == "\r":
            self.column = 0
        elif control == "\n":
            self.row += 1
            self.lines += [""] * (self.row == len(self.lines))
        elif control == "\x1b[2K":
            self.lines[self.row] = ""
        elif control.endswith("A"):
            self.row -= int(control[2:-1])
        elif control in ("\x1b[?25l", "\x1b[?25h"):
            self.cursor = control.endswith("h")
        else:
            assert control.endswith("m"), repr(control)

    @property
    def text(self) -> list[str]:
        return [line.rstrip() for line in self.lines if line.strip()]


class Terminal:
    """A real pseudo-terminal; `text` is what has been written to it so far."""

    def __init__(self, width: int = 120):
        self._master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self.file = os.fdopen(os.dup(self.slave), "w")
        self._pieces: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # all writers are gone
                return
            self._pieces.append(piece)

    def finish(self) -> Screen:
        self.file.close()
        os.close(self.slave)
        self._reader.join(10)
        os.close(self._master)
        return Screen(self.text)

    @property
    def text(self) -> str:
        return b"".join(self._pieces).decode()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def console_of(terminal: Terminal, width: int = 120) -> RichConsole:
    return RichConsole(file=terminal.file, width=width, height=24)


@contextmanager
def opened(console: RichConsole, clock: Clock, run: Run = RUN, seconds: float = 0.1) -> Iterator[Writers]:
    writers = Writers([Console(seconds).open(run, clock=clock, console=console)])
    with writers:
        yield writers


def plain(run: Run = RUN) -> tuple[io.StringIO, Clock]:
    return io.StringIO(), Clock()


# ---- no terminal


def test_plain_lines_are_as_documented():
    stream, clock = plain()
    with opened(RichConsole(file=stream), clock) as writers:
        clock.now += 30.0  # the first step compiles, which is no measure of speed
        for step in range(1, 1001):
            writers.tick(step)
            clock.now += 1 / 3214
            if step == 500:
                metrics = {"accuracy": 0.975, "loss": 0.0912, "losses/ce": 0.0912, "weighted/ce": 0.0912}
                writers.write(Record(500, "train", metrics, 31.0))
                writers.write(Record(500, "test", {"loss": 0.09, "accuracy": 0.9722}, 31.5))
    assert stream.getvalue() == (
        "step 500/1000  train  loss 0.0912  accuracy 0.9750  (3208 steps/s)\n"
        "step 500/1000  test  loss 0.0900  accuracy 0.9722\n"
    )


def test_the_speed_is_that_since_the_last_line():
    stream, clock = plain()
    with opened(RichConsole(file=stream), clock) as writers:
        for step, pause in ((1, 0), (101, 10), (201, 20)):
            clock.now += pause
            writers.tick(step)
            if step > 1:
                writers.write(Record(step - 100, "train", {"loss": 1.0}, 0.0))  # values come one interval late
    assert re.findall(r"\((.*)\)", stream.getvalue()) == ["10 steps/s", "5 steps/s"]


def test_without_a_speed_the_line_has_none():
    stream, clock = plain()
    with opened(RichConsole(file=stream), clock) as writers:
        writers.write(Record(100, "train", {"loss": 1.0}, 0.0))
        writers.tick(101)
        writers.write(Record(101, "train", {"loss": 1.0}, 0.0))
    assert stream.getvalue() == "step 100/1000  train  loss 1.0000\nstep 101/1000  train  loss 1.0000\n"


def test_several_losses_are_shown_each():
    stream, clock = plain()
    with opened(RichConsole(file=stream), clock) as writers:
        writers.write(Record(1, "test", {"losses/b": 2.0, "loss": 3.0, "losses/a": 1.0, "weighted/a": 1.0}, 0.0))
        writers.write(Record(2, "test", {"weighted/a": 1.0}, 0.0))  # better than an empty line
    assert stream.getvalue().splitlines() == [
        "step 1/1000  test  loss 3.0000  losses/a 1.0000  losses/b 2.0000",
        "step 2/1000  test  weighted/a 1.0000",
    ]


@pytest.mark.parametrize(("name", "value"), [("FORCE_COLOR", "1"), ("TTY_COMPATIBLE", "1")])
def test_forced_colours_do_not_make_a_live_line_in_a_log(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    stream, clock = plain()
    with opened(RichConsole(file=stream), clock) as writers:
        writers.tick(1)
        writers.write(Record(1, "test", {"loss": 1.0}, 0.0))
    assert stream.getvalue() == "step 1/1000  test  loss 1.0000\n"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with opened(console_of(terminal), Clock()) as writers:
        writers.tick(1)
        writers.write(Record(1, "test", {"loss": 1.0}, 0.0))
    terminal.finish()
    assert terminal.text == "step 1/1000  test  loss 1.0000\r\n"


def test_lines_go_to_the_standard_error_and_in_a_notebook_to_the_standard_output(capsys):
    for jupyter in (False, True):
        console = RichConsole(stderr=True, force_jupyter=jupyter, width=80)
        with warnings.catch_warnings(), opened(console, Clock()) as writers:
            warnings.simplefilter("error")
            writers.tick(1)
            writers.write(Record(1, "test", {"loss": 1.0}, 0.0))
        output = capsys.readouterr()
        assert (output.out, output.err)[not jupyter] == "step 1/1000  test  loss 1.0000\n"
        assert (output.out, output.err)[jupyter] == ""


def test_a_reader_that_goes_away_ends_no_run():
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    with opened(RichConsole(file=stream), Clock()) as writers:
        writers.write(Record(1, "test", {"loss": 1.0}, 0.0))
        writers.write(Record(2, "test", {"loss": 1.0}, 0.0))
    with pytest.raises(BrokenPipeError):
        stream.close()


# ---- on a terminal


def test_the_live_line():
    terminal, clock = Terminal(), Clock()
    with opened(console_of(terminal), clock) as writers:
        for step in range(1, 801):
            writers.tick(step)
            clock.now += 0.01
            if step == 500:
                writers.write(Record(400, "train", {"loss": 0.0912, "accuracy": 1.0}, 0.0))
                writers.write(Record(500, "test", {"loss": 0.09, "accuracy": 0.9722}, 0.0))
            if step == 700:
                writers.write(Record(700, "test", {"loss": 0.08, "accuracy": 0.98}, 0.0))
    screen = terminal.finish()
    assert screen.cursor
    assert screen.text[:2] == [
        "step 500/1000  test  loss 0.0900  accuracy 0.9722",
        "step 700/1000  test  loss 0.0800  accuracy 0.9800",
    ]
    (line,) = screen.text[2:]
    bar, rest = line.split(" ", 1)
    assert set(bar) <= set("━╸╺")
    assert len(bar) == 24
    assert rest == "800/1000  100 steps/s  eta 0:02  loss 0.0912  test loss 0.0800  accuracy 0.9800"


def test_the_line_says_so_before_the_first_step_and_after_the_last():
    terminal, clock = Terminal(), Clock()
    with opened(console_of(terminal), clock, Run(None, "{}", num_steps=500, start_step=200)) as writers:
        terminal.file.flush()
        writers.tick(201)
        clock.now += 3700.0
        writers.tick(500)
    screen = terminal.finish()
    assert "200/500  starting" in terminal.text
    assert re.sub(r"^[━╸╺]+ ", "", screen.text[-1]) == "500/500  took 1:01:40"


@pytest.mark.parametrize("width", [20, 40, 80])
def test_the_line_stays_one_line_on_a_narrow_terminal(width):
    terminal, clock = Terminal(width), Clock()
    with opened(console_of(terminal, width), clock) as writers:
        for step in range(1, 100):
            clock.now += 1.0
            writers.tick(step)
            writers.write(Record(step, "train", {"loss": 0.1}, 0.0))
    screen = terminal.finish()
    assert len(screen.text) == 1
    assert len(screen.text[0]) <= width


def test_names_with_brackets_are_no_markup():
    terminal = Terminal()
    with opened(console_of(terminal), Clock()) as writers:
        writers.write(Record(1, "[red]test", {"top[5]": 1.0}, 0.0))
    assert terminal.finish().text[0] == "step 1/1000  [red]test  top[5] 1.0000"


@given(times=st.lists(st.floats(0, 0.3), min_size=1, max_size=40), seconds=st.sampled_from([0.0, 0.1, 0.25]))
def test_redraws_keep_their_distance(times, seconds):
    """And a step that comes after the distance is drawn at once."""
    clock, file, drawn, expected = Clock(), Tty(), [], []
    with opened(RichConsole(file=file, width=80), clock, seconds=seconds) as writers:
        for step, pause in enumerate(times, 1):
            clock.now += pause
            before = file.tell()
            writers.tick(step)
            if file.tell() > before:
                drawn.append(clock.now)
            if not expected or clock.now >= expected[-1] + seconds:
                expected.append(clock.now)
    assert drawn == expected


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_that_goes_away_ends_no_run():
    tries = []

    class Gone(Tty):
        def write(self, text: str) -> int:
            tries.append(text)
            raise OSError(5, "Input/output error")

    with opened(RichConsole(file=Gone(), width=80), Clock()) as writers:
        writers.tick(1)
        writers.write(Record(1, "test", {"loss": 1.0}, 0.0))
    assert len(tries) == 1  # given up at the first


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_leaves_streams_and_cursor_as_they_were(error):
    terminal, streams = Terminal(), (sys.stdout, sys.stderr)

    def interrupted_loop():
        with opened(console_of(terminal), Clock()) as writers:
            writers.tick(1)
            assert sys.stderr is not streams[1]  # what others print there goes above the line
            raise error

    with pytest.raises(error):
        interrupted_loop()
    assert (sys.stdout, sys.stderr) == streams
    screen = terminal.finish()
    assert screen.cursor
    assert "\x1b[?25l" in terminal.text  # the cursor was away in between
    assert terminal.text.endswith("\n\x1b[?25h")


PROGRAM = """
import os, signal, sys
from equikd.train._progress import Console, final_table
from equikd.train._writers import Record, Run, Writers
with Writers.open([Console(seconds=0.0)], Run(None, "{}", num_steps=20, start_step=0)) as writers:
    for step in range(1, 21):
        writers.tick(step)
        if step == 10:
            print("a user's print")
            print("a user's warning", file=sys.stderr)
            writers.write(Record(10, "test", {"accuracy": 0.9}, 0.0))
        if step == 15 and "interrupt" in sys.argv:
            os.kill(os.getpid(), signal.SIGINT)
final_table({"test/accuracy": 0.975, "train/loss": 0.1, "test/loss": 0.5}, title="Results")
"""


def program(*arguments: str, stdout: int | None = None) -> tuple[subprocess.CompletedProcess[bytes], Screen]:
    terminal = Terminal(100)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=terminal.slave,
        stdout=stdout or terminal.slave,
        stderr=terminal.slave,
        cwd=Path(_progress.__file__).parents[2],
        check=False,
    )
    return done, terminal.finish()


def test_a_program_on_a_terminal():
    done, screen = program()
    assert done.returncode == 0
    assert screen.cursor
    assert screen.text[:3] == ["a user's print", "a user's warning", "step 10/20  test  accuracy 0.9000"]
    assert re.fullmatch(r"━{24} 20/20  took 0:0\d  test accuracy 0\.9000", screen.text[3])
    cells = [re.findall(r"[\w.]+", line) for line in screen.text[4:]]
    rows = [row for row in cells if row]
    assert len(cells) - len(rows) == 4  # the lines of the frame, one of them between the splits
    assert rows == [
        ["Results"],
        ["split", "metric", "value"],
        ["test", "loss", "0.5000"],
        ["accuracy", "0.9750"],
        ["train", "loss", "0.1000"],
    ]


def test_an_interrupted_program_leaves_the_terminal_sane():
    done, screen = program("interrupt")
    assert done.returncode != 0
    assert screen.cursor
    (line,) = [number for number, text in enumerate(screen.text) if " 15/20 " in text]
    assert screen.text[line + 1].startswith("Traceback")
    assert screen.text[-1] == "KeyboardInterrupt"


def test_redirected_output_gets_prints_and_table_while_the_terminal_shows_progress():
    done, screen = program(stdout=subprocess.PIPE)
    assert done.stdout.decode() == (
        "a user's print\nResults\ntest   loss      0.5000\ntest   accuracy  0.9750\ntrain  loss      0.1000\n"
    )
    assert [line for line in screen.text if "print" in line or "Results" in line] == []
    assert " 20/20 " in screen.text[-1]


def test_a_tick_costs_well_under_a_microsecond():
    """The bound is loose for busy machines; it is 0.1 us here. A redraw at each tick would take hundreds."""
    terminal = Terminal()
    with opened(console_of(terminal), Clock(), seconds=1e9) as writers:
        writers.tick(1)
        best = min(timeit.repeat(lambda: writers.tick(2), number=10_000, repeat=5)) / 10_000
    terminal.finish()
    assert best < 2e-6


# ---- numbers and the table


def test_the_table_without_a_terminal():
    stream = io.StringIO()
    final_table(
        {"train/loss": 12345.678, "test/losses/ce": 0.5, "test/loss": math.nan, "seconds": 12.0}, title="t", file=stream
    )
    assert stream.getvalue().splitlines() == [
        "t",
        "train  loss       12345.6780",
        "test   loss              nan",
        "test   losses/ce      0.5000",
        "       seconds       12.0000",
    ]


def test_an_empty_table_is_its_title():
    stream = io.StringIO()
    final_table({}, title="nothing", file=stream)
    assert stream.getvalue() == "nothing\n"


@given(value=st.floats(-1e300, 1e300) | st.just(math.nan) | st.just(math.inf))
def test_a_shown_number_is_short_and_close(value):
    text = number(value)
    assert len(text) <= 11
    assert float(text) == pytest.approx(value, rel=0.05 if abs(value) < 0.01 else 5e-3, abs=1e-310, nan_ok=True)


@pytest.mark.parametrize("seconds", [-0.1, math.nan])
def test_a_time_that_is_none_is_refused(seconds, snapshot):
    with pytest.raises(ConfigError) as caught:
        validate(Console(seconds))
    snapshot(f"seconds_{seconds}", str(caught.value))
    validate(Console(0.0))


def test_rich_is_loaded_only_when_used():
    program = "import sys, equikd.train._progress; assert not {'rich', 'tensorboardX'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(_progress.__file__).parents[2])


def test_a_metric_with_many_results_is_one_word_of_a_line():
    from equikd.train._progress import _shown

    many = {f"confusion/{i}": float(i) for i in range(9)} | {
        "loss": 1.0,
        "norm/a": 2.0,
        "losses/a": 1.0,
        "losses/b": 0.5,
    }
    assert _shown(many) == "loss 1.0000  losses/a 1.0000  losses/b 0.5000  norm/a 2.0000  confusion (9 results)"
