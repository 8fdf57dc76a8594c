"""Going on from a run directory: what a run that stopped left behind, and what the config says now.

The config wins for what it says (rates, intervals, `num_steps`, the seed), the checkpoint for what only it knows: the
parameters, the optimizer's state, the step, which is also the position in the data, and the accumulators of the
training interval in progress. What differs from the `config.json` of the earlier start is printed. Refused, with the
run directory as it was, are a model or optimizer of another structure, other arrays in place of those that the run was
trained on, and a `num_steps` that lies in the past.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.config import diff, from_json, to_json
from equikd.errors import CheckpointError, ConfigError, listing, message
from equikd.sharding import settle, spread_of
from equikd.train._cache import is_array
from equikd.train._checkpoint import CheckpointStore
from equikd.train._checkpoint_files import is_whole
from equikd.train._directory import RunDirectory
from equikd.train._guard import guard_again
from equikd.train._leaves import cut, differences, entry_of, named
from equikd.train._loop import run_eval
from equikd.train._output import Output, Pending
from equikd.train._rows import Record, check_rows, name_for_old, read_records
from equikd.train._setup import Setup
from equikd.train._signals import Signals
from equikd.train._state import TrainState
from equikd.train._stepper import Stepper, stepper_for
from equikd.train._writers import JsonLines, Run, TensorBoard, Writers
from equikd.tree import items, join, nested, parse

_MOST_LINES = 12  # of changes, beside an error or a listing, so that all stays on one screen


class Restored(NamedTuple):
    """A checkpoint, ready to go on from.

    Attributes:
        stepper: holds the train state, and the accumulators of the training interval in progress.
        step: updates made.
        seconds: of all sessions before this one.
        facts: what else stands beside its arrays.
    """

    stepper: Stepper
    step: int
    seconds: float
    facts: dict[str, Any]


def restored(
    directory: RunDirectory, store: CheckpointStore, setup: Setup, changed: str, step: int | None
) -> Restored | None:
    """A checkpoint of a run directory, to go on from.

    Args:
        directory: the run directory.
        store: its checkpoints.
        setup: the experiment as it is now.
        changed: what differs from config.json, for the error.
        step: of which checkpoint; None: there is none, and the answer is None.

    Raises:
        ConfigError: it is past `num_steps`.
        CheckpointError: it does not fit the model or optimizer, or cannot be read.
    """
    if step is None:
        return None
    if step > setup.num_steps:
        raise ConfigError(
            message(
                f"num_steps is {setup.num_steps}, but this run has made {step} updates",
                where=f"{directory.checkpoints / str(step)}",
                got=f"num_steps {setup.num_steps}, checkpoints at {listing(store.steps())}",
                expected=f"num_steps >= {step}",
                fix="raise num_steps, or train in a new work directory",
            )
        )
    accumulators = _arrays(Stepper.empty(setup.config, setup.state, setup.spec))
    whole, interval, facts = _read(directory, store, setup, step, changed, accumulators)
    stepper = stepper_for(setup, whole, interval)
    return Restored(stepper, step, float(facts["seconds"]), facts)


def state_at(
    directory: RunDirectory, store: CheckpointStore, setup: Setup, changed: str, step: int | None
) -> TrainState:
    """The train state of a checkpoint.

    Args:
        directory: the run directory; nothing is written there.
        store: its checkpoints.
        setup: the experiment as it is now.
        changed: what differs from config.json, for the error.
        step: updates made; None: the newest checkpoint.

    Raises:
        CheckpointError: there is none of that step; or it does not fit the model or optimizer, or cannot be read.
    """
    steps = store.steps()
    if not steps or step not in (None, *steps):
        what = f"there is no checkpoint of step {step}" if step is not None else "there is no checkpoint yet"
        near = [str(one) for one in sorted(steps, key=lambda one: abs(one - (step or 0)))[:1]]
        there = listing(steps) if steps else "none"
        raise CheckpointError(message(what, where=str(directory.checkpoints), expected=f"one of {there}", near=near))
    state = _read(directory, store, setup, steps[-1] if step is None else step, changed, None)[0]
    spread = spread_of(setup.config)
    return state if spread is None else settle(state, spread)


def _read(
    directory: RunDirectory, store: CheckpointStore, setup: Setup, step: int, changed: str, accumulators: Any
) -> tuple[TrainState, Any, dict[str, Any]]:
    """State and accumulators of a checkpoint (None where these do not fit the template), and its facts."""
    saved = _saved_document(directory, store, step)
    state = _with_guard_of(_arrays(setup.state), saved)
    lines = differences(_below(saved, "state"), _entries(named({"state": state})), "checkpoint")
    if lines:
        raise _misfit(directory, step, lines, changed)
    kept = _below(saved, "accumulators")
    fits = (
        accumulators is not None
        and not _measured_otherwise(changed)
        and not differences(kept, _entries(named({"accumulators": accumulators})), "checkpoint")
    )
    template = accumulators if fits else _shapes(kept).get("accumulators", {})
    try:
        arrays, facts = store.restore(step, {"state": state, "accumulators": template})
    except CheckpointError as error:
        raise _unreadable(directory, store, step, error) from error
    found = _with_guard(arrays["state"], guard_again(setup.config, arrays["state"].guard))
    whole = eqx.combine(found, eqx.filter(setup.state, is_array, inverse=True))
    if facts.get("seed", setup.seed) != setup.seed:  # as for the data order, the seed of the config counts
        key = jax.random.split(jax.random.key(jnp.asarray(setup.seed, jnp.uint32)))[1]
        whole = eqx.tree_at(lambda state: state.key, whole, key)
    # Accumulators of other losses or metrics, or of metrics of something else: the interval begins anew here.
    return whole, arrays["accumulators"] if fits else None, facts


def _arrays(tree: Any) -> Any:
    return eqx.filter(tree, is_array)


def _with_guard(state: TrainState, guard: Any) -> TrainState:
    return eqx.tree_at(lambda one: one.guard, state, guard, is_leaf=lambda part: part is None)


def _with_guard_of(state: TrainState, saved: dict[str, Any]) -> TrainState:
    """A template of a train state whose guard has the leaves that were saved: a run may go on with another guard."""
    entries = {path: entry for path, entry in saved.items() if parse(path)[:2] == ("state", "guard")}
    return _with_guard(state, _shapes(entries)["state"]["guard"] if entries else None)


def _saved_document(directory: RunDirectory, store: CheckpointStore, step: int) -> dict[str, Any]:
    """What checkpoint.json says of each leaf; its fact `seconds` is checked."""
    try:
        seconds = store.read_facts(step).get("seconds")  # checks the format
        if not isinstance(seconds, int | float):
            raise CheckpointError(f"checkpoint.json: the fact 'seconds' is {seconds!r}, not a number")
        leaves = json.loads((directory.checkpoints / str(step) / "checkpoint.json").read_text("utf-8"))["leaves"]
        _shapes(_below(leaves, "accumulators"))  # all paths can be read, and the dtypes that are made from text
    except CheckpointError as error:
        raise _unreadable(directory, store, step, error) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        odd = CheckpointError(f"checkpoint.json: leaves have odd names or dtypes: {error}")
        raise _unreadable(directory, store, step, odd) from error
    return leaves


def _entries(leaves: dict[str, Any]) -> dict[str, Any]:
    return {path: entry_of(leaf) for path, leaf in leaves.items()}


def _below(saved: dict[str, Any], name: str) -> dict[str, Any]:
    return {path: entry for path, entry in saved.items() if parse(path)[0] == name}


def _shapes(saved: dict[str, Any]) -> dict[Any, Any]:
    """Dicts whose leaves have the saved paths: a template for arrays that are to be passed over."""
    return nested({path: jax.ShapeDtypeStruct(tuple(entry["shape"]), entry["dtype"]) for path, entry in saved.items()})


def _misfit(directory: RunDirectory, step: int, lines: list[str], changed: str) -> CheckpointError:
    since = f"; since then:\n{_few(changed)}" if changed else ""
    return CheckpointError(
        message(
            f"the run cannot go on from checkpoint {step}: model or optimizer have another structure now",
            where=str(directory.path),
            got=_few("\n".join(lines).replace(" in the template", " now")),
            expected=f"the structure that its config.json describes{since}",
            fix="train in a new work directory, or take the change back; nothing here was touched",
        )
    )


def _unreadable(directory: RunDirectory, store: CheckpointStore, step: int, error: CheckpointError) -> CheckpointError:
    older = [other for other in store.steps() if other < step and is_whole(directory.checkpoints / str(other))]
    path = directory.checkpoints / str(step)
    fix = (
        f"to go on from step {older[-1]}, remove {path}"
        if older
        else "put it back from a copy, or train in a new work directory"
    )
    got = str(error.__cause__ or error).strip().splitlines()
    return CheckpointError(
        message(f"checkpoint {step} cannot be read", where=str(path), got=got[0][:300] if got else None, fix=fix)
    )


def _few(text: str) -> str:
    lines = text.splitlines()
    more = len(lines) - _MOST_LINES
    return text if more <= 0 else "\n".join([*lines[:_MOST_LINES], f"... and {more} more"])


def _measured_otherwise(changed: str) -> bool:
    """Whether a metric of the same name measures something else than at the earlier start."""
    return any(line.startswith("metrics.") for line in changed.splitlines())


def changes(old_text: str, new: Any, new_text: str) -> str:
    """What differs between the config.json of an earlier start and the trainer, as a table; empty if nothing does.

    Args:
        old_text: the text of config.json.
        new: the trainer.
        new_text: its JSON.
    """
    old_plain, new_plain = json.loads(old_text), json.loads(new_text)
    if old_plain == new_plain:
        return ""
    try:
        old = from_json(old_text)
    except Exception:  # it holds what only the process that wrote it had, or what has gone since: compare the texts
        return str(diff(_frozen(old_plain), _frozen(new_plain)))
    return str(diff(old, new))


def begin(directory: RunDirectory, writers: Sequence[Any], run: Run, environment: dict[str, Any]) -> Writers:
    """Takes a run directory into use: opens the writers and puts the config there. What fails is taken back.

    Args:
        directory: the run directory, locked.
        writers: beside metrics.jsonl.
        run: what they are told.
        environment: facts for environment.json, where the run is new.

    Raises:
        RunDirectoryError: rows that are there are broken; the disk refuses.
        Exception: whatever a writer raises from `open`.
    """
    # Writers of others come first, since they may fail; then ours, of which the last is the only one to drop rows.
    ours = [one for one in writers if isinstance(one, TensorBoard)]
    ordered = [*(one for one in writers if not isinstance(one, TensorBoard)), *ours, JsonLines()]
    check_rows(directory.metrics, run.start_step)
    if not directory.exists:
        directory.create(run.config, environment)
        try:
            return Writers.open(ordered, run)
        except BaseException:
            directory.undo()
            raise
    opened = Writers.open(ordered, run)
    try:
        directory.update_config(run.config, run.start_step)
    except BaseException:
        opened.close()
        raise
    return opened


def tell(directory: RunDirectory, start: int, changed: str, num_steps: int, reason: str | None, *, over: bool) -> None:
    """Say on the standard error where a run goes on, and with which changes of its config.

    Args:
        directory: of the run.
        start: updates made.
        changed: what differs from config.json.
        num_steps: of the trainer.
        reason: why it is over before `num_steps`, if it is.
        over: whether there is nothing left to train.
    """
    if over and reason is not None:
        text = f"{directory.path} has ended at step {start} of {num_steps}: {reason}"
    elif over:
        text = f"{directory.path} is complete at step {start}; to train on, raise num_steps"
    elif start:
        text = f"resuming {directory.path} at step {start} of {num_steps}"
    else:
        text = f"{directory.path} holds no checkpoint: starting at step 0"
        rows = directory.metrics
        if rows.is_file() and rows.stat().st_size:
            text += f"; the rows of the earlier start are kept in {name_for_old(rows).name}"
    sys.stderr.write(text + (f", with a changed config:\n{changed}\n" if changed else "\n"))


def tell_changed(trainer: Any, workdir: Any) -> None:
    """Say on the standard error how a trainer differs from the config.json of a run, if it does."""
    directory = RunDirectory.open(workdir)
    changed = changes(directory.config_text(), trainer, to_json(trainer, unloadable=True))
    if changed:
        sys.stderr.write(f"{directory.path} was trained with another config:\n{changed}\n")


def tell_unloadable(directory: RunDirectory, trainer: Any) -> None:
    """Say on the standard error why `from_json` will refuse this config.json, if so; the config itself trains."""
    try:
        to_json(trainer)
    except ConfigError as error:
        why = _few(str(error))
        sys.stderr.write(f"{directory.config} documents this run, but `from_json` cannot load it:\n{why}\n")


def rows_at(workdir: Path | None, step: int) -> list[Record]:
    """The rows that a run has written at the step where it goes on; none at its beginning, where rows are put aside."""
    path = None if workdir is None else RunDirectory.open(workdir).metrics
    return [] if path is None or not step or not path.exists() else [r for r in read_records(path) if r.step == step]


def results_again(setup: Setup, stepper: Stepper, output: Output, workdir: Path, step: int, signals: Signals) -> None:
    """The results of a run that is at its end already: evals are computed again; only rows that lack are written."""
    rows = {row.split: row for row in rows_at(workdir, step)}
    silent = dataclasses.replace(output, writers=Writers(()))
    interval = stepper.swap()
    if "train" in rows:
        output.history.append(rows["train"])
        output.latest |= {f"train/{name}": value for name, value in rows["train"].metrics.items()}
    elif not _is_empty(interval, Stepper.empty(setup.config, setup.state, setup.spec)):
        output.write(Pending(step, "train", interval, stepper.guard()))
    for one in (one for one in setup.evals if one.settings.due(step, last=True)):
        with signals.interruptible:
            aux = run_eval(one, stepper.borrow()[0])
        (silent if one.name in rows else output).write(Pending(step, one.name, aux))


def _is_empty(interval: Any, empty: Any) -> bool:
    """Whether accumulators hold no step at all."""
    pairs = zip(jax.tree.leaves(_arrays(jax.device_get(interval))), jax.tree.leaves(_arrays(empty)), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def refuse_other_arrays(old_text: str, new_text: str) -> None:
    """Refuse to go on with other arrays in the config, data above all, than those that a run was started with.

    Args:
        old_text: the text of config.json.
        new_text: the trainer's JSON.

    Raises:
        ConfigError: with the paths of the arrays.
    """
    before, after = (dict(_held_arrays(json.loads(text), ())) for text in (old_text, new_text))
    lines = [
        f"{path}{name}: {_spell(was)} before, {_spell(after[path].get(name))} now"
        for path, arrays in before.items()
        if path in after
        for name, was in sorted({**after[path], **arrays}.items())
        if before[path].get(name) != after[path].get(name)
    ]
    if lines:
        raise ConfigError(
            cut(
                "the config holds other arrays than those that this run was started with",
                _few("\n".join(lines)).splitlines(),
                fix="give the same arrays, or train in a new work directory; nothing here was touched",
            )
        )


def _held_arrays(plain: Any, at: tuple[Any, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Path -> specs, of the places in a config's plain form where arrays stood."""
    if isinstance(plain, dict) and "__opaque__" in plain:
        return [(join(at), plain["__opaque__"])]
    parts = items(_frozen(plain)) if isinstance(plain, dict | list) else {}
    return [found for key, part in parts.items() for found in _held_arrays(part, (*at, key))]


def _spell(spec: dict[str, Any] | None) -> str:
    return "nothing" if spec is None else f"{spec['dtype']}{list(spec['shape'])} with hash {spec['hash']}"


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return {key: _frozen(part) for key, part in value.items()} if isinstance(value, dict) else value
