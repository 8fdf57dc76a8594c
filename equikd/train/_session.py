"""One call of `Trainer.train`: where it starts, what it opens, and how it ends.

A run in a directory goes on from the newest checkpoint. `RollBack` does the same within one call: what has failed is
left, as if the process had been started again, with smaller updates.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from equikd.config import to_json
from equikd.errors import ConfigError, NonFiniteError, message
from equikd.train._auto import steps_per_call
from equikd.train._checkpoint import CheckpointStore
from equikd.train._directory import RunDirectory, environment_facts
from equikd.train._ending import Ending
from equikd.train._exhausted import memory_explained
from equikd.train._failure import refuse_bad_start
from equikd.train._feed import Feed, feed_of
from equikd.train._guard import RollBack, guard_of
from equikd.train._layers import located_in_layer
from equikd.train._lock import locked
from equikd.train._loop import loop
from equikd.train._output import Output, Saving
from equikd.train._result import Result
from equikd.train._resume import (
    Restored,
    begin,
    changes,
    refuse_other_arrays,
    restored,
    results_again,
    rows_at,
    tell,
    tell_unloadable,
)
from equikd.train._setup import Setup, part
from equikd.train._signals import Signals
from equikd.train._state import TrainState
from equikd.train._stepper import Stepper, stepper_for
from equikd.train._throughput import throughput_of
from equikd.train._writers import Run, Writers


@dataclasses.dataclass(frozen=True)
class Session:
    """What one call of `train` works with.

    Attributes:
        trainer: the experiment.
        setup: the same, checked.
        writers: of the trainer.
        first: makes the first train state.
        signals: those that come.
        ending: says when training ends.
    """

    trainer: Any
    setup: Setup
    writers: tuple[Any, ...]
    first: Callable[[], TrainState]
    signals: Signals
    ending: Ending

    def run(self, directory: RunDirectory | None) -> Result:
        """Train to the end.

        Args:
            directory: where results and checkpoints go, or None.

        Raises:
            ConfigError: the guard would have nothing to go back to.
            Exception: as `Trainer.train`.
        """
        try:
            return self._run(directory)
        except NonFiniteError as error:
            raise located_in_layer(error, self.setup) from None

    def _run(self, directory: RunDirectory | None) -> Result:
        text = to_json(self.trainer, unloadable=True)
        if directory is None:
            if isinstance(self._guard, RollBack):
                what = "guard: RollBack has nothing to go back to, since there is no work directory"
                raise ConfigError(message(what, fix='train("runs/a"), or another guard'))
            run = Run(None, text, self.setup.num_steps, start_step=0)
            stepper = self._stepper(None)
            return self._loop(stepper, self._feed(stepper, 0), Writers.open(self.writers, run), run, None, None)
        keep = self.trainer.checkpoints.keep if self.trainer.checkpoints else 1
        with locked(directory), CheckpointStore(directory.checkpoints, keep) as store:
            directory.check()  # again, now that nobody else writes there
            changed = ""
            if directory.exists:
                refuse_other_arrays(directory.config_text(), text)
                changed = changes(directory.config_text(), self.trainer, text)
            found = restored(directory, store, self.setup, changed, store.latest())
            tell_start = lambda start: self._tell(directory, start, changed)
            attempt = functools.partial(self._attempt, directory, store, text)
            try:
                return self._attempts(attempt, functools.partial(self._back, directory, store), found, tell_start)
            except NonFiniteError as error:
                newest = store.latest()
                where = f"{directory.path}, {'no checkpoint yet' if newest is None else f'newest checkpoint {newest}'}"
                raise error.located(where) from None

    @property
    def _guard(self) -> Any:
        return guard_of(self.setup.config)

    def _attempts(
        self,
        attempt: Callable[..., Result],
        go_back: Callable[..., Restored],
        found: Restored | None,
        tell_start: Callable[[int], None],
    ) -> Result:
        """One attempt; more of them where the guard is a `RollBack`."""
        returned: tuple[int, int] | None = None  # to which step, and from which
        most = self._guard.max_returns if isinstance(self._guard, RollBack) else 0
        for left in reversed(range(most + 1)):
            try:
                return attempt(found, tell_start)
            except NonFiniteError as error:
                if not left:
                    raise error.again(most) if most else error from None
                found, tell_start = go_back(error, returned), lambda start: None
                returned = found.step, error.step
        raise AssertionError("the last attempt returns or raises")

    def _attempt(
        self,
        directory: RunDirectory,
        store: CheckpointStore,
        text: str,
        found: Restored | None,
        tell_start: Callable[[int], None],
    ) -> Result:
        stepper, start = self._stepper(found), 0 if found is None else found.step
        feed = self._feed(stepper, start)  # what can fail comes before anything is written
        self.ending.resume(start, {} if found is None else found.facts)
        tell_start(start)
        run = Run(directory.path, text, self.setup.num_steps, start)
        opened = begin(directory, self.writers, run, environment_facts(self.setup.seed))
        return self._loop(stepper, feed, opened, run, store, found)

    def _tell(self, directory: RunDirectory, start: int, changed: str) -> None:
        if directory.exists:
            over = self.ending.reached(start)
            tell(directory, start, changed, self.setup.num_steps, self.ending.reason, over=over)
        else:
            tell_unloadable(directory, self.trainer)

    def _stepper(self, found: Restored | None) -> Stepper:
        if found is not None:
            return found.stepper
        state = self.first()
        refuse_bad_start(self.setup.config, state)
        return stepper_for(self.setup, state)

    def _feed(self, stepper: Stepper, start: int) -> Feed:
        return feed_of(self.setup, stepper, start, steps_per_call(self.setup, stepper))

    def _back(
        self, directory: RunDirectory, store: CheckpointStore, error: NonFiniteError, returned: tuple[int, int] | None
    ) -> Restored:
        """The newest checkpoint, or the first state, with smaller updates.

        Where the run has failed again without having got further, it starts from the checkpoint before the one that it
        went back to: the parameters may have been on their way out there already.
        """
        store.wait()
        steps = store.steps()
        again = returned is not None and error.step <= returned[1]
        older = [step for step in steps if returned is not None and step < returned[0]] if again else steps
        found = restored(directory, store, self.setup, "", max(older, default=min(steps, default=None)))
        start = 0 if found is None else found.step
        state = self.first() if found is None else found.stepper.state
        scale = error.state.guard.scale * jnp.float32(self._guard.factor)
        if float(scale) == 0:  # trained on, nothing would move
            raise error
        state = eqx.tree_at(lambda one: one.guard.scale, state, scale)
        accumulators = None if found is None else found.stepper.borrow()[1]
        stepper = stepper_for(self.setup, state, accumulators)
        what = str(error).partition("\n")[0]
        sys.stderr.write(f"{what}; going back to step {start}, with updates multiplied by {float(scale):.3g}\n")
        return Restored(stepper, start, 0.0 if found is None else found.seconds, {} if found is None else found.facts)

    def _loop(
        self,
        stepper: Stepper,
        feed: Feed,
        writers: Writers,
        run: Run,
        store: CheckpointStore | None,
        found: Restored | None,
    ) -> Result:
        setup, start, ending = self.setup, run.start_step, self.ending
        with contextlib.closing(feed), writers as opened:
            seconds = 0.0 if found is None else found.seconds
            output = Output(opened, setup.config, stepper, ending, throughput_of(setup), seconds)
            saving = None
            if store is not None and self.trainer.checkpoints is not None:
                saving = Saving(store, self.trainer.checkpoints.every, setup.seed)
            rows = rows_at(run.workdir, start)
            for row in rows:
                ending.observe(row)
            with memory_explained(setup):
                if run.workdir is not None and ending.reached(start):
                    results_again(setup, stepper, output, run.workdir, start, self.signals)
                else:
                    loop(setup, stepper, feed, output, saving, self.signals, start, {row.split for row in rows})
                    if ending.reason is not None:
                        sys.stderr.write(f"stopped: {ending.reason}\n")
        return Result(self.trainer, stepper.state, output.latest, output.summaries, tuple(output.history))


def ending_of(trainer: Any, setup: Setup, started: float) -> Ending:
    """When a run of this trainer ends; seconds count from `started` on."""
    after, early = part(trainer, "stop_after"), part(trainer, "early_stop")
    evals = {one.name: one.settings for one in setup.evals}
    return Ending(setup.num_steps, after, early, setup.log_every, evals, started=started)
