"""Config modules by name or by file, imported; whatever keeps one from being imported is told as the user's error."""

import importlib
import importlib.machinery
import os
import pathlib
import re
import sys
import sysconfig
import traceback
import types

from equikd.errors import ConfigError, message, nearest


def origins(error: BaseException) -> list[str]:
    """The lines of the user's own code that an error came through, the innermost last."""
    found = []
    others = (f"{pathlib.Path(__file__).parent.parent}{os.sep}", sysconfig.get_paths()["stdlib"], "<")
    for frame in traceback.extract_tb(error.__traceback__):
        path = pathlib.Path(frame.filename)
        if path.is_absolute() and not frame.filename.startswith(others) and "site-packages" not in path.parts:
            found.append(f"{path}:{frame.lineno} in {frame.name}: {frame.line}")
    return found


def origin(error: BaseException) -> str | None:
    """The innermost of them."""
    return next(reversed(origins(error)), None)


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
        raise ConfigError(message(what, where=origin(error), got=got, fix=fix)) from error


def _not_installed(name: str, error: ModuleNotFoundError) -> ConfigError:
    fix = "install it, or correct the import"
    return ConfigError(message(f"{name} cannot be imported", where=origin(error), got=str(error), fix=fix))


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
