"""Names: the shortest public path that imports back to the same object, or a refusal that says why."""

import enum
import operator
import pathlib
import random
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

from equikd.config._names import _public_name, display_name, import_object, public_name, spell
from equikd.errors import ConfigError


class Act(enum.StrEnum):
    relu = "same"


class Other(enum.StrEnum):
    relu = "same"


class Outer:
    class Inner:
        pass

    @classmethod
    def make(cls):
        return cls()

    def method(self):
        return self


class Heir(Outer):
    pass


def _doubled(x):
    return 2 * x


doubled = jax.jit(_doubled)
filtered = eqx.filter_jit(_doubled)
halved = lambda x: x / 2
outer = Outer()


class Access(enum.Flag):
    read = 1
    write = 2


HERE = __name__

NAMES = [
    (optax.adamw, "optax:adamw"),
    (optax.losses.softmax_cross_entropy, "optax:softmax_cross_entropy"),
    (optax.contrib.prodigy, "optax.contrib:prodigy"),
    (eqx.nn.MLP, "equinox.nn:MLP"),
    (eqx.nn.Linear, "equinox.nn:Linear"),
    (jax.nn.relu, "jax.nn:relu"),
    (jax.nn.gelu, "jax.nn:gelu"),
    (jax.nn.initializers.glorot_uniform, "jax.nn.initializers:glorot_uniform"),
    (jax.random.normal, "jax.random:normal"),
    (jax.lax.scan, "jax.lax:scan"),
    (jnp.add, "jax.numpy:add"),
    (jnp.float32, "jax.numpy:float32"),
    (jnp.bfloat16, "jax.numpy:bfloat16"),
    (np.float32, "numpy:float32"),
    (np.tanh, "numpy:tanh"),
    (np.dtype("float32"), "numpy:dtype.float32"),
    (np.dtype(jnp.bfloat16), "numpy:dtype.bfloat16"),
    (np.dtype(bool), "numpy:dtype.bool"),
    (np.linalg.norm, "numpy.linalg:norm"),
    (len, "builtins:len"),
    (int, "builtins:int"),
    (dict.fromkeys, "builtins:dict.fromkeys"),
    (operator.mul, "_operator:mul"),
    (pathlib.Path, "pathlib:Path"),
    (jax.nn, "jax.nn:"),
    (Act.relu, f"{HERE}:Act.relu"),
    (Other.relu, f"{HERE}:Other.relu"),
    (Outer.Inner, f"{HERE}:Outer.Inner"),
    (Outer.make, f"{HERE}:Outer.make"),
    (Heir.make, f"{HERE}:Heir.make"),
    (scipy.special.expit, "scipy.special:expit"),
    (random.uniform, "random:uniform"),
    (np.random.normal, "numpy.random:normal"),
    (str.upper, "builtins:str.upper"),
    (float.__add__, "builtins:float.__add__"),
    (type(None), "types:NoneType"),
    (np.dtype("U5"), "numpy:dtype.U5"),
    (np.dtype("S3"), "numpy:dtype.S3"),
    (np.dtype("M8[ns]"), "numpy:dtype.datetime64[ns]"),
    (doubled, f"{HERE}:doubled"),
    (filtered, f"{HERE}:filtered"),
    (halved, f"{HERE}:halved"),
    (outer.method, f"{HERE}:outer.method"),
]


@pytest.mark.parametrize(("thing", "name"), NAMES, ids=[name for _, name in NAMES])
def test_names_import_back_to_the_same_object(thing, name):
    assert public_name(thing) == name
    back = import_object(name)
    assert back == thing
    assert type(back) is type(thing)
    assert back is thing or isinstance(thing, types.MethodType | types.BuiltinMethodType | np.dtype)


def test_a_private_path_still_loads_and_is_written_in_public():
    assert import_object("optax._src.alias:adamw") is optax.adamw
    assert public_name(import_object("optax._src.alias:adamw")) == "optax:adamw"


def test_what_has_no_name(snapshot):
    def local():
        pass

    main = types.FunctionType(local.__code__, {}, "main")
    main.__module__, main.__qualname__ = "__main__", "main"
    stray = types.FunctionType(local.__code__, {}, "adamw")
    stray.__module__, stray.__qualname__ = "optax", "adamw"
    messages = []
    for thing in (
        lambda x: x,
        local,
        main,
        stray,
        object(),
        np.dtype(">f4"),
        np.dtype([("a", "f4")]),
        np.dtype("V8"),
        jax.jit(_doubled),
        Outer().method,
        [],
        Access.read | Access.write,
        3,
    ):
        with pytest.raises(ConfigError) as caught:
            public_name(thing)
        messages.append(str(caught.value))
    snapshot("no_name", "\n".join(messages).replace(f"{HERE}:", ""))


WRONG = """: optax :adamw optax:adamww optx:adamw optax:adamw. optax:adamw.b1 optax.nothing:f ..a:b optax:contrib
    numpy:dtype.nothing numpy:dtype.f4 numpy:dtype. numpy:dtype.(2,)f4 1:2 é:è""".split()


@pytest.mark.parametrize("name", [*WRONG, "", "a b:c", "optax :adamw", "\0:a"])
def test_what_is_no_name(name):
    with pytest.raises(ConfigError):
        import_object(name)


def test_wrong_names_are_met_with_near_matches(snapshot):
    messages = []
    for name in ("optax:adamww", "optax", "no_such_package:f", "equinox.nn:Linaer", "optax:contrib"):
        with pytest.raises(ConfigError) as caught:
            import_object(name)
        messages.append(str(caught.value))
    snapshot("wrong_names", "\n".join(messages))


def test_a_module_that_fails_to_import(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        import_object("broken_module:f")


def test_display_names_never_fail():
    assert display_name(optax.adamw) == "optax:adamw"
    assert "<lambda>" in display_name(lambda: 0)
    assert display_name([1]) == "[1]"
    assert display_name(3) == "3"


def test_values_are_spelt_as_they_are_written():
    value = {"a": (jax.nn.relu, 0.5), "b": (Act.relu,), "c": ("x", None, np.dtype("int8")), "d": eqx.nn.MLP}
    assert (
        spell(value)
        == "{'a': (jax.nn.relu, 0.5), 'b': (Act.relu,), 'c': ('x', None, dtype('int8')), 'd': equinox.nn.MLP}"
    )


def test_names_do_not_depend_on_what_was_asked_before():
    assert np.float32 == jnp.float32  # a cache by value would mix them up
    for order in ((np.float32, jnp.float32), (jnp.float32, np.float32)):
        _public_name.cache_clear()
        assert {public_name(thing) for thing in order} == {"numpy:float32", "jax.numpy:float32"}
