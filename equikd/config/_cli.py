"""Command lines from config classes, by tyro: the only file that imports it."""

from collections.abc import Sequence
from typing import Any, TypeVar

from equikd.config._validate import validate

T = TypeVar("T")


def cli(cls: type[T], args: Sequence[str] | None = None, *, default: T | None = None, **options: Any) -> T:
    """An instance of a config class from the command line.

    Args:
        cls: the config class; docstrings under its fields become help, nested configs nested flags.
        args: the words of the command line; those of the process by default.
        default: an instance whose values are the flags' defaults.
        **options: `prog` and `description`, as in `tyro.cli`.

    Returns:
        The instance, validated.

    Raises:
        ConfigError: `validate` refuses it.
        SystemExit: code 2 after printing what is wrong with the words, 0 after `--help`.

    Example:
        >>> from equikd.config import config
        >>> @config
        ... class Opt:
        ...     learning_rate: float = 1e-3
        >>> cli(Opt, ["--learning-rate", "0.1"])
        Opt(learning_rate=0.1)
    """
    import tyro

    if default is not None:
        options["default"] = default
    return validate(tyro.cli(cls, args=args, **options))
