"""From the words of a command to a trainer: `--args.NAME=VALUE` by tyro, `--cfg.PATH=VALUE` at any path."""

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from equikd.cli._modules import load_module
from equikd.errors import ConfigError, message

_MOST_PATHS = 60  # of the values that --help lists


def _split_changes(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words without `--cfg.PATH=VALUE`, and path -> text of those."""
    rest: list[str] = []
    changes: dict[str, str] = {}
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("--cfg."):
            rest.append(word)
            continue
        path, equals, text = word.removeprefix("--cfg.").partition("=")
        if not equals:
            following = next(remaining, None)
            if following is None or following.startswith("--"):
                raise ConfigError(message(f"{word}: no value", expected=f"{word}=VALUE"))
            text = following
        path = re.sub(r"-(?![^\[]*\])", "_", path)  # as in flags: learning-rate; a minus in brackets is an index
        if path in changes:
            raise ConfigError(message(f"--cfg.{path}: given twice", got=f"{changes[path]!r} and {text!r}"))
        changes[path] = text
    return rest, changes


def configured(
    words: list[str], command: str, own: Mapping[str, tuple[Any, Any]] = MappingProxyType({})
) -> tuple[Any, str, Any]:
    """The trainer that the words of a command describe.

    Args:
        words: after the command: the module, then flags.
        command: its name, for messages and help.
        own: flags of the command itself: name -> (type, default).

    Returns:
        The trainer, validated; the module as it was named; the values of the command's own flags.

    Raises:
        ConfigError: the module, a flag or the trainer is wrong.
        SystemExit: after `--help`, or where tyro refuses the words.
    """
    from equikd.config import cli, config, validate
    from equikd.config._flags import edited
    from equikd.train import Trainer

    words, changes = _split_changes(words)
    name, words = _module_name(words, command)
    module = load_module(name)
    settings = _settings(module, name)
    document = f"{command.capitalize()} {name}."
    namespace: dict[str, Any] = {"__annotations__": {}, "__doc__": document, "__module__": __name__}
    if settings is not None:
        namespace["__annotations__"]["args"] = settings
        namespace |= _default_settings(module, settings)
    for flag, (kind, default) in own.items():
        namespace["__annotations__"][flag] = kind
        namespace[flag] = default(name) if callable(default) else default
    make = module.get_config
    _refuse_repeated(words, settings, own)
    try:
        flags: Any = config(type(command.capitalize(), (), namespace))
        own_bools = [name for name, (kind, _) in own.items() if kind is bool]
        given = cli(
            flags, _bool_flags(words, settings, own_bools), prog=f"equikd {command} {name}", use_underscores=True
        )
    except SystemExit as stop:
        if not stop.code:
            _list_values(make, namespace.get("args"), settings)
        raise
    trainer = make() if settings is None else make(given.args)
    if not isinstance(trainer, Trainer):
        what = f"{name}: get_config returns no trainer"
        raise ConfigError(message(what, got=type(trainer).__name__, expected="ek.Trainer"))
    return validate(edited(trainer, changes)), name, given


def _module_name(words: list[str], command: str) -> tuple[str, list[str]]:
    if not words or words[0].startswith("-"):
        raise ConfigError(
            message(
                f"no module to {command}" if command in ("train", "check", "eval") else f"{command}: no module",
                got=" ".join(words) or "nothing",
                expected=f"the module first: equikd {command} MODULE [flags]",
                fix=f"equikd {command} equikd.examples.digits",
            )
        )
    return words[0], words[1:]


def _settings(module: types.ModuleType, name: str) -> type | None:
    """The config class that `get_config` takes, if it takes one."""
    parameters = list(inspect.signature(module.get_config).parameters.values())
    if not parameters:
        return None
    annotation = typing.get_type_hints(module.get_config).get(parameters[0].name)
    if len(parameters) > 1 or not isinstance(annotation, type) or "__equikd_config__" not in annotation.__dict__:
        raise ConfigError(
            message(
                f"{name}: get_config takes no argument or one config class",
                got=f"get_config{inspect.signature(module.get_config)}",
                expected="get_config(args: MyArgs = MyArgs()), MyArgs being decorated with @ek.config.config",
            )
        )
    return annotation


def _bool_flags(words: list[str], settings: type | None, own: list[str]) -> list[str]:
    """The words with `--args.NAME=True` as tyro spells it, `--args.NAME`, and `--args.no-NAME` for False."""
    from equikd.config._flags import BOOLS

    def is_bool(flag: str) -> bool:
        return flag.removeprefix("--").replace("-", "_") in own or _is_bool(settings, flag)

    made: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        if word.lower() in BOOLS and made and is_bool(made[-1]):
            name, text = made.pop(), word  # --args.NAME True
        elif not equals:
            made.append(word)
            continue
        if text.lower() in BOOLS and is_bool(name):
            above, dot, last = name.rpartition(".")
            made.append(name if BOOLS[text.lower()] else f"{above}{dot}no-{last}")
        else:
            made.append(word)
    return made


def _refuse_repeated(words: list[str], settings: type | None, own: Mapping[str, Any]) -> None:
    """Refuses a flag that is given twice, of which the last would win in silence."""
    given: dict[str, str] = {}
    for word in words:
        flag = word.partition("=")[0]
        if not flag.startswith(("--args.", *(f"--{name}" for name in own))):
            continue
        above, dot, last = flag.removeprefix("--").replace("-", "_").rpartition(".")
        positive = f"--{above}{dot}{last.removeprefix('no_')}"
        name = positive if _is_bool(settings, positive) else f"--{above}{dot}{last}"
        if name in given:
            raise ConfigError(message(f"{name}: given twice", got=f"{given[name]} and {word}"))
        given[name] = word


def _is_bool(settings: Any, flag: str) -> bool:
    """Whether a flag names a bool of the settings, at any depth."""
    from equikd.config._dataclass import hints

    kind: Any = settings
    for name in flag.removeprefix("--args.").replace("-", "_").split(".") if flag.startswith("--args.") else ("",):
        known: dict[str, Any] = hints(kind) if "__equikd_config__" in getattr(kind, "__dict__", {}) else {}
        kind = known.get(name)
    return kind is bool


def _default_settings(module: types.ModuleType, settings: type) -> dict[str, Any]:
    """The default of `args`, unless the class has fields that must be given."""
    default = next(iter(inspect.signature(module.get_config).parameters.values())).default
    if default is not inspect.Parameter.empty:
        return {"args": default}
    missing = dataclasses.MISSING
    required = [f for f in dataclasses.fields(settings) if f.default is missing and f.default_factory is missing]
    return {} if required else {"args": settings()}


def _list_values(get_config: Callable[..., Any], args: Any, settings: type | None) -> None:
    """The end of --help: the values that --cfg reaches, as they are by default."""
    from equikd.config import flatten
    from equikd.config._names import spell

    if settings is not None and args is None:
        return
    values = flatten(get_config() if settings is None else get_config(args))
    lines = [f"  --cfg.{path}={spell(value)}" for path, value in values.items() if not hasattr(value, "dtype")]
    rest = [f"  ... ({len(lines) - _MOST_PATHS} more)"] if len(lines) > _MOST_PATHS else []
    text = "\n".join(["Values of the trainer, to be changed in the same way:", *lines[:_MOST_PATHS], *rest])
    sys.stdout.write(text + "\n")
