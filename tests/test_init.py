"""`import equikd` is light, and its lazy names are all there."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import equikd as ek

HEAVY = ("orbax", "grain", "tyro", "hypothesis", "rich", "tensorboardX", "beartype", "sklearn")

NAMESPACES = (
    "config",
    "data",
    "errors",
    "evals",
    "inspect",
    "intermediates",
    "losses",
    "metrics",
    "model",
    "optim",
    "sharding",
    "testing",
    "train",
    "tree",
    "typing",
    "wiring",
)
EVERYDAY = {
    "KeyPath": "equikd.wiring",
    "KeyPaths": "equikd.wiring",
    "Trainer": "equikd.train",
    "capture": "equikd.intermediates",
    "diff": "equikd.config",
    "lazy": "equikd.config",
    "load_model": "equikd.train",
    "override": "equikd.config",
    "pin": "equikd.config",
    "ref": "equikd.config",
    "resolve": "equikd.config",
    "save_model": "equikd.train",
    "typechecked": "equikd.typing",
    "with_defaults": "equikd.config",
}


def fresh(code: str) -> str:
    """What `code` prints in a process of its own, which finds the same equikd as this one."""
    path = str(Path(ek.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {path!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


LOADED = f"print(*sorted({{name.partition('.')[0] for name in sys.modules}} & set({HEAVY!r})))"


def test_import_loads_nothing_heavy():
    assert fresh(f"import equikd\n{LOADED}").split() == []


def test_this_would_see_a_heavy_import():
    assert fresh(f"import tyro, equikd\n{LOADED}").split() != []


def test_namespaces_load_nothing_heavy():
    touched = "\n".join(f"equikd.{name}" for name in [*NAMESPACES, *EVERYDAY])
    assert fresh(f"import equikd\n{touched}\n{LOADED}").split() == []


@pytest.mark.parametrize("name", NAMESPACES)
def test_namespace_is_the_module(name):
    assert getattr(ek, name) is importlib.import_module(f"equikd.{name}")


@pytest.mark.parametrize("name", EVERYDAY)
def test_everyday_name_is_the_one_of_its_module(name):
    assert getattr(ek, name) is getattr(importlib.import_module(EVERYDAY[name]), name)


def test_version():
    assert ek.__version__[0].isdigit()


def test_a_submodule_of_the_same_name_does_not_shadow_an_everyday_name():
    package = Path(ek.__file__).parent
    assert [name for name in EVERYDAY if (package / name).exists() or (package / f"{name}.py").exists()] == []


def test_imports_for_checkers_are_the_lazy_names():
    tree = ast.parse(Path(ek.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert seen == dict.fromkeys(NAMESPACES, "equikd") | EVERYDAY


def test_public_names():
    names = {*NAMESPACES, *EVERYDAY, "__version__"}
    assert set(ek.__all__) == names
    assert names <= set(dir(ek))


def test_unknown_name_suggests_near_ones():
    with pytest.raises(AttributeError, match=r"has no attribute 'Trayner'\n.*nearest: +'Trainer'"):
        _ = ek.Trayner


def test_unknown_name_with_nothing_near():
    with pytest.raises(AttributeError) as caught:
        _ = ek.zzzzz
    assert str(caught.value) == "module 'equikd' has no attribute 'zzzzz'"


def test_probing_is_answered():
    assert not hasattr(ek, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from equikd import nothing")
