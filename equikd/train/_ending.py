"""When training ends: at `num_steps`, at a limit besides it, or when a result no longer improves.

All but the limit on seconds are functions of the step and of the results up to it, so that an interrupted run ends
where an uninterrupted one does. What `EarlyStop` has seen stands in the facts of checkpoints.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from equikd.errors import ConfigError, listing, message, nearest
from equikd.evals import Eval
from equikd.metrics import Aux
from equikd.train._rows import Record
from equikd.train._settings import EarlyStop, StopAfter


class EarlyStopState(NamedTuple):
    """What early stopping has seen.

    Attributes:
        best: the best value, None before there is a finite one.
        best_step: its step.
        values_since: values after it, none of which was better.
        newest: step of the newest value.
        over: step of the value with which patience ended, None before; nothing that comes later changes it, since
            values may be read early, before a checkpoint, say.
    """

    best: float | None = None
    best_step: int = 0
    values_since: int = 0
    newest: int = -1
    over: int | None = None

    def after(self, rule: EarlyStop, step: int, value: float) -> "EarlyStopState":
        """With one more value."""
        if self.over is not None:
            return self
        if rule.better(value, self.best):
            return EarlyStopState(value, step, 0, step)
        since = self.values_since + 1
        return self._replace(values_since=since, newest=step, over=step if since >= rule.patience else None)


@dataclasses.dataclass
class Ending:
    """Says after which step training ends.

    Attributes:
        num_steps: of the trainer.
        after: a further limit, or None.
        early: the rule for early stopping, or None.
        log_every: steps in a training interval, by which its results are late.
        evals: name -> eval. Rows that are off schedule, since a run was ended there, are not looked at.
        seen: what early stopping has seen.
        start: updates that were made before this session.
        started: the time on `time.monotonic` from which seconds count.
        reason: why training has ended before `num_steps`, once it has.
    """

    num_steps: int
    after: StopAfter | None = None
    early: EarlyStop | None = None
    log_every: int = 1
    evals: Mapping[str, Eval] = dataclasses.field(default_factory=dict)
    seen: EarlyStopState = dataclasses.field(default_factory=EarlyStopState)
    start: int = 0
    started: float = dataclasses.field(default_factory=time.monotonic)
    reason: str | None = None

    @property
    def stop_at(self) -> int | None:
        """The step of `stop_after`, or None."""
        return None if self.after is None else self.after.steps

    def observe(self, record: Record) -> None:
        """Take notice of a row of results."""
        if self.early is None or not self._scheduled(record):
            return
        name = self.early.result.removeprefix(f"{record.split}/")
        if name in record.metrics and name != self.early.result and record.step > self.seen.newest:
            self.seen = self.seen.after(self.early, record.step, record.metrics[name])

    def _scheduled(self, record: Record) -> bool:
        if record.split == "train":
            return record.step % self.log_every == 0
        return record.split not in self.evals or self.evals[record.split].due(record.step, last=False)

    def reached(self, step: int) -> bool:
        """Whether training ends after `step` updates; `reason` then says why, unless that is `num_steps`."""
        if step >= self.num_steps:
            return True
        if self.reason is None:
            self.reason = self._limit(step) or self._no_better(step)
        return self.reason is not None

    def _limit(self, step: int) -> str | None:
        steps, seconds = (None, None) if self.after is None else (self.after.steps, self.after.seconds)
        if steps is not None and step >= steps:
            return f"stop_after.steps is {steps}"
        if seconds is not None and step > self.start and time.monotonic() - self.started >= seconds:
            return f"stop_after.seconds is {seconds:g}"
        return None

    def _no_better(self, step: int) -> str | None:
        early, seen = self.early, self.seen
        if early is None or seen.over is None:
            return None
        late = self.log_every if early.result.startswith("train/") else 0  # whenever they were read
        if step < seen.over + late:
            return None
        best = "no finite value so far" if seen.best is None else f"best {seen.best:.6g} at step {seen.best_step}"
        return f"{early.result} has not improved for {seen.values_since} values ({best})"

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        if self.early is None:
            return {}
        return {"early_stop": _rule(self.early) | self.seen._asdict()}

    def resume(self, step: int, facts: Mapping[str, Any]) -> None:
        """Start from a step, with what a checkpoint has kept where it is of the same result."""
        self.start, self.seen, self.reason = step, EarlyStopState(), None
        kept, early = facts.get("early_stop"), self.early
        if early is None or not isinstance(kept, dict):
            return
        if _rule(early).items() <= kept.items():
            seen = EarlyStopState(**{name: kept[name] for name in EarlyStopState._fields})
            over = seen.values_since >= early.patience  # which may have been raised
            self.seen = seen if over else seen._replace(over=None)


def _rule(early: EarlyStop) -> dict[str, Any]:
    """What must be the same for what was seen to count; patience may be raised."""
    return {"result": early.result, "mode": early.mode, "min_delta": float(early.min_delta)}


def check_result(early: EarlyStop | None, empties: Mapping[str, Aux], evals: Mapping[str, Eval]) -> None:
    """Refuse to watch a result that there will not be, or not again and again.

    Args:
        early: the rule, or None.
        empties: split -> its losses and metrics over no rows.
        evals: name -> eval.

    Raises:
        ConfigError: it is none of them, or of an eval that is not repeated.
    """
    if early is None:
        return
    names, unknown = [], False
    for split, empty in sorted(empties.items()):
        try:
            with np.errstate(all="ignore"):
                names += [f"{split}/{name}" for name in empty.results()]
        except Exception:  # a metric that cannot compute over no rows will have names that nobody knows yet
            unknown = True
    if early.result not in names and not unknown:
        what = f"early_stop.result = {early.result!r}: there will be no such result"
        raise ConfigError(message(what, near=nearest(early.result, names), expected=f"one of {listing(names)}"))
    once = [n for n, one in evals.items() if early.result.startswith(f"{n}/") and not one.every and len(one.at) < 2]
    if once:
        what = f"early_stop.result = {early.result!r}: the eval {once[0]!r} does not run again and again"
        raise ConfigError(message(what, got="every=None", fix=f"evals.{once[0]}.every=100, or another number of steps"))
