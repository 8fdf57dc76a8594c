"""`trainer.in_step`: the part of a trainer that enters its step, and nothing else.

Its floats are leaves. References that lead out of it (`ref("num_steps")` in a schedule) are followed here: a float becomes
a leaf of `referred`, an int that a dynamic field reads a leaf of `counts`, anything else is put in place. So one value has
one leaf however many read it, and changing any other field of the trainer never retraces. Floats that cannot be traced, or
that `trace` leaves out, are pinned: floats that modules declare static, `trace=` globs and pins are one mechanism.
"""

from typing import Any

import jax.numpy as jnp

from equikd.config import config, field, override, pin
from equikd.config._dataclass import plans
from equikd.config._resolve import references, target_of
from equikd.config._values import Ref, is_config, is_part
from equikd.errors import ConfigError, message, nearest, report
from equikd.losses import Loss
from equikd.metrics import Metric
from equikd.model import static_floats
from equikd.tree import Path, get, join, matches, named_leaves, parse, update


@config
class InStep:
    """What a step uses of a trainer; see the fields of `Trainer`."""

    model: Any
    inputs: dict[str, str]
    per_example: bool
    unmapped: tuple[str, ...]
    losses: dict[str, Loss]
    metrics: dict[str, Metric]
    optimizer: Any
    trainable: Any
    step: Any
    init_extra: Any
    trace: tuple[str, ...] | str
    referred: dict[str, float | Any] = field(default_factory=dict)
    """Values from outside that references read, by path."""
    counts: dict[str, int] = field(dynamic=True, default_factory=dict)
    """Ints from outside that dynamic fields read, by path."""


FIELDS = tuple(name for name in plans(InStep) if name not in ("referred", "counts"))


def in_step(trainer: Any, **replaced: Any) -> InStep:
    """The part of a trainer that enters its step.

    Args:
        trainer: the trainer.
        **replaced: fields to take instead of the trainer's (an eval's losses and metrics).

    Raises:
        ConfigError: references that lead nowhere, `trace` patterns without a match, or a float that must be pinned.
    """
    values = {name: getattr(trainer, name) for name in FIELDS} | replaced
    return _pinned(_enclosed(InStep(**values), trainer))


def _enclosed(part: InStep, trainer: Any) -> InStep:
    """`part` with all that it reaches by reference."""
    referred: dict[str, Any] = {}
    counts: dict[str, int] = {}
    errors: list[str] = []
    pending = references(part)
    while pending:
        at, reference = pending.pop()
        if parse(reference.path)[0] in FIELDS or reference.path in referred:
            continue
        try:
            value = _followed(trainer, reference)
        except ConfigError as error:
            errors.append(f"{join(at)}: {error}")
            continue
        if type(value) is int and _reads_dynamic(part, at):
            counts[reference.path] = value
        elif type(value) is float or is_part(value):
            referred[reference.path] = value
            pending += references(value, ("referred", reference.path))
        else:
            part = update(part, at, lambda _, new=value: new)
        part = InStep(**{name: getattr(part, name) for name in FIELDS}, referred=referred, counts=counts)
    if errors:
        raise ConfigError(report(f"{len(errors)} references lead nowhere", errors))
    return part


def _followed(trainer: Any, reference: Ref) -> Any:
    """The value at the end of a chain of references."""
    passed = []
    value: Any = reference
    while isinstance(value, Ref):
        if value.path in passed:
            raise ConfigError(message(f"{reference!r} leads back to itself", got=" -> ".join([*passed, value.path])))
        passed.append(value.path)
        value = target_of(trainer, value.path)[0]
    return value


def _reads_dynamic(part: Any, at: Path) -> bool:
    """Whether the field at `at` is a dynamic int."""
    owner = get(part, at[:-1])
    return is_config(owner) and plans(type(owner))[at[-1]].kind == "integer"


def float_paths(part: Any) -> list[str]:
    """Paths of the traced floats, as the user writes them (values from outside under their own path)."""
    leaves = named_leaves(part)
    return [_outer(path) for path, leaf in leaves.items() if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]


def _outer(path: str) -> str:
    keys = parse(path)
    return keys[1] if keys[0] == "referred" else path


def _inner(path: str, part: InStep) -> str:
    return join(("referred", path)) if path in part.referred else path


def _pinned(part: InStep) -> InStep:
    """Floats that are not to be traced, pinned."""
    if part.trace != "all":
        patterns = (part.trace,) if isinstance(part.trace, str) else part.trace
        paths = float_paths(part)
        unmatched = [p for p in patterns if not any(matches(p, path) for path in paths)]
        if unmatched:
            errors = [message(f"trace: {p!r} matches no float", near=nearest(p, paths)) for p in unmatched]
            raise ConfigError(report(f"{len(errors)} patterns of trace match nothing", errors))
        part = _pin(part, [path for path in paths if not any(matches(p, path) for p in patterns)])
    return part if part.model is None else _pin(part, list(static_floats(part)))


def _pin(part: InStep, paths: list[str]) -> InStep:
    inner = [_inner(path, part) for path in paths]
    return override(part, {path: pin(float(get(part, path))) for path in inner})
