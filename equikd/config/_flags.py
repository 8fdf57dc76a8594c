"""Values of a config from the words of a command line: `--cfg.optimizer.learning_rate=1e-3`.

The text of a flag is read as what stands at its path is. Where a string stands it stays a string, even `1` or `none`;
for a float `1` is 1.0, for an int `1e5` is 100000, for a tuple `0.9,0.99` is a tuple, for a function `jax.nn.gelu` is
that function. Where nothing tells, it is a Python literal if it is one. The edit itself, and with it every check of
paths and kinds, is `override`.
"""

import ast
import enum
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from equikd.config._edit import override
from equikd.config._names import import_object
from equikd.errors import ConfigError, report
from equikd.tree import PathError, get, is_glob, matches, walk

T = TypeVar("T")

BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def edited(cfg: T, changes: Mapping[str, str]) -> T:
    """A copy of a config with values from a command line.

    Args:
        cfg: a config, node or container; a trainer.
        changes: `{path: text}`; paths as in `override`.

    Returns:
        The edited copy.

    Raises:
        ConfigError: all wrong paths and values at once.

    Example:
        >>> edited({"rate": 0.1, "name": "a"}, {"rate": "1", "name": "1"})
        {'rate': 1.0, 'name': '1'}
    """
    errors = []
    for path, text in changes.items():
        try:
            cfg = _edit(cfg, path, text)
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError(report(f"{len(errors)} values are wrong", errors))
    return cfg


def _edit(cfg: T, path: str, text: str) -> T:
    """The edit with the first reading of the text that fits; its annotations decide."""
    first, *others = readings(text, _standing(cfg, path))
    try:
        return override(cfg, {path: first})
    except ConfigError:
        for value in others:
            try:
                return override(cfg, {path: value})
            except ConfigError:
                continue
        raise


def _standing(cfg: Any, path: str) -> Any:
    """What stands at a path (at the first match of a pattern), or None."""
    try:
        if is_glob(path):
            return next((value for at, value in walk(cfg) if at and matches(path, at)), None)
        return get(cfg, path)
    except PathError:  # an argument that is not written yet; or a wrong path, of which `override` will tell
        return None


def readings(text: str, standing: Any = None) -> list[Any]:
    """What a text may mean where a value stands, the likeliest first.

    Args:
        text: as the user wrote it.
        standing: the value that it is to replace; None where that says nothing.

    Example:
        >>> readings("1", 0.5), readings("none", "a"), readings("a,b", ("c",)), readings("none", 3)[0]
        ([1.0], ['none'], [('a', 'b')], None)
    """
    literal = _literal(text)
    if isinstance(standing, enum.Enum):
        return [type(standing).__members__.get(text, text)]
    if isinstance(standing, str):
        return [literal, text] if isinstance(literal, tuple) else [text]
    if literal is None:
        return [None, text]
    if isinstance(standing, bool):
        return [BOOLS.get(text.lower(), literal)]
    if isinstance(standing, float) or (isinstance(standing, int) and isinstance(literal, float)):
        return [_number(text, type(standing), literal)]
    if isinstance(standing, tuple):
        return [literal if text[:1] in ("(", "[") and isinstance(literal, tuple) else _tuple(text, standing)]
    if isinstance(standing, pathlib.PurePath):
        return [type(standing)(text)]
    if callable(standing) and hasattr(standing, "__name__"):
        return [import_object(text if ":" in text else ":".join(text.rsplit(".", 1)))]
    return [literal, text]


def _number(text: str, kind: type, otherwise: Any) -> Any:
    """A float, or a whole number written as one (`1e5`)."""
    try:
        value = float(text)
    except ValueError:
        return otherwise
    return kind(value) if kind is float or value.is_integer() else otherwise


def _tuple(text: str, standing: tuple[Any, ...]) -> tuple[Any, ...]:
    """The parts between commas, each read as the one that stands in its place, or as the last one."""
    parts = [part.strip() for part in text.strip("()[]").split(",") if part.strip()]
    guides = [standing[min(index, len(standing) - 1)] if standing else None for index in range(len(parts))]
    return tuple(readings(part, guide)[0] for part, guide in zip(parts, guides, strict=True))


def _literal(text: str) -> Any:
    """A Python literal, `true`, `false`, `none`, `nan` or `inf` in any case, or else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return float(text) if text.lower().lstrip("+-") in ("nan", "inf") else _frozen(ast.literal_eval(text.strip()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(part) for key, part in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


__all__ = ["BOOLS", "edited", "readings"]
