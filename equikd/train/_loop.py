"""The loop: feed, step, log, evaluate, save; to be read from top to bottom.

With `steps_per_call` one dispatch makes several steps; it ends at each step after which something else is due, so
whatever happens between steps happens after exactly the same ones.

Results are read from the device in one place, `Output.write` (`_output.py`), and one interval late: when an interval
ends its accumulators are set aside, and read when the next one ends, by which time they have long been computed, so the
loop never waits for a step it has just dispatched. Before an eval or a checkpoint, and at the end, what was set aside
is written at once, and parameters that are not finite are refused.

A signal may break in while data is fetched or an eval runs; else it waits until the dispatch is done. Then the state is
saved; a resume first runs those evals that have no row at this step.
"""

import itertools
from collections.abc import Collection

from equikd.data import exhausted
from equikd.evals import evaluate, filled
from equikd.metrics import Aux
from equikd.train._boundaries import boundary
from equikd.train._check import view_of
from equikd.train._failure import refuse_bad
from equikd.train._feed import Feed
from equikd.train._output import Output, Pending, Saving
from equikd.train._padding import unpadded
from equikd.train._setup import PreparedEval, Setup
from equikd.train._signals import Interrupted, Signals
from equikd.train._state import TrainState
from equikd.train._stepper import Stepper
from equikd.tree import join


def loop(
    setup: Setup,
    stepper: Stepper,
    feed: Feed,
    output: Output,
    saving: Saving | None,
    signals: Signals,
    start: int,
    ran: Collection[str] = (),
) -> None:
    """Train from update number `start` to the end, which `output.ending` says.

    Args:
        setup: the checked experiment.
        stepper: holds the state after `start` updates.
        feed: the training batches from number `start` on.
        output: where results go.
        saving: where checkpoints go, or None.
        signals: those that have come.
        start: updates already made.
        ran: the evals that have already run at `start`.

    Raises:
        DataError: the data ends before training does.
        NonFiniteError: losses, gradients or parameters are not finite.
        Interrupted: a signal has come; what can be saved is saved.
    """
    pending: Pending | None = None
    step = logged = start
    done: list[str] = list(ran)
    every, stop_at = None if saving is None else saving.every, output.ending.stop_at
    evals = tuple(one.settings for one in setup.evals)
    intervals = {"log_every": setup.log_every, "evals": evals, "save_every": every, "stop_at": stop_at}

    def write() -> None:
        nonlocal pending
        output.write(pending)
        pending = None

    def run_evals(last: bool) -> None:
        due = [one for one in setup.evals if one.settings.due(step, last) and one.name not in done]
        if not due:
            return
        write()
        with output.throughput.paused(stepper.borrow()[0]):
            refuse_bad(setup.config, stepper.borrow()[0])
            for one in due:
                state, _ = stepper.borrow()
                with signals.interruptible:
                    aux = run_eval(one, state)
                output.write(Pending(step, one.name, aux, None if state.guard is None else state.guard.counts))
                done.append(one.name)

    def save() -> None:
        write()
        if saving is not None and step > 0:  # before the first update there is nothing to lose
            with output.throughput.paused(stepper.borrow()):
                saving.save(step, stepper, output)

    try:
        run_evals(last=False)  # those of step 0, and those that a signal has broken off
        while not output.ending.reached(step):
            until = boundary(step, feed.most, num_steps=setup.num_steps, **intervals)
            with signals.interruptible:
                fed = feed.draw(until - step)
            if fed is None:
                write()
                raise exhausted(step, setup.num_steps)
            stepper.run(fed)
            step, done = step + fed.steps, []
            output.tick(step)

            if step % setup.log_every == 0:
                write()  # the interval before this one
                pending, logged = Pending(step, "train", stepper.swap(), stepper.guard()), step
                output.throughput.ended(step, pending.aux)
            run_evals(last=False)
            if saving is not None and saving.due(step):
                save()
            signals.check()

        if step > logged:
            write()
            pending = Pending(step, "train", stepper.swap(), stepper.guard())
            output.throughput.ended(step, pending.aux)
        write()
        refuse_bad(setup.config, stepper.borrow()[0])
        run_evals(last=True)
        save()
    except Interrupted:
        save()
        raise


def run_eval(one: PreparedEval, state: TrainState) -> Aux:
    """An eval of a state."""
    batches = itertools.islice(one.data.epoch(), one.settings.num_batches)
    batches = filled(batches, one.config)
    batches = unpadded(batches, one.config, join(("evals", one.name)) + ".")
    return evaluate(one.config, view_of(state, one.config), batches, one.empty)
