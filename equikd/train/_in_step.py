"""`trainer.in_step`: the part of a trainer that enters its step, and nothing else.

Its floats are leaves. References that lead out of it (`ref("num_steps")` in a schedule) are followed here: a float,
config or node enters once, under `referred`, however many read it; anything else is put in place of the reference,
where an int is a leaf if the field that reads it is dynamic, as the step counts of schedules are. So changing any other
field of the trainer never retraces. Floats that cannot be traced, or that `trace` leaves out, are pinned: floats that
modules declare static, `trace=` globs and pins are one mechanism.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from equikd.config import config, field, override, pin
from equikd.config._dataclass import plans
from equikd.config._resolve import references, target_of
from equikd.config._values import Ref, is_part
from equikd.errors import ConfigError, listing, message, nearest, report
from equikd.losses import Loss
from equikd.metrics import BaseMetric
from equikd.model import static_floats
from equikd.model._floats import spelled
from equikd.tree import Path, get, join, matches, named_leaves, parse, update


@config
class InStep:
    """What a step uses of a trainer; see the fields of `Trainer`."""

    model: Any
    inputs: dict[str, str]
    per_example: bool
    unmapped: tuple[str, ...]
    losses: dict[str, Loss]
    metrics: dict[str, BaseMetric]
    optimizer: Any
    trainable: Any
    step: Any
    init_extra: Any
    accumulate: int
    remat: Any
    precision: Any
    guard: Any
    mesh: Any
    intermediates: Any
    trace: tuple[str, ...] | str
    transform: Any = None
    """Of an eval alone: see `Eval.transform`."""
    referred: dict[str, float | Any] = field(default_factory=dict)
    """Values from outside that references read, by path."""


FIELDS = tuple(name for name in plans(InStep) if name not in ("referred", "transform"))


def in_step(trainer: Any, **replaced: Any) -> InStep:
    """The part of a trainer that enters its step.

    Args:
        trainer: the trainer.
        **replaced: fields to take instead of the trainer's (an eval's losses, metrics and transform).

    Raises:
        ConfigError: references that lead nowhere, `trace` patterns without a match, or a float that must be pinned.
    """
    return _pinned(enclosed(trainer, **replaced), strict=not replaced)


def enclosed(trainer: Any, **replaced: Any) -> InStep:
    """As `in_step`, before anything is pinned."""
    values = {name: getattr(trainer, name) for name in FIELDS} | replaced
    return _enclosed(InStep(**values), trainer, frozenset(FIELDS) - replaced.keys())


def _enclosed(part: InStep, trainer: Any, own: frozenset[str]) -> InStep:
    """`part` with all that it reaches by reference; `own` are the fields that it has from the trainer."""
    errors: list[str] = []
    pending = references(part)
    while pending:
        at, reference = pending.pop()
        gone = at[0] == "referred" and at[1] not in part.referred  # into what has been put around it since
        if parse(reference.path)[0] in own or gone:
            continue
        try:
            path, value = _followed(trainer, reference)
        except ConfigError as error:
            errors.append(f"{join(at)}: {error}")
            continue
        inside = parse(path)[0] in own
        if not inside and type(value) is not float and not is_part(value):
            part = update(part, at, lambda _, value=value: value)
            continue
        if path != reference.path:  # a reference to a reference: all readers of one value name one path
            part = update(part, at, lambda _, path=path: Ref(path))
        if not inside and not any(_below(path, held) for held in part.referred):
            outer = {held: kept for held, kept in part.referred.items() if not _below(held, path)}
            part = dataclasses.replace(part, referred={**outer, path: value})  # what stands in another enters with it
            pending += references(value, ("referred", path))
    if errors:
        raise ConfigError(report(f"{len(errors)} references lead nowhere", errors))
    return part


def _below(path: str, other: str) -> bool:
    """Whether a path is another one, or leads into what stands there."""
    return parse(path)[: len(parse(other))] == parse(other)


def _followed(trainer: Any, reference: Ref) -> tuple[str, Any]:
    """Path and value at the end of a chain of references."""
    passed: list[str] = []
    value: Any = reference
    where: Path = ()
    while isinstance(value, Ref):
        if value.path in passed:
            raise ConfigError(message(f"{reference!r} leads back to itself", got=" -> ".join([*passed, value.path])))
        passed.append(value.path)
        value, where = target_of(trainer, value.path)
    return join(where), value


def float_paths(part: Any) -> dict[str, str]:
    """The traced floats: path in the trainer (values from outside under their own) -> path in `part`."""
    leaves = named_leaves(part)
    return {spelled(path): path for path, leaf in leaves.items() if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)}


def _pinned(part: InStep, *, strict: bool) -> InStep:
    """Floats that are not to be traced, pinned; `strict`: each pattern of `trace` must match one."""
    if part.trace != "all":
        patterns = (part.trace,) if isinstance(part.trace, str) else part.trace
        paths = float_paths(part)
        unmatched = [p for p in patterns if not any(matches(p, path) for path in paths)]
        if unmatched and strict:
            errors = [
                message(f"trace: {p!r} matches no float", near=nearest(p, paths), expected=f"floats: {listing(paths)}")
                for p in unmatched
            ]
            raise ConfigError(report(f"{len(errors)} patterns of trace match nothing", errors))
        part = _pin(part, [inner for path, inner in paths.items() if not any(matches(p, path) for p in patterns)])
    return part if part.model is None else _pin(part, list(static_floats(part)))


def _pin(part: InStep, paths: list[str]) -> InStep:
    return override(part, {path: pin(float(get(part, path))) for path in paths})
