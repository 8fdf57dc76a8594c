"""The import hook: every function and class of a module is checked, and nothing is left behind."""

import importlib
import sys

import jax.numpy as jnp
import pytest

from equikd.typing import ShapeError, install_import_hook

SOURCE = '''
"""A module."""
from __future__ import annotations
import dataclasses
import typing
import equinox as eqx
import jax
from jaxtyping import Array, Float

def double(x: Float[Array, " n"]) -> Float[Array, " n"]:
    def inner(y: Float[Array, "a a"]): return y
    return inner(x) if x.ndim == 2 else x * 2

@dataclasses.dataclass
class Pair:
    a: Float[Array, " n"]
    b: Float[Array, " n"]
    def total(self, c: Float[Array, " n"]) -> Float[Array, ""]:
        return c.sum()

class Model(eqx.Module):
    w: Float[Array, "n n"]
    @jax.jit
    def __call__(self, x: Float[Array, " n"]):
        return self.w @ x

@typing.no_type_check
def unchecked(x: Float[Array, " n"]): return x

@jax.custom_vjp
def custom(x: Float[Array, " n"]): return x
custom.defvjp(lambda x: (x, None), lambda _, g: (g,))
'''


@pytest.fixture
def name(tmp_path, monkeypatch):
    (tmp_path / "hooked_package").mkdir()
    (tmp_path / "hooked_package" / "__init__.py").write_text("")
    (tmp_path / "hooked_package" / "inner.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "hooked_package.inner"
    for module in [one for one in sys.modules if one.startswith("hooked_package")]:
        del sys.modules[module]


def test_all_of_a_package(name, tmp_path):
    before = list(sys.meta_path)
    with install_import_hook("hooked_package"):
        module = importlib.import_module(name)
    assert sys.meta_path == before
    assert not list(tmp_path.rglob("inner*.pyc"))
    assert module.__doc__ == "A module."
    assert module.double(jnp.ones(2)).shape == (2,)
    pair, model = module.Pair(jnp.ones(2), jnp.ones(2)), module.Model(jnp.ones((2, 2)))
    assert model(jnp.ones(2)).shape == (2,)
    assert module.unchecked("anything") == "anything"
    module.custom(jnp.ones(2))
    for refused in (
        lambda: module.double(jnp.ones((2, 3))),
        lambda: module.Pair(jnp.ones(2), jnp.ones(3)),
        lambda: pair.total(jnp.ones((2, 2))),
        lambda: module.Model(jnp.ones((2, 3))),
        lambda: model(jnp.ones((2, 2))),
        lambda: module.custom(jnp.ones((2, 2))),
    ):
        with pytest.raises(ShapeError) as error:
            refused()
        assert "inner.py" in str(error.value)


def test_without_the_hook_nothing_is_checked(name):
    install_import_hook(["other_package"]).uninstall()
    module = importlib.import_module(name)
    module.Pair(jnp.ones(2), jnp.ones(3))
