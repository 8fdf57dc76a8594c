"""What a person sees while a run goes on: the writer `Console`, and `final_table` for what comes out.

On a terminal one live line shows how far the run is, how fast, the last training loss and the latest evals; each eval
is also printed above it, to stay. Anywhere else (a pipe, CI, a notebook) every record is one plain line:

    step 500/1000  train  loss 0.0912  accuracy 0.9750  (3214 steps/s)

Progress goes to the standard error and the final table to the standard output, so `equikd train ... > table.txt`
shows the one and keeps the other. A notebook, which paints the standard error as a fault, gets both on the standard
output.

`tick` runs after every step and must cost nothing: it keeps the number and looks at the clock (0.1 us); a redraw, a
fraction of a millisecond, comes at most every `Console.seconds`. There is no thread: nothing draws while a step
compiles, and no lock is held when the loop is interrupted. A terminal that goes away ends the display, never the run.

Shown numbers are a choice: `loss` first, then by name, without what repeats it (`weighted/...`, and `losses/...`
where there is one loss). The files hold them all.
"""

import collections
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import IO, TYPE_CHECKING, final

from equikd.config import config
from equikd.errors import ConfigError, message
from equikd.train._writers import OpenWriter, Record, Run

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.table import Table

BAR_WIDTH = 24
SPEED_REDRAWS = 100  # the speed is that of the last 100 redraws, 10 seconds by default: steady, yet it follows a change


@final
@config
class Console:
    """Progress for a person: a live line on a terminal, plain lines elsewhere; on the standard error.

    Raises:
        ConfigError: by `ek.config.validate`, where `seconds` is negative or no number.
    """

    seconds: float = 0.1
    """Shortest time between two redraws of the live line, in seconds; 0 redraws after every step."""

    def validate(self) -> None:
        """Refuses a time that is negative or nan."""
        if not self.seconds >= 0:
            raise ConfigError(message("seconds is no length of time", got=str(self.seconds), expected="0 or more"))

    def open(
        self, run: Run, *, clock: Callable[[], float] = time.monotonic, console: "RichConsole | None" = None
    ) -> OpenWriter:
        """Begins the display.

        Args:
            run: its `num_steps` is the length of the bar.
            clock: seconds that never go back.
            console: where to draw; the standard error by default.
        """
        from rich.console import Console as RichConsole

        if console is None:
            console = RichConsole(stderr=True)
        # FORCE_COLOR makes rich believe in a terminal, in CI logs too: only a real one can redraw a line.
        if console.is_interactive and console.file.isatty():
            return _LiveLine(run, console, clock, float(self.seconds))
        return _PlainLines(run, sys.stdout if console.is_jupyter else console.file, clock)


def final_table(metrics: Mapping[str, float], *, title: str, file: IO[str] | None = None) -> None:
    """Prints results as one table: a bordered one on a terminal, aligned plain lines elsewhere.

    Args:
        metrics: result names `split/name` to values. Splits stay in their order; `loss` comes first in each, then by
            name.
        title: a line above.
        file: where to; the standard output by default.

    Example:
        >>> final_table({"test/loss": 0.0912, "test/accuracy": 0.975}, title="digits, 1000 steps", file=sys.stdout)
        digits, 1000 steps
        test  loss      0.0912
        test  accuracy  0.9750
    """
    from rich.console import Console as RichConsole

    stream: IO[str] = sys.stdout if file is None else file
    groups: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        split, slash, metric = name.partition("/")
        groups.setdefault(split if slash else "", {})[metric if slash else name] = value
    rows = [(split, name, number(group[name])) for split, group in groups.items() for name in _ordered(group)]
    console = RichConsole(file=stream)
    if console.is_interactive and stream.isatty():
        console.print(_bordered(rows, title))
    else:
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [f"{split:<{widths[0]}}  {name:<{widths[1]}}  {value:>{widths[2]}}" for split, name, value in rows]
        stream.write("\n".join([title, *lines]) + "\n")


def rich_table(title: str, header: Iterable[str], rows: Iterable[Iterable[str]]) -> "Table":
    """A bordered table, which a notebook shows as one."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for name in header:
        table.add_column(Text(name))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _bordered(rows: Iterable[tuple[str, str, str]], title: str) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    table.add_column("split")
    table.add_column("metric")
    table.add_column("value", justify="right")
    last = None
    for split, name, value in rows:
        if last not in (None, split):
            table.add_section()
        table.add_row(Text("" if split == last else split), Text(name), value)  # Text: a "[" in a name is no markup
        last = split
    return table


def number(value: float) -> str:
    """A result for people: four decimals, and exponents where those would hide it.

    Example:
        >>> [number(value) for value in (0.97222, 12, 0.0000123, 123456.7, 0, math.nan)]
        ['0.9722', '12.0000', '1.230e-05', '1.235e+05', '0.0000', 'nan']
    """
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.3e}"


def _ordered(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name != "loss", name))


_MOST_PARTS = 8  # of one metric on a line


def _shown(metrics: Mapping[str, float]) -> str:
    parts = [name for name in metrics if name.startswith("losses/")]
    kept = [name for name in metrics if not name.startswith("weighted/") and (name not in parts or len(parts) > 1)]
    counts = collections.Counter(name.partition("/")[0] for name in kept if name not in parts)
    texts = {name: f"{name} {number(metrics[name])}" for name in _ordered(kept or metrics)}
    for head, count in counts.items():
        if count > _MOST_PARTS:  # one for each class, say: on one line nobody reads it
            texts = {name: text for name, text in texts.items() if name.partition("/")[0] != head}
            texts[head] = f"{head} ({count} results)"
    return "  ".join(texts.values())


def _line(record: Record, num_steps: int) -> str:
    return f"step {record.step}/{num_steps}  {record.split}  {_shown(record.metrics)}".rstrip()  # images are not shown


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _rate(speed: float) -> str:
    return f"{speed:.0f} steps/s" if speed >= 100 else f"{speed:.3g} steps/s"


def _speed_of(record: Record, ticked: float | None) -> str:
    """The speed of an interval as the row tells it, which leaves out evals and checkpoints; else as the ticks do."""
    speed = record.speed.get("steps_per_second", ticked)
    used = record.speed.get("model_flops_utilization")
    parts = [*([] if speed is None else [_rate(speed)]), *([] if used is None else [f"MFU {100 * used:.3g}%"])]
    return f"  ({', '.join(parts)})" if parts else ""


@final
class _Speed:
    """Steps per second between the oldest and the newest of the last `count` points.

    The first point is the first finished step, so its compilation does not count.
    """

    def __init__(self, count: int):
        self._points: deque[tuple[float, int]] = deque(maxlen=count)

    def add(self, now: float, step: int) -> None:
        self._points.append((now, step))

    @property
    def value(self) -> float | None:
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start and last > first else None


@final
class _PlainLines:
    """A line for each record, whole and flushed, so that logs can be followed and searched."""

    def __init__(self, run: Run, stream: IO[str], clock: Callable[[], float]):
        self._run, self._stream, self._clock = run, stream, clock
        self._speed = _Speed(2)
        self._step: int | None = None

    def tick(self, step: int) -> None:
        if self._step is None:
            self._speed.add(self._clock(), step)
        self._step = step

    def write(self, record: Record) -> None:
        line = _line(record, self._run.num_steps)
        # Values are read one interval late, but the speed is that of the steps up to now: what ticked since the last
        # line.
        if record.split == "train":
            if self._step is not None:
                self._speed.add(self._clock(), self._step)
            line += _speed_of(record, self._speed.value)
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except OSError:  # nobody reads any more, which is no reason to end the run
            pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@final
class _LiveLine:
    """One line at the bottom of the terminal that is drawn over again; evals are printed above it."""

    def __init__(self, run: Run, console: "RichConsole", clock: Callable[[], float], seconds: float):
        from rich.live import Live

        self._run, self._console, self._clock, self._seconds = run, console, clock, seconds
        self._step, self._started = run.start_step, clock()
        self._due = self._started
        self._speed = _Speed(SPEED_REDRAWS)
        self._latest: dict[str, str] = {}
        self._ticked = False
        # What the user prints goes above the line. Output that was sent to a file must still reach the file.
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            get_renderable=self._render,
        )
        self._gone = False
        self._draw(self._live.start, refresh=True)

    def tick(self, step: int) -> None:
        self._step = step
        now = self._clock()
        if now >= self._due:
            self._ticked = True
            self._due = now + self._seconds
            self._speed.add(now, step)
            self._draw(self._live.refresh)

    def write(self, record: Record) -> None:
        from rich.text import Text

        shown = record.metrics
        if record.split == "train":
            self._latest["train"] = _shown({"loss": shown["loss"]} if "loss" in shown else shown)
        else:
            self._latest[record.split] = f"{record.split} {_shown(shown)}" if shown else ""
            self._draw(self._console.print, Text(_line(record, self._run.num_steps)))  # redraws the live line as well

    def flush(self) -> None:
        pass

    def close(self) -> None:
        """Draws the last state, leaves the line standing, and gives back cursor and streams; also after an error."""
        self._draw(self._live.stop)

    def _draw(self, call: Callable[..., object], *arguments: object, **options: object) -> None:
        if self._gone:
            return
        try:
            call(*arguments, **options)
        except OSError:  # the terminal is gone
            self._gone = True

    def _render(self) -> "RenderableType":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done, total = self._step, self._run.num_steps
        speed = self._speed.value
        parts = [f"{done}/{total}"]
        if done >= total:
            parts.append(f"took {_duration(self._clock() - self._started)}")
        elif speed is not None:
            parts += [_rate(speed), f"eta {_duration((total - done) / speed)}"]
        elif not self._ticked:
            parts.append("starting")
        parts += [text for text in self._latest.values() if text]
        line = Table.grid(padding=(0, 1))
        line.add_column(width=BAR_WIDTH)
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(ProgressBar(total=total, completed=done, width=BAR_WIDTH), Text("  ".join(parts)))
        return line
