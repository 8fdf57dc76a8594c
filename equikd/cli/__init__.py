"""The command line: `equikd train | eval | check | paths MODULE [--args.NAME=VALUE ...] [--cfg.PATH=VALUE ...]`.

MODULE is an importable module or the path of a `.py` file, with a function `get_config` that returns a trainer. Where
`get_config` takes one config class, its fields are flags under `--args`, typed by tyro. `--cfg.PATH=VALUE` edits the
trainer that comes out, at any path. Whatever is wrong is told on one screen, with exit code 2, before anything is
written.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

from equikd.cli._commands import COMMANDS
from equikd.cli._modules import load_module as load_module
from equikd.cli._modules import origins
from equikd.errors import ConfigError, EquikdError, listing, message, nearest

USAGE = """\
usage: equikd COMMAND MODULE [--args.NAME=VALUE ...] [--cfg.PATH=VALUE ...]

  train     train the experiment that MODULE describes; run it again to resume
  eval      evaluate what it has trained: all evals, at the newest checkpoint or at --step
  check     check it without running it, and tell what it consists of: shapes, results, floats
  paths     list what key paths can name

MODULE is an importable module (equikd.examples.digits) or a .py file, with a function get_config
that returns an ek.Trainer. `equikd train MODULE --help` lists its settings.

  --args.NAME=VALUE   a setting of get_config's config class
  --cfg.PATH=VALUE    any value of the trainer, such as --cfg.optimizer.learning_rate=1e-3
  --workdir DIR       of train: where config, metrics, TensorBoard events and checkpoints go
                      (default: runs/NAME, NAME being the last part of MODULE); of eval: where they are
  --step N            of eval: which checkpoint
  --memory            of check: compile the step, and tell how many bytes it takes
  --version           the version of equikd

Errors are told on one screen, with exit code 2. EQUIKD_TRACEBACK=1 shows the Python traceback.
"""


_MOST_LINES = 36  # of an error, so that it stays on one screen
_MOST_FRAMES = 8  # of the user's own code, in a fault there


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after `equikd`; those of the process by default.

    Returns:
        The exit code: 0; 2 where the words or the experiment are wrong; 130 after an interrupt.

    Raises:
        SystemExit: 143, after SIGTERM.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _ending_orderly():
            return _run(words)
    except EquikdError as error:
        return _refuse(str(error), error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except Exception as error:
        notes = [note for note in getattr(error, "__notes__", []) if "JAX has removed" not in note]
        lines = origins(error)
        if not lines and not notes:  # a fault of this library: its traceback says most
            raise
        text = _cut(f"{type(error).__name__}: {str(error).strip()}", _MOST_LINES // 3)
        where = ["in your code:", *(f"  {line}" for line in lines[-_MOST_FRAMES:])] if lines else []
        return _refuse("\n".join([text, *notes, *where, "EQUIKD_TRACEBACK=1 shows the traceback"]), error)


@contextlib.contextmanager
def _ending_orderly() -> Iterator[None]:
    """SIGTERM is a `SystemExit`, so that what is open is closed; while it trains, the trainer does more."""
    orderly = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not orderly:
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        import equikd

        sys.stdout.write(f"equikd {equikd.__version__}\n")
        return 0
    if words[0] not in COMMANDS:
        what, fix = f"{words[0]!r} is no command", "equikd --help"
        raise ConfigError(message(what, near=nearest(words[0], COMMANDS), expected=listing(COMMANDS), fix=fix))
    if words[1:2] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    return COMMANDS[words[0]](words[1:])


def _refuse(text: str, error: BaseException) -> int:
    if os.environ.get("EQUIKD_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    sys.stderr.write(_cut(text, _MOST_LINES) + "\n")
    return 2


def _cut(text: str, most: int) -> str:
    lines = text.splitlines()
    return text if len(lines) <= most else "\n".join([*lines[:most], f"... ({len(lines) - most} more lines)"])
