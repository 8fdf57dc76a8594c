"""How fast training goes: steps and examples a second, and what part of the hardware's peak that is.

    throughput = Throughput(rows=256)
    stepper.step(batch); throughput.tick(1)              # after every call; the first one compiles
    ...                                                  # 99 more
    throughput.ended(100, aux)                           # the interval ends; its results are set aside
    ...
    throughput.finished(100)                             # they are read: {"steps_per_second": ..., ...}

The loop runs ahead of the device, so a look at the clock when a step has been dispatched tells nothing of when it is
done; and results are read an interval later, which tells only that it is done by then. So each tick asks whether the
results of the last interval are there, which takes a tenth of a microsecond. An interval has ended

- when its last step was dispatched, if its results are there at the next tick: the device waits for the host (for data,
  most often);
- else at the first tick that finds them, or when the read of them returns: the device is what takes the time.

Each interval begins where the one before it ended. Time in evals and checkpoints is taken out by `paused`. It first
waits for what is under way, which they would wait for anyway, so that this still counts as training. Time in which the
loop waits for data does count. The first call of a run compiles: time begins when it returns, and its steps are left
out, so of a first interval of one call nothing is told. Figures hold to a call or two of the interval.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, final

import jax

from equikd._compat import is_ready
from equikd.data import batch_size
from equikd.train._costs import hardware, products_of
from equikd.train._peak import peak_of, seconds_at_peak
from equikd.train._setup import Setup


@final
class Throughput:
    """The clock of one run of the loop.

    Example:
        >>> now = iter([10.0, 14.0, 14.1])
        >>> throughput = Throughput(rows=32, least_seconds=0.01, clock=lambda: next(now))
        >>> throughput.tick(1)
        >>> throughput.ended(101, results=None)
        >>> throughput.finished(101)
        {'steps_per_second': 24.39..., 'examples_per_second': 780.4..., 'model_flops_utilization': 0.243...}
    """

    def __init__(
        self, rows: int, *, least_seconds: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Nothing is measured before the first tick.

        Args:
            rows: of a batch, padding included.
            least_seconds: that a step would take at the peak of the hardware; None: not known.
            clock: seconds that never go back.
        """
        self._rows, self._least, self._clock = rows, least_seconds, clock
        self._from: tuple[int, float] | None = None
        self._watched: tuple[int, float, Any] | None = None
        self._ticked = False
        self._ended: dict[int, float] = {}
        self._pauses: list[tuple[float, float]] = []

    def tick(self, step: int) -> None:
        """A call has returned, after which `step` updates are dispatched."""
        if self._from is None:
            self._from = step, self._clock()
        if self._watched is not None:
            ended, dispatched, result = self._watched
            if result is None or is_ready(result):
                self._ended[ended] = self._clock() if self._ticked else dispatched
                self._watched = None
            self._ticked = True

    def ended(self, step: int, results: Any) -> None:
        """An interval ends with update `step`, which has just been dispatched.

        Args:
            step: updates made.
            results: arrays that its last step computes.
        """
        self._watched, self._ticked = (step, self._clock(), _array_of(results)), False

    @contextlib.contextmanager
    def paused(self, until: Any = None) -> Iterator[None]:
        """Inside, time is not that of training.

        Args:
            until: arrays of the last step; waited for first.
        """
        jax.block_until_ready(until)
        begun = self._clock()
        try:
            yield
        finally:
            self._pauses.append((begun, self._clock()))

    def finished(self, step: int) -> dict[str, float]:
        """The figures of the interval that ended with update `step`; waits for its results.

        Args:
            step: as given to `ended`.

        Returns:
            `steps_per_second`, `examples_per_second`, and `model_flops_utilization` where the peak of the hardware is
            known: the part of it that the matrix products of the step take. Empty where nothing can be told.
        """
        if self._watched is not None and self._watched[0] == step:
            jax.block_until_ready(self._watched[2])
            self._ended[step], self._watched = self._clock(), None
        if self._from is None or step not in self._ended:
            return {}
        (first, begin), end = self._from, self._ended.pop(step)
        end = max(end, begin)
        paused = sum(max(0.0, min(end, there) - max(begin, here)) for here, there in self._pauses)
        self._pauses = [(here, there) for here, there in self._pauses if there > end]
        self._from = step, end
        steps, seconds = step - first, end - begin - paused
        return speed(steps, seconds, self._rows, self._least) if steps > 0 and seconds > 0 else {}


def _array_of(results: Any) -> Any:
    """An array on a device, or None: what one program computes is there all at once."""
    return next((leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)), None)


def speed(steps: int, seconds: float, rows: int, least_seconds: float | None) -> dict[str, float]:
    """The figures of `steps` updates in `seconds`, as `Throughput.finished` gives them."""
    found = {"steps_per_second": steps / seconds, "examples_per_second": steps * rows / seconds}
    if least_seconds is not None:
        found["model_flops_utilization"] = least_seconds * steps / seconds
    return found


def throughput_of(setup: Setup) -> Throughput:
    """The clock of a run of this experiment. The step is traced once more where its utilisation can be told."""
    device, devices = hardware(setup.config)
    products = {} if peak_of(device) is None else products_of(setup)
    return Throughput(batch_size(setup.spec), least_seconds=seconds_at_peak(products, device, devices))
