"""Wiring: key paths connect losses, metrics and models to what a step computes.

A field annotated `KeyPath` holds a path such as `"batch.image"` or `"preds.logits"`; when the owner is called, the
arguments that carry the fields' names are filled from the *context*, the namespace of one step:

    step key batch mask model preds interms losses params grads updates opt_state extra config

It is filled in that order of computation: forward, losses, gradients, updates, metrics. An eval has no gradients. All
key paths of an experiment are checked at once under `eval_shape`, before anything is placed or compiled; an error names
the config path that holds the wrong one, what is near it, and what is available at that point.
"""

import builtins
import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Annotated, Any

import jax
import numpy as np

from equikd.config._dataclass import hints as config_hints
from equikd.config._values import is_config
from equikd.errors import WiringError, listing, message, nearest, report
from equikd.tree import Key, Path, PathError, Wildcard, items, join, parse, walk
from equikd.typing import Scope, ShapeError, declared


class _KeyPathMark:
    """Marks `KeyPath` among the annotations of a class."""

    def __repr__(self) -> str:
        return "KeyPath"


KeyPath = Annotated[str, _KeyPathMark()]
"""A field of this type holds a path into the context. `KeyPath | None` may be left unconnected."""


class _Unset:
    """A name of the context that has no value at this point of the step."""

    def __repr__(self) -> str:
        return "(not computed here)"


UNSET: Any = _Unset()


@dataclasses.dataclass(frozen=True)
class Context:
    """What one step has computed so far, by name; every name is `UNSET` until then.

    Attributes:
        step: int32 scalar, the number of updates made before this step.
        key: PRNG key of the step.
        batch: the data of the batch, without its mask.
        mask: bool `b`, which rows of the batch are real.
        model: the model of this step, hyperparameters of the config included.
        preds: what the model returned, batch axis first.
        interms: intermediates that were asked for, by path.
        losses: loss states by name.
        params: the trainable leaves of the model, before the update.
        grads: gradients, as `params`.
        updates: what the optimizer adds to `params`.
        opt_state: the optimizer's state after the update.
        extra: the state's own `extra`.
        config: the part of the trainer that the step uses.
        model_state: the model's `eqx.nn.State` after the forward pass; carried along, no name for key paths.
        totals: the weighted losses of the step; carried along, no name for key paths.
    """

    step: Any = UNSET
    key: Any = UNSET
    batch: Any = UNSET
    mask: Any = UNSET
    model: Any = UNSET
    preds: Any = UNSET
    interms: Any = UNSET
    losses: Any = UNSET
    params: Any = UNSET
    grads: Any = UNSET
    updates: Any = UNSET
    opt_state: Any = UNSET
    extra: Any = UNSET
    config: Any = UNSET
    model_state: Any = None
    totals: Any = None

    def replace(self, **values: Any) -> "Context":
        """A context with more names filled."""
        return dataclasses.replace(self, **values)

    def tree_items(self) -> dict[str, Any]:
        """The names that are filled."""
        named = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in named.items() if value is not UNSET}


NAMES = tuple(f.name for f in dataclasses.fields(Context) if f.default is UNSET)


@contextlib.contextmanager
def shared_axes(context: Any, function: Any, *, rows: bool = True) -> Iterator[None]:
    """The scope of axis names of a step: `b`, the rows of its batch, and what a typed batch declares.

    The model's call, losses and metrics share these names, since key paths connect them; what they call in turn has
    names of its own, so that the layers of a net may reuse letters.

    Args:
        context: what the step has computed so far.
        function: what is called inside.
        rows: whether it sees the batch axis; a model that is mapped over it, and a penalty, do not.

    Raises:
        WiringError: the batch does not fit its own annotations.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.typing import Array, Float, dim, typechecked
        >>> @typechecked
        ... def loss(x: Float[Array, " d"]):
        ...     return dim("b")
        >>> with shared_axes(Context(batch={"x": jnp.ones((4, 2))}, mask=jnp.ones(4, bool)), loss):
        ...     loss(jnp.ones(2))
        4
    """
    batch, mask = getattr(context, "batch", UNSET), getattr(context, "mask", UNSET)
    try:
        sizes = {} if batch is UNSET else declared(batch, "batch")
    except ShapeError as error:
        raise WiringError(f"the batch does not fit its own annotations: {error}") from None
    binders = dict.fromkeys(sizes, "the annotations of the batch")
    if mask is not UNSET and mask is not None:
        sizes, binders = {**sizes, "b": mask.shape[0]}, {**binders, "b": "the rows of the batch"}
    if not rows:
        sizes.pop("b", None)
    with Scope(of=function, sizes=sizes) as scope:
        scope.binders |= {name: binders[name] for name in sizes}
        yield


_PLACE: ContextVar[str | None] = ContextVar("equikd_place", default=None)


@contextlib.contextmanager
def standing_at(path: str) -> Iterator[None]:
    """Inside, messages name an owner of key paths by its config path."""
    token = _PLACE.set(path)
    try:
        yield
    finally:
        _PLACE.reset(token)


def place_of(owner: Any) -> str:
    """The config path at which an owner of key paths stands, where it is known, else its class."""
    return _PLACE.get() or type(owner).__qualname__


def lookup(context: Any, path: str) -> Any:
    """What a key path names in a context.

    Args:
        context: a `Context`, or any tree.
        path: items, attributes, indices and slices: `"batch.image[..., :3]"`.

    Returns:
        The value; indices and slices are applied to arrays.

    Raises:
        WiringError: the path is misspelt or leads nowhere, with near matches and what is available.

    Example:
        >>> lookup(Context(batch={"image": "pixels"}), "batch.image")
        'pixels'
    """
    try:
        keys = parse(path)
    except PathError as error:
        raise WiringError(str(error)) from None
    if not keys:
        raise WiringError(
            message(
                "a key path is empty", got=repr(path), expected=f"a path below one of {listing(items(context), 20)}"
            )
        )
    value = context
    for depth, key in enumerate(keys):
        value = _step(context, value, key, keys, depth, path)
    return value


def _step(context: Any, value: Any, key: Key, keys: Path, depth: int, path: str) -> Any:
    if isinstance(key, Wildcard):
        raise WiringError(
            message(f"{path!r}: a key path names one value", got=repr(key.pattern), expected="a path, no pattern")
        )
    if isinstance(key, str):
        parts = items(value)
        attribute = _attribute(value, key)
        if key in parts:
            if attribute is not UNSET and attribute is not parts[key] and isinstance(value, Mapping):
                raise _ambiguous(path, keys, depth, type(value))
            return parts[key]
        if attribute is not UNSET:
            return attribute
    elif isinstance(value, Mapping):
        if isinstance(key, int) and key in value:
            return value[key]
    else:
        try:
            if _is_array(value):  # jax clamps an index out of bounds; numpy says so, and this one takes no memory
                np.broadcast_to(np.False_, value.shape)[key]
            return value[key]
        except (TypeError, IndexError, KeyError, ValueError):
            pass
    raise _nowhere(context, value, keys, depth, path)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _attribute(value: Any, name: str) -> Any:
    """An attribute that is a part of the value: none of an array, no private one, and no method of a container."""
    containers = (dict, tuple, list) if isinstance(value, Mapping | tuple | list) else ()
    private = name.startswith("_") or isinstance(value, Context | str)
    if private or _is_array(value) or any(hasattr(kind, name) for kind in containers):
        return UNSET
    return getattr(value, name, UNSET)


def _ambiguous(path: str, keys: Path, depth: int, cls: type) -> WiringError:
    key = keys[depth]
    return WiringError(
        message(
            f"{path!r} names two values: {join(keys[:depth]) or 'the context'} has an item and an attribute {key!r}",
            got=f"a {cls.__qualname__}",
            fix="rename one of them; a key path does not choose",
        )
    )


def _nowhere(context: Any, value: Any, keys: Path, depth: int, path: str) -> WiringError:
    first = keys[0]
    if depth == 0 and first in NAMES:
        return WiringError(
            message(
                f"{path!r}: {first!r} is not computed at this point of the step",
                expected=f"a path below one of {listing(items(context), 20)}",
                fix="gradients, updates and opt_state exist only in metrics of the training step",
            )
        )
    where = join(keys[:depth]) or "the context"
    every = available(context)
    parts = items(value)
    shape = f"{value.dtype}{list(value.shape)}" if _is_array(value) else None
    there = listing(parts) if parts else shape or f"a {type(value).__name__} without parts"
    return WiringError(
        message(
            f"{path!r} leads nowhere: there is no {join(keys[depth : depth + 1])!r} in {where}",
            near=() if _is_array(value) else nearest(path, every) or nearest(str(keys[depth]), map(str, parts)),
            expected=f"in {where}: {there}",
        )
    )


def available(context: Any, limit: int = 2000) -> list[str]:
    """Paths of what a context holds, arrays and containers alike, at most `limit`."""
    found: list[str] = []
    for at, value in walk(context):
        if at and (items(value) or _is_array(value)):
            found.append(join(at))
        if len(found) >= limit:
            break
    return found


@functools.lru_cache(maxsize=1024)
def key_path_fields(cls: type) -> tuple[str, ...]:
    """Names of the fields of a config class or module class that are annotated `KeyPath` (or `KeyPath | None`)."""
    found = config_hints(cls) if "__equikd_config__" in cls.__dict__ else _module_hints(cls)
    return tuple(name for name, annotation in found.items() if _is_key_path(annotation))


def _module_hints(cls: type) -> dict[str, Any]:
    """Annotations one by one, so that one that only a type checker can evaluate hides no key path."""
    found = {}
    for base in reversed(cls.__mro__):
        space = vars(sys.modules.get(base.__module__, builtins))
        for name, annotation in inspect.get_annotations(base).items():
            holder = types.SimpleNamespace(__annotations__={name: annotation})
            try:
                found |= typing.get_type_hints(holder, space, include_extras=True)
            except Exception:  # any exception may come out of an annotation
                found[name] = None
    return found


def _is_key_path(annotation: Any) -> bool:
    if typing.get_origin(annotation) is Annotated:
        return any(isinstance(mark, _KeyPathMark) for mark in annotation.__metadata__)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(map(_is_key_path, typing.get_args(annotation)))
    return False


def key_paths(owner: Any) -> dict[str, str]:
    """Field -> key path of an object; fields that hold `None` are left out.

    Example:
        >>> from equikd.config import config
        >>> @config
        ... class Error:
        ...     preds: KeyPath
        ...     mask: KeyPath | None = None
        >>> key_paths(Error("preds.logits"))
        {'preds': 'preds.logits'}
    """
    named = {name: getattr(owner, name) for name in key_path_fields(type(owner))}
    return {name: path for name, path in named.items() if path is not None}


@functools.lru_cache(maxsize=1024)
def arguments_of(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All and required argument names of a function, `self` left out."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return tuple(p.name for p in named), tuple(p.name for p in named if p.default is inspect.Parameter.empty)


def fill(owner: Any, function: Callable[..., Any], context: Context) -> dict[str, Any]:
    """The arguments of `function` that are named as key path fields of `owner`, looked up in the context.

    Args:
        owner: a config with `KeyPath` fields.
        function: its method, unbound.
        context: what the step has computed so far.

    Raises:
        WiringError: all key paths that lead nowhere, and required arguments that no field fills, at once.
    """
    names, required = arguments_of(function)
    paths = {name: path for name, path in key_paths(owner).items() if name in names}
    values, errors = {}, []
    for name, path in paths.items():
        try:
            values[name] = lookup(context, path)
        except WiringError as error:
            errors.append((name, str(error)))
    unfilled = [name for name in required if name not in paths]
    if errors or unfilled:
        raise Unwired(owner, errors, unfilled)
    return values


class Unwired(WiringError):
    """Key paths of one owner that cannot be followed; the trainer's check adds where the owner stands."""

    def __init__(self, owner: Any, errors: list[tuple[str, str]], unfilled: list[str]) -> None:
        self.owner, self.errors, self.unfilled = owner, errors, unfilled
        super().__init__(report("key paths lead nowhere", self.lines(type(owner).__qualname__)))

    def lines(self, where: str) -> list[str]:
        """One message for each wrong key path, the owner standing at `where`."""
        lines = []
        for name, text in self.errors:
            path = key_paths(self.owner).get(name)
            lines.append(f"{where}.{name} = {path!r}" + text.removeprefix(repr(path)) if path else f"{where}: {text}")
        fields = listing(key_path_fields(type(self.owner))) or "none"
        lines += [
            message(
                f"{where}: nothing fills the argument {name!r} of {type(self.owner).__qualname__}",
                got=f"key path fields: {fields}",
                fix=f"connect it: a field `{name}: ek.KeyPath` that is not None",
            )
            for name in self.unfilled
        ]
        return lines


__all__ = ["NAMES", "UNSET", "Context", "KeyPath", "Unwired", "available", "fill", "is_config", "key_paths", "lookup"]
