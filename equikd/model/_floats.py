"""The floats that a model's construction reads, and which of them are to blame when something cannot be traced.

Under a trace a float of the config is a tracer. Where Python needs its value (`if p > 0`), or where it ends up in a
place that no trace can fill, somebody has to pin it, and wants to be told which one. `blamed` finds out: it does the
same again with one float traced at a time. That costs a trace for each float, and only errors pay it.
"""

import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd.config._resolve import references, target_of
from equikd.errors import listing, message
from equikd.tree import get, join, named_leaves, parse

NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,  # bool(), float(), int() of a tracer
    jax.errors.TracerArrayConversionError,  # numpy on a tracer
    jax.errors.TracerIntegerConversionError,
)


_MACHINERY = ("jax", "jaxlib", "equinox", "jaxtyping", "beartype")


def spelled(path: str) -> str:
    """A path of the part that enters the step, as the user writes it in the trainer.

    Example:
        >>> spelled("referred['shared.rate']"), spelled("model.dropout")
        ('shared.rate', 'model.dropout')
    """
    keys = parse(path)
    return join((*parse(keys[1]), *keys[2:])) if keys[0] == "referred" else path


def reached(config: Any) -> dict[str, Any]:
    """The fields of a config that the model is built from: `model`, and what its references lead to."""
    fields: dict[str, Any] = {}
    pending = ["model"]
    while pending:
        name = pending.pop()
        if name not in fields:
            fields[name] = getattr(config, name)
            paths = [reference.path for _, reference in references(fields[name])]
            pending += [str(target_of(config, path)[1][0]) for path in paths]
    return fields


def float_leaves(config: Any, *, everywhere: bool = False) -> dict[str, int]:
    """Path -> position among the leaves, of the floats that the model of a step's config may read, or of all."""
    fields = None if everywhere else reached(config)
    return {
        path: index
        for index, (path, leaf) in enumerate(named_leaves(config).items())
        if (fields is None or parse(path)[0] in fields) and _is_float(leaf)
    }


def _is_float(leaf: Any) -> bool:
    """Whether a leaf is a float, of a config or of a plain container around configs."""
    return type(leaf) is float or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating))


def with_floats(config: Any, floats: dict[int, Any]) -> Any:
    """A step's config with other values at some positions, and Python numbers at all others."""
    leaves, tree = jax.tree.flatten(config)
    host = [leaf.item() if hasattr(leaf, "item") else leaf for leaf in leaves]
    return tree.unflatten([floats.get(i, leaf) for i, leaf in enumerate(host)])


def blamed(config: Any, fails: Callable[[Any], bool], *, everywhere: bool = False) -> list[str]:
    """Paths of the floats with which, traced alone, something fails.

    Args:
        config: the part of a trainer that enters its step.
        fails: called inside a trace, with a config of which one float is traced.
        everywhere: look at all floats, not only at those that the model may read.
    """
    found = []
    for path, index in float_leaves(config, everywhere=everywhere).items():
        verdict: list[bool] = []

        def probe(value: Any, index: int = index, verdict: list[bool] = verdict) -> None:
            verdict.append(fails(with_floats(config, {index: value})))

        eqx.filter_eval_shape(probe, jnp.zeros((), jnp.result_type(float)))
        if verdict[-1]:
            found.append(path)
    return found


def pin_advice(config: Any, paths: Iterable[str]) -> str:
    """What to write so that some floats are no longer traced."""
    paths = list(paths)
    pins = ", ".join(f"{spelled(path)!r}: ek.pin({_value(config, path)})" for path in paths[:8])
    what = "pin it, so that it is" if len(paths) == 1 else "pin them, so that they are"
    return f"{what} part of the program: ek.override(trainer, {{{pins}}})"


def _value(config: Any, path: str) -> str:
    value = get(config, path)
    return repr(value) if type(value) is float else "..."


def explain(error: Exception, config: Any, run: Callable[[Any], Any], *, everywhere: bool = False) -> None:
    """Add to an error of `NEEDS_VALUE` which floats are to blame, where the value is needed, and how to pin them.

    Args:
        error: what `run` raised with all floats traced.
        config: the part of a trainer that enters its step.
        run: what raised it, a function of the config, called inside a trace.
        everywhere: look at all floats, not only at those that the model may read.
    """

    def fails(config: Any) -> bool:
        try:
            run(config)
        except NEEDS_VALUE:
            return True
        except Exception:  # another fault altogether; it says nothing of this float
            return False
        return False

    # A value that is needed of something else, such as a batch, is needed with no float traced too.
    unrelated: list[bool] = []
    eqx.filter_eval_shape(lambda: unrelated.append(fails(with_floats(config, {}))))
    paths = [] if unrelated[-1] else blamed(config, fails, everywhere=everywhere)
    if paths:
        error.add_note(
            message(
                f"Python needs the value of a traced float: {listing(map(spelled, paths), 8)}",
                where=line_of(error),
                fix=pin_advice(config, paths),
            )
        )


def line_of(error: BaseException) -> str | None:
    """File and line of the innermost frame that is neither JAX's, Equinox's nor ours."""
    lines = [
        f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname.rpartition('<locals>.')[2]}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_machinery(frame)
    ]
    return lines[-1] if lines else None


def _is_machinery(frame: types.FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    ours = frame.f_globals.get("__name__", "").startswith("equikd.") and ".examples." not in frame.f_globals["__name__"]
    return ours or package in _MACHINERY or frame.f_code.co_filename.startswith("<")
