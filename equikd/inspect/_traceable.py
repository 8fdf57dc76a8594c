"""Which floats of an experiment can be traced, and why the others cannot.

A float may be traced unless Python needs its value (`if p > 0` in a constructor, a schedule of optax that branches on
it) or a module declares it static. Every float is tried alone under `eval_shape`: that costs a trace for each, and
compiles nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from equikd.config import override, pin, resolve
from equikd.data import pipeline
from equikd.model import build, static_floats
from equikd.model._floats import float_leaves, line_of, spelled, with_floats
from equikd.train._check import abstract
from equikd.train._in_step import enclosed
from equikd.train._init import initial_state
from equikd.train._program import step_of
from equikd.train._trainer import Trainer
from equikd.tree import get


class Untraceable(NamedTuple):
    """Why a float cannot be traced.

    Attributes:
        reason: `"static field"` of a module, or `"control flow"`: Python needs its value.
        where: the field, or file and line.
    """

    reason: str
    where: str


class Traceability(Mapping[str, Untraceable | None]):
    """Config path -> None for a float that can be traced, or why it cannot; printed as a table."""

    def __init__(self, verdicts: dict[str, Untraceable | None]) -> None:
        self._verdicts = verdicts

    def __getitem__(self, path: str) -> Untraceable | None:
        return self._verdicts[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._verdicts)

    def __len__(self) -> int:
        return len(self._verdicts)

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        why = ["traced" if v is None else f"static: {v.reason}, {v.where}" for v in self.values()]
        return "\n".join(f"{path:<{width}}  {text}" for path, text in zip(self, why, strict=True))


def traceable(cfg: Any) -> Traceability:
    """Which floats can be traced.

    Args:
        cfg: a trainer, or a node or config, which is then resolved alone.

    Returns:
        Config path -> None where the float can be traced, else an `Untraceable`. Floats that are pinned are not listed.

    Raises:
        EquikdError: the experiment is wrong in another way.

    Example:
        >>> import optax
        >>> from equikd.config import lazy
        >>> schedule = lazy(optax.exponential_decay)(init_value=0.1, transition_steps=10, decay_rate=0.9)
        >>> verdicts = traceable(schedule)
        >>> verdicts["init_value"], verdicts["decay_rate"].reason
        (None, 'control flow')
    """
    if isinstance(cfg, Trainer):
        return _of_trainer(cfg)
    return Traceability(_control_flow(cfg, lambda cfg: resolve(cfg, key=jax.random.key(0))))


def _of_trainer(trainer: Trainer) -> Traceability:
    """Construction of the model first, then its static fields, then the whole step, each with what is known pinned."""
    config = enclosed(trainer)
    order = [spelled(path) for path in float_leaves(config, everywhere=True)]
    found: dict[str, Untraceable | None] = {}
    if config.model is not None:
        config = _without(config, _control_flow(config, lambda c: build(c, jax.random.key(0))), found)
        fields = {path: Untraceable("static field", field) for path, field in static_floats(config).items()}
        config = _without(config, fields, found)
    spec = pipeline(trainer.train_data, root=trainer, path="train_data").spec()
    state = abstract(lambda: initial_state(config, resolve(trainer.seed, root=trainer, path="seed")))
    _without(config, _control_flow(config, lambda c: abstract(partial(step_of(c), c), state, spec)), found)
    return Traceability({path: found.get(path) for path in order})


def _without(config: Any, verdicts: Mapping[str, Untraceable | None], found: dict[str, Any]) -> Any:
    """A step's config in which what cannot be traced is pinned; it is noted in `found`."""
    culprits = {path: why for path, why in verdicts.items() if why is not None}
    found |= {spelled(path): why for path, why in culprits.items()}
    return override(config, {path: pin(float(get(config, path))) for path in culprits})


def _control_flow(config: Any, run: Callable[[Any], Any]) -> dict[str, Untraceable | None]:
    """Path -> where Python needs the value of a float, or None; each traced alone, where not all can be at once."""
    floats = float_leaves(config, everywhere=True)
    if not floats or _tried(config, list(floats.values()), run) is None:
        return dict.fromkeys(floats)
    _tried(config, [], run, catch=())  # what fails with no float traced is wrong in another way
    return {path: _tried(config, [index], run) for path, index in floats.items()}


def _tried(
    config: Any, positions: list[int], run: Callable[[Any], Any], catch: tuple[type[Exception], ...] = (Exception,)
) -> Untraceable | None:
    """Where it fails with the floats at some positions traced, or None.

    Not only by JAX's own errors: Python says "unhashable type" of a traced value, or "unsupported format string".
    """
    failed: list[Untraceable] = []

    def probe(*values: jax.Array) -> None:
        try:
            run(with_floats(config, dict(zip(positions, values, strict=True))))
        except catch as error:
            failed.append(Untraceable("control flow", line_of(error) or str(error).splitlines()[0]))

    abstract(probe, *[jax.ShapeDtypeStruct((), jnp.result_type(float))] * len(positions))
    return failed[-1] if failed else None


__all__ = ["Traceability", "Untraceable", "traceable"]
