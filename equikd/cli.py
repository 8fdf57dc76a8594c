"""The command line: `equikd train MODULE [--args.NAME=VALUE] [--cfg.PATH=VALUE] [--workdir DIR]`.

MODULE is an importable module or the path of a `.py` file, with a function `get_config` that returns a trainer. Where
`get_config` takes one config class, its fields are flags under `--args`, typed by tyro. `--cfg.PATH=VALUE` edits the
trainer that comes out, at any path. Whatever is wrong is told on one screen, with exit code 2, before anything is written.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from equikd.errors import ConfigError, EquikdError, listing, message, nearest

USAGE = """\
usage: equikd train MODULE [--workdir DIR] [--args.NAME=VALUE ...] [--cfg.PATH=VALUE ...]

  train     train the experiment that MODULE describes; run it again to resume

MODULE is an importable module (equikd.examples.digits) or a .py file, with a function get_config
that returns an ek.Trainer. `equikd train MODULE --help` lists the flags of its settings.

  --workdir DIR       where config, metrics, TensorBoard events and checkpoints go
                      (default: runs/NAME, NAME being the last part of MODULE)
  --args.NAME=VALUE   a setting of get_config's config class
  --cfg.PATH=VALUE    any value of the trainer, such as --cfg.optimizer.learning_rate=1e-3
"""

_MOST_LINES = 38


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after `equikd`; those of the process by default.

    Returns:
        The exit code: 0, or 2 where the words or the experiment are wrong.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        import equikd

        sys.stdout.write(f"equikd {equikd.__version__}\n")
        return 0
    try:
        return _COMMANDS[words[0]](words[1:]) if words[0] in _COMMANDS else _unknown(words[0])
    except EquikdError as error:
        return _refuse(str(error), error)
    except Exception as error:  # of user code: its type and message, and where the config wrote what failed
        notes = getattr(error, "__notes__", [])
        if not notes:
            raise
        return _refuse("\n".join([f"{type(error).__name__}: {error}", *notes]), error)


def _refuse(text: str, error: BaseException) -> int:
    del error
    lines = text.splitlines()
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"... ({len(lines) - _MOST_LINES} more lines)"]
    sys.stderr.write("\n".join(lines) + "\n")
    return 2


def _unknown(word: str) -> NoReturn:
    raise ConfigError(
        message(f"{word!r} is no command", near=nearest(word, _COMMANDS), expected=listing(_COMMANDS), fix="equikd --help")
    )


def _train(words: list[str]) -> int:
    from equikd.train import final_table

    words, changes = _split_changes(words)
    module_name, words = _module_name(words)
    module = load_module(module_name)
    trainer, workdir = _configured(module, module_name, words, changes)
    result = trainer.train(workdir)
    final_table(result.metrics, title=f"{module_name}, {int(result.state.step)} steps, in {workdir}")
    return 0


_COMMANDS = {"train": _train}


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
        if path in changes:
            raise ConfigError(message(f"--cfg.{path}: given twice", got=f"{changes[path]!r} and {text!r}"))
        changes[path] = text
    return rest, changes


def _module_name(words: list[str]) -> tuple[str, list[str]]:
    if not words or words[0].startswith("-"):
        if words[:1] in (["-h"], ["--help"]):
            sys.stdout.write(USAGE)
            raise SystemExit(0)
        raise ConfigError(
            message("no module to train", got=" ".join(words) or "nothing", expected="equikd train MODULE [flags]",
                    fix="equikd train equikd.examples.digits")
        )
    return words[0], words[1:]


def load_module(name: str) -> types.ModuleType:
    """A config module by name, or by the path of its `.py` file, which is imported under its stem.

    Raises:
        ConfigError: it does not exist, or has no `get_config`.
    """
    module = _load_file(Path(name)) if name.endswith(".py") or "/" in name else _import(name)
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(
            message(
                f"{name}: no function get_config",
                near=nearest("get_config", dir(module)),
                fix="define get_config() that returns an ek.Trainer",
            )
        )
    return module


def _import(name: str) -> types.ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a console script does not see the current directory; python -m does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                message(f"there is no module {name!r}", got=str(error), near=_near_modules(name), fix="check the name")
            ) from None
        raise


def _near_modules(name: str) -> tuple[str, ...]:
    import pkgutil

    parent = name.rpartition(".")[0]
    try:
        package = importlib.import_module(parent) if parent else None
    except ImportError:
        return ()
    paths = getattr(package, "__path__", None)
    found = [f"{parent}.{m.name}" for m in pkgutil.iter_modules(paths)] if paths else []
    return nearest(name, found)


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        near = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(message(f"there is no file {str(path)!r}", near=nearest(str(path), near), fix="check the path"))
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that the config finds the files beside it, and is found under its stem again
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(path.resolve()):
        raise ConfigError(
            message(f"{path.name} would hide the module {path.stem!r}", got=str(loaded.__file__), fix="rename the file")
        )
    return importlib.import_module(path.stem)


def _configured(module: types.ModuleType, name: str, words: list[str], changes: dict[str, str]) -> tuple[Any, str]:
    """The trainer that the words describe, and its work directory."""
    from equikd.config import cli, config, override, validate
    from equikd.train import Trainer

    settings = _settings(module, name)
    default_workdir = f"runs/{name.removesuffix('.py').replace('/', '.').rpartition('.')[2]}"
    namespace: dict[str, Any] = {"__annotations__": {}, "__doc__": f"Train {name}.", "__module__": __name__}
    if settings is not None:
        namespace["__annotations__"]["args"] = settings
        namespace["args"] = _default_settings(module, settings)
    namespace["__annotations__"]["workdir"] = str
    namespace["workdir"] = default_workdir
    command = cli(config(type("Train", (), namespace)), words, prog=f"equikd train {name}")
    trainer = module.get_config(command.args) if settings is not None else module.get_config()
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            message(f"{name}: get_config returns no trainer", got=type(trainer).__name__, expected="ek.Trainer")
        )
    return validate(override(trainer, {path: parse_value(text) for path, text in changes.items()})), command.workdir


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
                got=str(inspect.signature(module.get_config)),
                expected="get_config(args: MyArgs = MyArgs())",
            )
        )
    return annotation


def _default_settings(module: types.ModuleType, settings: type) -> Any:
    default = next(iter(inspect.signature(module.get_config).parameters.values())).default
    return settings() if default is inspect.Parameter.empty else default


def parse_value(text: str) -> Any:
    """A value of the command line: a Python literal, or else the text itself.

    Example:
        >>> parse_value("1e-3"), parse_value("(1, 2)"), parse_value("batch.image"), parse_value("true")
        (0.001, (1, 2), 'batch.image', True)
    """
    words = {"true": True, "false": False, "none": None, "nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return _frozen(ast.literal_eval(text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
