"""Up to which step one dispatch may go: to the next one after which something else than a step is due.

A function of the step number and of what the trainer says, and of nothing else: a run that was interrupted cuts the
steps that are left as the whole run would have done.
"""

from equikd.evals import Eval


def next_multiple(step: int, every: int | None) -> int | None:
    """The first multiple of `every` after `step`.

    Example:
        >>> next_multiple(10, 5), next_multiple(11, 5), next_multiple(3, None)
        (15, 15, None)
    """
    return None if every is None else step - step % every + every


def boundary(
    step: int,
    most: int,
    *,
    num_steps: int,
    log_every: int,
    evals: tuple[Eval, ...] = (),
    save_every: int | None = None,
    stop_at: int | None = None,
) -> int:
    """The step at which the dispatch that begins after `step` updates ends.

    Args:
        step: updates made, less than `num_steps`.
        most: steps of a dispatch, which begin at multiples of it where nothing else is due.
        num_steps: the end of training.
        log_every: steps in a training interval.
        evals: whose steps are boundaries.
        save_every: steps between two checkpoints, or None.
        stop_at: an earlier end, or None.

    Example:
        >>> steps = [0]
        >>> while steps[-1] < 20:
        ...     steps.append(boundary(steps[-1], 8, num_steps=20, log_every=10))
        >>> steps
        [0, 8, 10, 16, 20]
    """
    if most == 1:
        return step + 1
    due = [next_multiple(step, every) for every in (most, log_every, save_every, *(one.every for one in evals))]
    due += [num_steps, stop_at, *(at for one in evals for at in one.at)]
    return min(at for at in due if at is not None and at > step)
