"""Flattening configs and nodes: floats into arrays, static values into the hashable half.

All floats of one instance go to the device in one transfer, as strong 0-d arrays of JAX's default float: strong at the
jit border, so that no program is compiled twice for a weak and a strong scalar. Whatever else stands in a leaf position
(a tracer, `None`, an axis number, `object()`) passes through untouched.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from equikd._compat import CONFIG, Tracer
from equikd.config._roles import Plan, choose
from equikd.config._values import FrozenDict, Identity, Static, as_leaf, is_part
from equikd.errors import ConfigError


class Aux:
    """The static half of a flattened config or node, compared by type and value."""

    __slots__ = ("_hash", "children", "key", "order", "statics")

    def __init__(self, order: tuple[Any, ...], children: tuple[Any, ...], statics: Any, extra: Any = None) -> None:
        self.order, self.children, self.statics = order, children, statics
        self.key = (children, statics, extra)
        self._hash = hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Aux and self.key == other.key)

    def position(self, key: Any) -> int:
        """Where a key stood among the values as they were written."""
        return self.order.index(key)

    def __repr__(self) -> str:
        return ", ".join(f"{name}={static!r}" for name, static in self.statics)


Kept = tuple[bool | None, tuple[tuple[Any, ...], Aux], tuple[Any, ...]]
"""A flatten that is kept: x64 at its time (None: a tree operation gave it, and it stays), result, arrays made.

It is good as long as x64 is what it was, and nobody has donated the arrays, which deletes them:

    x64 is None or (x64 is jax.config.jax_enable_x64 and not (arrays and any(map(type(arrays[0]).is_deleted, arrays))))

Configs and nodes ask this at each flatten, in place: a call of a function for it would cost half as much again.
"""


def flatten_values(named: Mapping[Any, tuple[Plan, Any]], extra: Any = None) -> Kept:
    """Children and static half of named values, to be kept; all their floats become arrays in one transfer."""
    pending: list[np.ndarray] = []
    for key, (plan, value) in named.items():
        try:
            to_child(plan, value, pending.append)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
    if pending:
        with jax.ensure_compile_time_eval():  # so that a flatten inside a trace caches no tracer
            pending = jax.device_put(pending)
    wrapped = iter(pending)
    made = {key: to_child(plan, value, lambda _: next(wrapped)) for key, (plan, value) in named.items()}
    dynamic = tuple(key for key, child in made.items() if type(child) is not Static)
    statics = tuple((key, child) for key, child in made.items() if type(child) is Static)
    flat = tuple(made[key] for key in dynamic), Aux(tuple(made), dynamic, statics, extra)
    return CONFIG.jax_enable_x64, flat, tuple(pending)


def to_child(plan: Plan, value: Any, wrap: Callable[[np.ndarray], Any]) -> Any:
    """A value as a pytree child: floats wrapped, static values in `Static`, everything else as it is."""
    kind = plan.kind
    if kind == "opaque":
        return value if is_part(value) else Static(value, Identity(value))
    if is_part(value):
        return value
    if kind in ("float", "argument") and type(value) is float:
        return wrap(as_leaf(value))
    if kind == "integer":
        return wrap(np.asarray(value, np.uint32 if plan.unsigned else np.int32)) if type(value) is int else value
    if kind == "static":
        return Static(value)
    if kind == "union":
        member = choose(plan, value)
        if value is None and any(m.kind in ("float", "integer") for m in plan.members):
            return None
        return value if member is None else to_child(member, value, wrap)
    if kind in ("tuple", "sequence") and type(value) is tuple:
        members = plan.members * len(value) if kind == "sequence" else plan.members
        return tuple(to_child(m, part, wrap) for m, part in zip(members, value, strict=True))
    if kind == "dict" and isinstance(value, dict):
        return {key: to_child(plan.members[0], part, wrap) for key, part in value.items()}
    if kind in ("any", "argument"):
        return _to_child_by_value(plan, value, wrap)
    return value


def _to_child_by_value(plan: Plan, value: Any, wrap: Callable[[np.ndarray], Any]) -> Any:
    if plan.kind == "argument" or any(is_part(part) for _, part in _contained(value)):
        if type(value) is tuple:
            return tuple(to_child(plan, part, wrap) for part in value)
        if isinstance(value, dict):
            return {key: to_child(plan, part, wrap) for key, part in value.items()}
    if isinstance(value, jax.Array | np.ndarray):
        return value
    try:
        return Static(value)
    except TypeError:  # object() and the like, put into the leaves by a transformation
        return value


def _contained(value: Any) -> Iterator[tuple[Any, Any]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is tuple else ()
    for key, part in parts:
        yield key, part
        yield from _contained(part)


def from_child(child: Any) -> Any:
    """A pytree child as the user sees it. Outside a trace its dicts cannot be changed, as those of any config."""
    if type(child) is Static:
        return child.value
    if type(child) is tuple:
        return tuple(map(from_child, child))
    if isinstance(child, dict):
        parts = {key: from_child(part) for key, part in child.items()}
        in_trace = any(isinstance(part, Tracer) or type(part) is dict for part in parts.values())
        return parts if in_trace else FrozenDict(parts)
    return child


def has_float(children: Iterable[Any]) -> bool:
    """Whether a Python float stands among children, put there by a tree operation; the next flatten wraps it."""
    return any(
        type(child) is float
        or (type(child) in (tuple, dict) and has_float(child.values() if type(child) is dict else child))
        for child in children
    )
