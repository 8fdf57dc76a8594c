"""Weights of a source, matched with the arrays of a model by path; and a model filled with them.

Matching reads documents only: the paths of the source are renamed, what `include` and `exclude` leave out plays no
part, and the rest must fit to the last path. What does not is one error that lists all of it. `Weights.read` reads the
arrays that were matched, and nothing else; `Values.fill` puts them in their places.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import CheckpointError, listing, message, nearest, report
from equikd.train._leaves import SHOWN, Entry, cut, entry_of, is_key, named, spell
from equikd.train._rename import near_paths, renamed
from equikd.train._source import Source, state_leaves
from equikd.train._state import TrainState
from equikd.tree import join, matches, parse

_KINDS = (jnp.floating, jnp.integer, jnp.complexfloating)


@dataclasses.dataclass(frozen=True)
class Taken:
    """What of a source a model starts from; printed as one line.

    Attributes:
        source: what the weights are read from: `"checkpoint 200 of runs/a"`.
        taken: path in this model -> path in the source.
        missing: paths of this model that the source does not have; they are initialised as ever.
        unused: paths of the source that this model does not have.
        excluded: paths of this model that `include` and `exclude` leave out.
        cast: paths of this model whose dtype the source does not have.
        stateless: this model has an `eqx.nn.State`, and the source holds none.
    """

    source: str
    taken: dict[str, str]
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    stateless: bool = False

    def __str__(self) -> str:
        whole = len(self.taken) + len(self.missing) + len(self.excluded)
        groups = (
            ("not in it", self.missing),
            ("left out", self.excluded),
            ("not in this model", self.unused),
            ("cast", self.cast),
        )
        parts = [f"{len(self.taken)} of {whole} arrays from {self.source}"]
        parts += [f"{what}: {listing(paths, 6)}" for what, paths in groups if paths]
        return "; ".join([*parts, *(["it holds no eqx.nn.State"] if self.stateless else [])])


@dataclasses.dataclass(frozen=True)
class Places:
    """What of a model can be filled.

    Attributes:
        arrays: path -> the shape and dtype of an array of the model, or of a value of its state.
        states: those of them that are values of its state.
        given: paths of the model's leaves that come from the config.
    """

    arrays: dict[str, Any]
    states: frozenset[str]
    given: frozenset[str]

    @classmethod
    def of(cls, state: TrainState) -> "Places":
        """Those of a train state, which may be one of shapes."""
        leaves = named(state.model)
        hyper = {at for at, yes in zip(leaves, state.hyperparameter, strict=True) if yes}
        given = hyper | {at for at, leaf in leaves.items() if not hasattr(leaf, "dtype")}
        states = state_leaves(state.model, state.model_state)
        arrays = {at: leaf for at, leaf in leaves.items() if at not in given}
        return cls(arrays | states, frozenset(states), frozenset(given))


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights that fit a model; their arrays are not read yet.

    Attributes:
        taken: what is taken.
        source: where it is read from.
        places: what they were matched with.
        again: the same for the source as it is now, where a run at work has removed the checkpoint since.
    """

    taken: Taken
    source: Source
    places: Places
    again: Callable[[], "Weights"]

    def read(self) -> "Values":
        """The arrays of these weights.

        Raises:
            CheckpointError: the files are damaged, or values do not fit their new dtype.
        """
        weights, arrays = _arrays(self)
        return Values(weights.taken, _in_dtypes(weights, arrays))


@dataclasses.dataclass(frozen=True)
class Values:
    """Weights that were read.

    Attributes:
        taken: what was taken: of a run at work, perhaps from a later checkpoint than the one that was matched.
        arrays: path in this model -> array on the host, in the dtype of this model.
    """

    taken: Taken
    arrays: dict[str, Any]

    def fill(self, model: Any, model_state: Any) -> tuple[Any, Any]:
        """A model with these weights, all else its own.

        Args:
            model: of the structure that they were matched with; its arrays are JAX arrays.
            model_state: its `eqx.nn.State`, or None.

        Returns:
            `(model, model_state)`: each array in the dtype and, where it was committed, the sharding of the one before.
        """

        def filled(tree: Any, leaves: Mapping[str, Any]) -> Any:
            new = [_placed(self.arrays[at], leaf) if at in self.arrays else leaf for at, leaf in leaves.items()]
            return jax.tree.unflatten(jax.tree.structure(tree), new)

        return filled(model, named(model)), filled(model_state, state_leaves(model, model_state))


def match(source: Source, places: Places, settings: Any) -> Taken:
    """What of a source goes where.

    Args:
        source: where weights could come from.
        places: where they could go.
        settings: an `InitFrom`.

    Raises:
        CheckpointError: patterns without a match; paths that do not fit, all at once.
    """
    names = renamed(source.leaves, settings.rename, source.label)
    _refuse_unmatched(settings, {*names.values(), *places.arrays}, source)
    stateless = bool(places.states) and not source.states
    pair = _Pair(source, _wanted(places, settings, stateless), _offered(source, names, places, settings))
    _refuse_unfit(pair, places, settings)
    if not pair.taken:
        got, expected = (listing(sorted(paths), 6) or "nothing" for paths in (names.values(), places.arrays))
        what, fix = f"{source.label} has nothing for this model", 'rename={"old.**": "new.**"}, or another include'
        raise CheckpointError(message(what, where=str(source.path), got=got, expected=expected, fix=fix))
    unused = tuple(pair.offered[at] for at in pair.unused)
    excluded = tuple(at for at in places.arrays if not settings.takes(at))
    cast = tuple(pair.other("dtype"))
    return Taken(source.label, pair.taken, tuple(pair.missing), unused, excluded, cast, stateless)


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The two sides of a match.

    Attributes:
        source: where weights could come from.
        wanted: path in this model -> its shape and dtype; without what is left out.
        offered: path in this model -> path in the source, for all that the source has.
    """

    source: Source
    wanted: dict[str, Entry]
    offered: dict[str, str]

    @property
    def taken(self) -> dict[str, str]:
        """What is on both sides."""
        return {at: self.offered[at] for at in self.wanted if at in self.offered}

    @property
    def missing(self) -> list[str]:
        """What the source does not have."""
        return [at for at in self.wanted if at not in self.offered]

    @property
    def unused(self) -> list[str]:
        """What this model does not have."""
        return [at for at in self.offered if at not in self.wanted]

    def other(self, what: str) -> list[str]:
        """Paths whose "shape" or "dtype" is another in the source."""
        return [at for at, old in self.taken.items() if self.source.leaves[old][what] != self.wanted[at][what]]

    def can_cast(self, at: str) -> bool:
        """Whether the dtype of the source can become that of this model."""
        return _can_cast(self.source.leaves[self.offered[at]]["dtype"], self.wanted[at]["dtype"])


def _wanted(places: Places, settings: Any, stateless: bool) -> dict[str, Entry]:
    """Path -> shape and dtype of what is to be filled; of a source without state, no state."""
    left = places.states if stateless else frozenset[str]()
    return {at: entry_of(leaf) for at, leaf in places.arrays.items() if settings.takes(at) and at not in left}


def _offered(source: Source, names: Mapping[str, str], places: Places, settings: Any) -> dict[str, str]:
    """Path in this model -> path in the source; `names` is the other way round.

    A hyperparameter is the config's. A checkpoint says which numbers are, a saved model does not: what is one here, and
    a number there, is none of its weights.
    """

    def is_given(old: str) -> bool:
        is_number = source.kind == "saved model" and not source.leaves[old]["shape"]
        return is_number and names[old] in places.given

    return {new: old for old, new in names.items() if settings.takes(new) and not is_given(old)}


def _refuse_unfit(pair: _Pair, places: Places, settings: Any) -> None:
    """Refuse all that is on one side only, and other shapes and dtypes, as far as the settings do not allow it."""
    shapes = pair.other("shape")
    dtypes = [at for at in pair.other("dtype") if not (settings.cast and pair.can_cast(at))]
    apart = [] if settings.partial else [*pair.missing, *pair.unused]
    wrong = sorted({*shapes, *dtypes, *apart})
    if not wrong:
        return
    differ = "paths differ" if len(wrong) > 1 else "path differs"
    lines = [_line(at, pair, near=number < SHOWN) for number, at in enumerate(wrong)]
    config = dict.fromkeys(places.given, ", whose config gives a number there")
    lines = [line + config.get(at, "") for at, line in zip(wrong, lines, strict=True)]
    what = f"{pair.source.label} does not fit this model: {len(wrong)} {differ}"
    fix = _fixes(shapes, dtypes=bool(dtypes) and not settings.cast, apart=bool(apart))
    raise CheckpointError(cut(what, lines, where=str(pair.source.path), fix=fix))


def _refuse_unmatched(settings: Any, paths: Collection[str], source: Source) -> None:
    """Refuse patterns of `include` and `exclude` that match nothing on either side."""
    problems = [
        message(
            f"{name}: {glob!r} matches no path of this model or of {source.label}",
            near=near_paths(glob, sorted(paths)),
            expected=listing(sorted(paths), 6),
        )
        for name, globs in settings.globs().items()
        for glob in globs
        if not any(matches(glob, path) for path in paths)
    ]
    if problems:
        raise CheckpointError(report(f"{len(problems)} patterns match nothing", problems))


def _line(at: str, pair: _Pair, near: bool) -> str:
    """What is wrong at one path of this model; `near`: with a path of the source that it may be."""
    wanted, offered, source = pair.wanted, pair.offered, pair.source
    ours = spell(wanted[at]) if at in wanted else None
    if at not in offered:
        alike = [new for new in pair.unused if spell(source.leaves[offered[new]]) == ours]
        hints = [f" (near: {one})" for one in nearest(at, alike, 1)] if near else []
        return "".join([f"{at}: not in the {source.kind}, {ours} in this model", *hints])
    theirs = source.leaves[offered[at]]
    name = at if offered[at] == at else f"{at} ({offered[at]} there)"
    if ours is None:
        return f"{name}: {spell(theirs)} in the {source.kind}, not in this model"
    line = f"{name}: {spell(theirs)} in the {source.kind}, {ours} in this model"
    odd = theirs["shape"] == wanted[at]["shape"] and not pair.can_cast(at)
    return f"{line}, which cannot be cast" if odd else line


def _fixes(shapes: list[str], *, dtypes: bool, apart: bool) -> str | None:
    fixes = []
    if apart:
        fixes.append('rename={"old.**": "new.**"} if it has another name; partial=True if it may be missing')
    if shapes:
        above = ((at, join(parse(at)[:-1])) for at in shapes)
        globs = list(dict.fromkeys(f"{parent}.**" if parent else at for at, parent in above))
        like = ", and the like," if len(globs) > 1 else ""
        fixes.append(f'exclude="{globs[0]}"{like} to keep what this model has')
    if dtypes:
        fixes.append("cast=True to convert dtypes")
    return "\n".join(fixes) or None


def _can_cast(old: str, new: str) -> bool:
    """Whether both dtypes are floats, or ints, or complex numbers."""
    try:
        return any(jnp.issubdtype(np.dtype(old), kind) and jnp.issubdtype(np.dtype(new), kind) for kind in _KINDS)
    except TypeError:  # a PRNG key, or a dtype that nothing here knows
        return False


def _in_dtypes(weights: Weights, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Path in this model -> array in the dtype of this model; `arrays` have the paths of the source."""
    problems, values, cast = [], {}, frozenset(weights.taken.cast)
    for at, old in weights.taken.taken.items():
        values[at] = arrays[old]
        if at in cast:
            values[at] = _converted(arrays[old], weights.places.arrays[at].dtype)
            if not _fits(arrays[old], values[at]):
                problems.append(f"{at}: {arrays[old].dtype} there, {values[at].dtype} in this model")
    if problems:
        what = f"init_from: values of {weights.taken.source} do not fit the dtypes of this model"
        raise CheckpointError(cut(what, problems, where=str(weights.source.path), fix="give the model a wider dtype"))
    return values


def _arrays(weights: Weights) -> tuple[Weights, dict[str, Any]]:
    """Weights, and path in their source -> array as it was saved."""
    for left in (2, 1, 0):
        try:
            return weights, weights.source.read(weights.taken.taken.values())
        except CheckpointError as error:
            if weights.source.file.exists() or not left:
                raise CheckpointError(f"init_from: {error}") from error
        weights = weights.again()
    raise CheckpointError(f"init_from: {weights.taken.source} changes faster than it can be read")


def _converted(array: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)


def _fits(old: np.ndarray, new: np.ndarray) -> bool:
    """Whether no value was lost: rounding is meant, an overflow is not."""
    if not old.size:
        return True
    if jnp.issubdtype(new.dtype, jnp.integer):
        bounds = jnp.iinfo(new.dtype)
        return bounds.min <= int(old.min()) and int(old.max()) <= bounds.max
    return bool(np.all(np.isfinite(new) | ~np.isfinite(old)))


def _placed(value: Any, like: Any) -> Any:
    """An array as a JAX array, with the sharding of the one that it replaces."""
    value = value if is_key(value) else jnp.asarray(value)
    return jax.device_put(value, like.sharding) if like.committed else value
