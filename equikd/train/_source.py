"""What weights can be read from: a run, one of its checkpoints, or a saved model.

All three hold arrays by name. Here they are given the names that they have in the model: `layers[0].weight`, and below
the place of its `eqx.nn.StateIndex` a value of the model's state: `norm.batch_state_index[0]`. What a source holds is
known from its document alone (checkpoint.json, model.json); its arrays are read by name, and nothing else in it is:
no class is imported, no function called. It is only read, and may be a run at work.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from equikd.errors import CheckpointError, listing, message, nearest
from equikd.train._checkpoint import read_arrays
from equikd.train._checkpoint_files import DOCUMENT, UNFINISHED, broken, check_files, read_document, steps_in
from equikd.train._leaves import Entry
from equikd.train._saved_model import DOCUMENT as MODEL
from equikd.train._saved_model import broken_model, contents, held_in
from equikd.tree import Path as Keys
from equikd.tree import join, keys_of, parse

_KINDS = "a run directory, one checkpoint of it (runs/a/checkpoints/200), or a saved model"
_STATE = "model_state"


@dataclasses.dataclass(frozen=True)
class Source:
    """A place that weights can be read from.

    Attributes:
        kind: `"checkpoint"` or `"saved model"`.
        label: what to call it: `"checkpoint 200 of runs/a"`.
        path: its directory.
        leaves: path in the model -> dtype and shape.
        states: those of them that are values of an `eqx.nn.State`.
        file: is gone when the source has been replaced.
        read: the arrays of some paths, on the host.
    """

    kind: str
    label: str
    path: Path
    leaves: dict[str, Entry]
    states: frozenset[str]
    file: Path
    read: Callable[[Collection[str]], dict[str, Any]]


def open_source(place: str | Path, step: int | None = None) -> Source:
    """What stands at a path; its documents are read, its arrays are not.

    Args:
        place: a run directory, one checkpoint of it, or a saved model.
        step: of a run: which checkpoint; None: the newest.

    Raises:
        CheckpointError: there is nothing of the kind, or it is damaged or of another format.
    """
    text = str(place)
    if "://" in text:
        what, fix = f"{text}: weights are read from a local directory", "copy it, and give the path of the copy"
        raise CheckpointError(message(what, expected=_KINDS, fix=fix))
    try:
        return _opened(Path(text).expanduser().absolute(), text.rstrip("/") or text, step)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no such user's home
        raise CheckpointError(message(f"{text} cannot be read", got=str(error), expected=_KINDS)) from error


def _opened(path: Path, text: str, step: int | None) -> Source:
    kind = "saved model" if (path / MODEL).is_file() else "checkpoint" if (path / DOCUMENT).is_file() else None
    if path.name.endswith(UNFINISHED):
        what, fix = f"{text} is a checkpoint that was never finished", f"give the run: {path.parent.parent}"
        raise CheckpointError(message(what, where=str(path), expected=_KINDS, fix=fix))
    if kind is not None and step is not None:
        what = f"{text} is one {kind}, which has no steps"
        raise CheckpointError(message(what, where=str(path), got=f"step={step}", fix="leave step out, or give the run"))
    if kind is not None:
        return (_saved_model if kind == "saved model" else _checkpoint)(path, f"the {kind} {text}")
    if not _is_run(path):
        raise _something_else(path, text)
    for _ in range(3):
        newest = _step_of(path, text, step)
        try:
            return _checkpoint(path / "checkpoints" / str(newest), f"checkpoint {newest} of {text}")
        except CheckpointError:  # a run at work may have removed it since
            if step is not None or newest in steps_in(path / "checkpoints"):
                raise
    raise CheckpointError(message(f"{text}: its checkpoints change faster than they can be read", where=str(path)))


def _is_run(path: Path) -> bool:
    """Whether a trainer has been at work here."""
    if (path / "checkpoints").is_dir():
        return True
    try:
        plain = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(plain, dict) and {"__qualname__", "num_steps"} <= plain.keys()


def _step_of(path: Path, text: str, step: int | None) -> int:
    steps = steps_in(path / "checkpoints")
    if steps and step in (None, *steps):
        return steps[-1] if step is None else step
    what = f"{text} holds no checkpoint" + (" yet" if step is None else f" of step {step}")
    near = [str(one) for one in sorted(steps, key=lambda one: abs(one - (step or 0)))[:1]]
    expected = f"one of {listing(steps)}" if steps else None
    folder = path / "checkpoints"
    got = None if steps else contents(folder)
    raise CheckpointError(message(what, where=str(folder), got=got, expected=expected, near=near))


def _something_else(path: Path, text: str) -> CheckpointError:
    what = f"{text} holds no weights" if path.exists() else f"there is nothing at {text}"
    fix = "give a live model to start from other weights: trainer.train(model=my_model)" if path.exists() else None
    above = [one for one in path.parents[:2] if (one / MODEL).is_file() or (one / DOCUMENT).is_file() or _is_run(one)]
    if path.exists() and above:
        fix = f"give {above[0]}"
    near: tuple[str, ...] = ()
    if path.is_dir():
        inside = [str(Path(text) / one.name) for one in path.iterdir() if one.is_dir() and _is_run(one)]
        near = tuple(sorted(inside)[:3])
    elif path.parent.is_dir() and not path.exists():
        near = nearest(text, [str(Path(text).parent / one.name) for one in path.parent.iterdir()])
    fix = None if near else fix
    got = contents(path) if path.exists() else None
    return CheckpointError(message(what, where=str(path), got=got, expected=_KINDS, near=near, fix=fix))


def _checkpoint(path: Path, label: str) -> Source:
    document = read_document(path)
    check_files(path, document)
    try:
        facts = document["facts"].get("model", {})
        names = _paths_in_checkpoint(document["leaves"], facts.get("states", []))
        given = {*facts.get("hyperparameters", [])}
        names = {name: at for name, at in names.items() if at not in given}
    except Exception as error:  # whatever odd values in the document raise
        raise broken(path, path / DOCUMENT, error) from error
    if not names:
        what = f"{label} holds no model"
        got = listing(document["leaves"], 4) or "no arrays"
        raise CheckpointError(message(what, where=str(path), got=got, expected="a checkpoint of a trainer"))
    states = frozenset(at for name, at in names.items() if parse(name)[1] == _STATE)
    by_path = {at: name for name, at in names.items()}

    def read(paths: Collection[str]) -> dict[str, Any]:
        arrays = read_arrays(path, document, {by_path[at] for at in paths})
        return {at: arrays[by_path[at]] for at in paths}

    leaves = {at: document["leaves"][name] for name, at in names.items()}
    return Source("checkpoint", label, path, leaves, states, path / DOCUMENT, read)


def _paths_in_checkpoint(names: Collection[str], states: list[str]) -> dict[str, str]:
    """Name in a checkpoint -> path in the model, of all that belongs to the model and its state.

    What an optimizer keeps (averaged parameters, say) lies under `state.opt_state`, and would be named here too.
    """
    found = {}
    for name in names:
        keys = parse(name)
        if keys[:2] == ("state", "model"):
            found[name] = join(keys[2:])
        elif keys[:2] == ("state", _STATE):
            place = parse(states[keys[2]]) if states else keys[1:3]
            found[name] = join((*place, *keys[3:]))
    return found


def _saved_model(path: Path, label: str) -> Source:
    held = held_in(path)
    names: dict[str, str] = {}
    states = set()
    try:
        stateful, indices = _places(held.structure)
        for name in held.entries:
            at, is_state = _path_in_saved(parse(name), stateful, held.structure, indices)
            names[join(at)] = name
            states |= {join(at)} if is_state else set()
    except Exception as error:  # whatever odd values in the document raise
        raise broken_model(path, error) from error

    def read(paths: Collection[str]) -> dict[str, Any]:
        arrays = held.read([names[at] for at in paths])
        return {at: arrays[names[at]] for at in paths}

    leaves = {at: held.entries[name] for at, name in names.items()}
    return Source("saved model", label, path, leaves, frozenset(states), held.file, read)


def _places(structure: Any) -> tuple[bool, dict[Keys, Any]]:
    """Whether a saved model is `(model, state)`; and the marks of its state's places, by path in the model."""
    pair: Any = structure.get("tuple", ()) if isinstance(structure, dict) else ()
    stateful = len(pair) == 2 and isinstance(pair[1], dict) and "state" in pair[1]
    return stateful, dict(_indices(pair[0] if stateful else structure, ()))


def _indices(plain: Any, at: Keys) -> Iterator[tuple[Keys, Any]]:
    """The `eqx.nn.StateIndex`es in the plain form of a model (see `_structure.py`), by path."""
    if isinstance(plain, dict) and "state_index" in plain:
        yield at, plain["state_index"]
        return
    parts: list[tuple[Any, Any]] = list(enumerate(plain)) if isinstance(plain, list) else []
    if isinstance(plain, dict):
        parts += enumerate(plain.get("tuple", ()))
        parts += [pair for mark in ("dict", "ordered", "frozen") for pair in plain.get(mark, ())]
        parts += plain.get("fields", {}).items()
    for key, part in parts:
        yield from _indices(part, (*at, key if isinstance(key, str | int) else str(key)))


def _path_in_saved(keys: Keys, stateful: bool, structure: Any, indices: dict[Keys, Any]) -> tuple[Keys, bool]:
    """Where an array of a saved model stands in the model, and whether it is a value of its state."""
    if stateful and keys[0] == 1:
        marker = structure["tuple"][1]["state"][keys[1]][0]
        places = (at for at, mark in indices.items() if mark == marker)
        return (*next(places, (_STATE, keys[1])), *keys[2:]), True
    keys = keys[1:] if stateful else keys
    for end in range(len(keys)):
        if keys[end] == "init" and keys[:end] in indices:  # the first values of a state, still in the model
            return (*keys[:end], *keys[end + 1 :]), True
    return keys, False


def state_leaves(model: Any, model_state: Any) -> dict[str, Any]:
    """The values of a model's `eqx.nn.State` by path, in the order of `jax.tree.leaves(model_state)`.

    Args:
        model: a model whose initial state has been taken out.
        model_state: its state, or None.

    Example:
        >>> model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")
        >>> [path for path in state_leaves(model, state)]
        ['ema_first_time_index', 'ema_state_index[0]', 'ema_state_index[1]']
    """
    if model_state is None:
        return {}
    values, _ = model_state.tree_flatten()
    return {
        join((*place, *keys_of(at))): leaf
        for place, value in zip(_state_places(model, model_state), values, strict=True)
        for at, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
    }


def _state_places(model: Any, model_state: Any) -> list[Keys]:
    """Where in a model each value of its state belongs, in the order of the state."""
    is_index = lambda part: isinstance(part, eqx.nn.StateIndex)
    places: dict[Any, Keys] = {}
    for at, part in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_index)[0]:
        if is_index(part):
            places.setdefault(part.marker, keys_of(at))
    _, markers = model_state.tree_flatten()
    return [places.get(marker, (_STATE, number)) for number, marker in enumerate(markers)]


def model_facts(state: Any) -> dict[str, list[str]]:
    """What a checkpoint must say of a train state's model besides its arrays, so that others can start from it.

    Args:
        state: a train state.

    Returns:
        As JSON: `states`, where each value of its `eqx.nn.State` belongs; `hyperparameters`, the paths of the floats
        that are in the model's leaves, and are the config's.
    """
    places = [] if state.model_state is None else _state_places(state.model, state.model_state)
    paths = jax.tree_util.tree_flatten_with_path(state.model)[0] if any(state.hyperparameter) else []
    hyper = [join(keys_of(at)) for (at, _), yes in zip(paths, state.hyperparameter, strict=False) if yes]
    return {"states": [join(place) for place in places], "hyperparameters": hyper}
