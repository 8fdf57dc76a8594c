"""equikd: an experiment is plain data, and that same data is a JAX pytree.

`import equikd as ek` gives namespaces (`ek.losses`, `ek.metrics`, ...) and the everyday names (`ek.Trainer`, `ek.lazy`,
...). Both are lazy (PEP 562): a name is imported when it is first touched, so the import itself costs milliseconds and
loads none of the heavy dependencies. Type checkers and editors read the ordinary imports below instead, and see
everything.

Example:
    >>> import equikd as ek
    >>> ek.errors.EquikdError.__name__
    'EquikdError'
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equikd import config as config
    from equikd import data as data
    from equikd import errors as errors
    from equikd import evals as evals
    from equikd import inspect as inspect
    from equikd import intermediates as intermediates
    from equikd import losses as losses
    from equikd import metrics as metrics
    from equikd import model as model
    from equikd import optim as optim
    from equikd import sharding as sharding
    from equikd import testing as testing
    from equikd import train as train
    from equikd import tree as tree
    from equikd import typing as typing
    from equikd import wiring as wiring
    from equikd.config import diff as diff
    from equikd.config import lazy as lazy
    from equikd.config import override as override
    from equikd.config import pin as pin
    from equikd.config import ref as ref
    from equikd.config import resolve as resolve
    from equikd.config import with_defaults as with_defaults
    from equikd.intermediates import capture as capture
    from equikd.train import Trainer as Trainer
    from equikd.train import load_model as load_model
    from equikd.train import save_model as save_model
    from equikd.typing import typechecked as typechecked
    from equikd.wiring import KeyPath as KeyPath
    from equikd.wiring import KeyPaths as KeyPaths

    __version__: str

# Name -> module that holds it; a namespace is that module itself. Checkers read neither a table nor an `__all__` made
# from one, so the names stand here three times; a test holds the three together.
_HOMES = {
    "KeyPath": "equikd.wiring",
    "KeyPaths": "equikd.wiring",
    "Trainer": "equikd.train",
    "capture": "equikd.intermediates",
    "config": "equikd.config",
    "data": "equikd.data",
    "diff": "equikd.config",
    "errors": "equikd.errors",
    "evals": "equikd.evals",
    "inspect": "equikd.inspect",
    "intermediates": "equikd.intermediates",
    "lazy": "equikd.config",
    "load_model": "equikd.train",
    "losses": "equikd.losses",
    "metrics": "equikd.metrics",
    "model": "equikd.model",
    "optim": "equikd.optim",
    "override": "equikd.config",
    "pin": "equikd.config",
    "ref": "equikd.config",
    "resolve": "equikd.config",
    "save_model": "equikd.train",
    "sharding": "equikd.sharding",
    "testing": "equikd.testing",
    "train": "equikd.train",
    "tree": "equikd.tree",
    "typechecked": "equikd.typing",
    "typing": "equikd.typing",
    "wiring": "equikd.wiring",
    "with_defaults": "equikd.config",
}

__all__ = [
    "KeyPath",
    "KeyPaths",
    "Trainer",
    "__version__",
    "capture",
    "config",
    "data",
    "diff",
    "errors",
    "evals",
    "inspect",
    "intermediates",
    "lazy",
    "load_model",
    "losses",
    "metrics",
    "model",
    "optim",
    "override",
    "pin",
    "ref",
    "resolve",
    "save_model",
    "sharding",
    "testing",
    "train",
    "tree",
    "typechecked",
    "typing",
    "wiring",
    "with_defaults",
]


if not TYPE_CHECKING:  # a checker that saw `__getattr__` would accept every name, misspelt ones too

    def __getattr__(name: str) -> object:
        """Imports the home of `name` at its first use and keeps the value, so that this runs once a name."""
        if name == "__version__":
            value: object = _version()
        elif name in _HOMES:
            home = importlib.import_module(_HOMES[name])
            value = home if _HOMES[name] == f"{__name__}.{name}" else getattr(home, name)
        else:
            raise AttributeError(_unknown(name), name=name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, imported or not, so that completion offers them all and nothing else."""
    return sorted(__all__)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:  # a checkout on the path that was never installed
        return "0+unknown"


def _unknown(name: str) -> str:
    what = f"module {__name__!r} has no attribute {name!r}"
    # Python and its tools probe dunders (`__path__`, `__wrapped__`, ...) with no user there to read near matches.
    if name.startswith("__"):
        return what
    from equikd.errors import message, nearest

    return message(what, near=nearest(name, __all__))
