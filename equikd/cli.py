"""The command line: `equikd train MODULE [--workdir DIR] [--args.NAME=VALUE ...] [--cfg.PATH=VALUE ...]`.

MODULE is an importable module or the path of a `.py` file, with a function `get_config` that returns a trainer. Where
`get_config` takes one config class, its fields are flags under `--args`, typed by tyro. `--cfg.PATH=VALUE` edits the
trainer that comes out, at any path. Whatever is wrong is told on one screen, with exit code 2, before anything is
written.
"""

import dataclasses
import importlib
import importlib.machinery
import inspect
import os
import pathlib
import re
import sys
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from equikd.errors import ConfigError, EquikdError, listing, message, nearest

USAGE = """\
usage: equikd train MODULE [--workdir DIR] [--args.NAME=VALUE ...] [--cfg.PATH=VALUE ...]

  train     train the experiment that MODULE describes; run it again to resume

MODULE is an importable module (equikd.examples.digits) or a .py file, with a function get_config
that returns an ek.Trainer. `equikd train MODULE --help` lists its settings.

  --workdir DIR       where config, metrics, TensorBoard events and checkpoints go
                      (default: runs/NAME, NAME being the last part of MODULE)
  --args.NAME=VALUE   a setting of get_config's config class
  --cfg.PATH=VALUE    any value of the trainer, such as --cfg.optimizer.learning_rate=1e-3
  --version           the version of equikd

Errors are told on one screen, with exit code 2. EQUIKD_TRACEBACK=1 shows the Python traceback.
"""

_MOST_LINES = 36  # of an error, so that it stays on one screen
_MOST_PATHS = 60  # of the values that --help lists


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after `equikd`; those of the process by default.

    Returns:
        The exit code: 0; 2 where the words or the experiment are wrong; 130 after an interrupt.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except EquikdError as error:
        return _refuse(str(error), error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except Exception as error:
        notes = [note for note in getattr(error, "__notes__", []) if note.startswith(_OUR_NOTES)]
        if not notes:  # a fault in somebody's code: its traceback says most
            raise
        text = _cut(f"{type(error).__name__}: {error}", _MOST_LINES // 2)
        origin = _origin(error)
        return _refuse("\n".join([text, *notes, *([f"at {origin}"] if origin else [])]), error)


_OUR_NOTES = ("while resolving", "while drawing", "while starting", "to install")


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        import equikd

        sys.stdout.write(f"equikd {equikd.__version__}\n")
        return 0
    if words[0] not in _COMMANDS:
        what, fix = f"{words[0]!r} is no command", "equikd --help"
        raise ConfigError(message(what, near=nearest(words[0], _COMMANDS), expected=listing(_COMMANDS), fix=fix))
    return _COMMANDS[words[0]](words[1:])


def _refuse(text: str, error: BaseException) -> int:
    if os.environ.get("EQUIKD_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    sys.stderr.write(_cut(text, _MOST_LINES) + "\n")
    return 2


def _cut(text: str, most: int) -> str:
    lines = text.splitlines()
    return text if len(lines) <= most else "\n".join([*lines[:most], f"... ({len(lines) - most} more lines)"])


def _origin(error: BaseException) -> str | None:
    """The innermost line of the user's own code that an error came through."""
    others = (f"{pathlib.Path(__file__).parent}{os.sep}", sysconfig.get_paths()["stdlib"], "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = pathlib.Path(frame.filename)
        if path.is_absolute() and not frame.filename.startswith(others) and "site-packages" not in path.parts:
            return f"{path}:{frame.lineno} in {frame.name}: {frame.line}"
    return None


def _train(words: list[str]) -> int:
    words, changes = _split_changes(words)
    module_name, words = _module_name(words)
    trainer, workdir = _configured(load_module(module_name), module_name, words, changes)

    from equikd.train import final_table

    try:
        result = trainer.train(workdir)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; {_what_is_left(workdir)}\n")
        return 130
    final_table(result.metrics, title=f"{module_name}, {int(result.state.step)} steps, in {workdir}")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {"train": _train}


def _what_is_left(workdir: str) -> str:
    from equikd.train import CheckpointStore
    from equikd.train._directory import RunDirectory

    step = CheckpointStore(RunDirectory.open(workdir).checkpoints, keep=1).latest()
    return "there is no checkpoint yet" if step is None else f"the same command goes on from step {step}"


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


def _module_name(words: list[str]) -> tuple[str, list[str]]:
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        raise SystemExit(0)
    if not words or words[0].startswith("-"):
        raise ConfigError(
            message(
                "no module to train",
                got=" ".join(words) or "nothing",
                expected="the module first: equikd train MODULE [flags]",
                fix="equikd train equikd.examples.digits",
            )
        )
    return words[0], words[1:]


def load_module(name: str) -> types.ModuleType:
    """A config module by name, or by the path of its `.py` file, which is imported under its stem.

    Raises:
        ConfigError: it does not exist, imports what is not installed, or has no `get_config`.
    """
    module = _load_file(pathlib.Path(name)) if name.endswith(".py") or "/" in name else _import(name)
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(
            message(
                f"{name}: no function get_config",
                near=nearest("get_config", [key for key in vars(module) if not key.startswith("__")]),
                fix="define get_config() that returns an ek.Trainer",
            )
        )
    return module


def _import(name: str) -> types.ModuleType:
    if "" not in sys.path and str(pathlib.Path.cwd()) not in sys.path:
        sys.path.insert(0, str(pathlib.Path.cwd()))  # a console script does not see it; python -m does
    if not all(part.isidentifier() for part in name.split(".")):
        expected = "a name such as equikd.examples.digits, or a .py file"
        raise ConfigError(message(f"{name!r} is no module", expected=expected))
    try:
        return _executed(name, name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            near = _near_modules(name, error.name.rpartition(".")[0])
            raise ConfigError(message(f"there is no module {name!r}", got=str(error), near=near)) from None
        raise _not_installed(name, error) from error


def _executed(module: str, name: str) -> types.ModuleType:
    """The module, imported; a config that is no Python, or that ends the process, is told as an error of the user."""
    try:
        return importlib.import_module(module)
    except SyntaxError as error:
        got = f"{error.msg}: {(error.text or '').strip()[:100]}".removesuffix(": ")
        where, fix = f"{error.filename}:{error.lineno}", "correct the line"
        raise ConfigError(message(f"{name} is no valid Python", where=where, got=got, fix=fix)) from error
    except SystemExit as error:
        what, fix = f"{name} ends the process while it is imported", 'keep that below `if __name__ == "__main__":`'
        got = f"sys.exit({'' if error.code is None else repr(error.code)[:100]})"
        raise ConfigError(message(what, where=_origin(error), got=got, fix=fix)) from error


def _not_installed(name: str, error: ModuleNotFoundError) -> ConfigError:
    fix = "install it, or correct the import"
    return ConfigError(message(f"{name} cannot be imported", where=_origin(error), got=str(error), fix=fix))


def _near_modules(name: str, parent: str) -> tuple[str, ...]:
    """Modules beside the part of a name that does not exist; without a parent, those of the current directory."""
    import pkgutil

    paths = getattr(sys.modules[parent], "__path__", ()) if parent in sys.modules else [str(pathlib.Path.cwd())]
    prefix = f"{parent}." if parent else ""
    found = [prefix + module.name for module in pkgutil.iter_modules(paths)]
    missing = name.removeprefix(prefix).partition(".")[0]
    return nearest(prefix + missing, [*found, *([] if parent else ["equikd"])])


def _load_file(path: pathlib.Path) -> types.ModuleType:
    if not path.is_file():
        near = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(message(f"there is no file {str(path)!r}", near=nearest(str(path), near)))
    if path.suffix != ".py" or not path.stem.isidentifier():
        what = f"{path.name} cannot be imported, since its name is no Python name"
        raise ConfigError(message(what, fix=f"rename it, such as {re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}.py"))
    folder, target = str(path.parent.resolve()), str(path.resolve().parent)  # of the name, and of what it links to
    hidden = _hidden(path.stem, str(pathlib.Path(folder) / path.name), {folder, target, str(pathlib.Path.cwd()), ""})
    if hidden is not None:
        what = f"{path.name} would hide the module {path.stem!r}"
        raise ConfigError(message(what, got=hidden, fix="rename the file"))
    if target not in sys.path:
        sys.path.insert(0, target)  # so that the config finds the files beside it
    if sys.path[0] != folder:
        sys.path.insert(0, folder)  # so that it is the file named that is found under its stem, now and later
    importlib.invalidate_caches()  # the file may be younger than the last look into its folder
    try:
        return _executed(path.stem, str(path))
    except ModuleNotFoundError as error:
        raise _not_installed(str(path), error) from error
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        fix = "give the module's name in its package: equikd train PACKAGE.MODULE"
        raise ConfigError(message(f"{path}: a file has no package", got=str(error), fix=fix)) from error


def _hidden(stem: str, file: str, own: set[str]) -> str | None:
    """Where another module of that name lies, loaded or installed, which a config file must not take the place of."""
    if stem in sys.modules:
        origin = getattr(sys.modules[stem], "__file__", None)
        return None if origin == file else origin or "built into Python"
    if stem in sys.builtin_module_names:
        return "built into Python"
    spec = importlib.machinery.PathFinder.find_spec(stem, [place for place in sys.path if place not in own])
    return None if spec is None or spec.loader is None else spec.origin


def _configured(module: types.ModuleType, name: str, words: list[str], changes: dict[str, str]) -> tuple[Any, str]:
    """The trainer that the words describe, and its work directory."""
    from equikd.config import cli, config, validate
    from equikd.config._flags import edited
    from equikd.train import Trainer

    settings = _settings(module, name)
    default_workdir = f"runs/{name.removesuffix('.py').replace('/', '.').rpartition('.')[2]}"
    namespace: dict[str, Any] = {"__annotations__": {}, "__doc__": f"Train {name}.", "__module__": __name__}
    if settings is not None:
        namespace["__annotations__"]["args"] = settings
        namespace |= _default_settings(module, settings)
    namespace["__annotations__"]["workdir"] = str
    namespace["workdir"] = default_workdir
    make = module.get_config
    _refuse_repeated(words, settings)
    try:
        flags: Any = config(type("Train", (), namespace))
        command = cli(flags, _bool_flags(words, settings), prog=f"equikd train {name}", use_underscores=True)
    except SystemExit as stop:
        if not stop.code:
            _list_values(make, namespace.get("args"), settings)
        raise
    trainer = make() if settings is None else make(command.args)
    if not isinstance(trainer, Trainer):
        what = f"{name}: get_config returns no trainer"
        raise ConfigError(message(what, got=type(trainer).__name__, expected="ek.Trainer"))
    return validate(edited(trainer, changes)), command.workdir


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


def _bool_flags(words: list[str], settings: type | None) -> list[str]:
    """The words with `--args.NAME=True` as tyro spells it, `--args.NAME`, and `--args.no-NAME` for False."""
    from equikd.config._flags import BOOLS

    made: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        if word.lower() in BOOLS and made and _is_bool(settings, made[-1]):
            name, text = made.pop(), word  # --args.NAME True
        elif not equals:
            made.append(word)
            continue
        if text.lower() in BOOLS and _is_bool(settings, name):
            above, dot, last = name.rpartition(".")
            made.append(name if BOOLS[text.lower()] else f"{above}{dot}no-{last}")
        else:
            made.append(word)
    return made


def _refuse_repeated(words: list[str], settings: type | None) -> None:
    """Refuses a flag that is given twice, of which the last would win in silence."""
    given: dict[str, str] = {}
    for word in words:
        flag = word.partition("=")[0]
        if not flag.startswith(("--args.", "--workdir")):
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
