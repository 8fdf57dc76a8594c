"""SIGTERM and SIGINT: a run that is told to end saves and ends; run again, it goes on to the bit.

While a step runs or a checkpoint is written, a signal is only noted, since the step owns the buffers of the state; the
loop looks after each step. Where the loop waits for others (data, evals), `interruptible` lets the signal break in at
once: what it breaks off is done again. A second SIGINT is a `KeyboardInterrupt` at once, as always in Python; a
checkpoint that is being written is finished.

    with Signals() as signals:
        with signals.interruptible:
            batch = next(batches)      # `Interrupted` may come from here
        ...
        signals.check()                # or from here

Signals reach Python in its main thread alone, between two of its instructions: in other threads this does nothing, and
a compilation is not broken off.
"""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(BaseException):
    """Training was told to end.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)

    def ending(self) -> BaseException:
        """What ends the program: `KeyboardInterrupt`, or `SystemExit` with the code of a program ended by SIGTERM."""
        return KeyboardInterrupt() if self.number == signal.SIGINT else SystemExit(128 + self.number)


class _Interruptible:
    """Where a signal may break in."""

    def __init__(self, owner: "Signals") -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._owner.check()
        self._owner.open = True
        self._owner.check()  # it may have come in between

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._owner.open = False
        if error is None:
            self._owner.check()  # what ran inside may have swallowed it


class Signals:
    """Takes SIGTERM and SIGINT over while training runs, and gives them back.

    Attributes:
        received: the number of the first signal, or None.
        open: whether it may break in now.
        interruptible: a context in which it may.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.open = False
        self.interruptible = _Interruptible(self)
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup and the like ignore on purpose
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child that was forked: there is nothing to save in it
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
            return
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number
        if self.open:
            self.check()

    def check(self) -> None:
        """Raise where a signal has come.

        Raises:
            Interrupted: with its number.
        """
        if self.received is not None:
            raise Interrupted(self.received)
