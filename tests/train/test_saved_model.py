"""Saved models: rebuilt without a template, or filled into one; an older model survives whatever fails."""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import equikd.config as ekc
from equikd.errors import CheckpointError
from equikd.train import _saved_model
from equikd.train._saved_model import load_model, save_model

KEY = jax.random.key(0)
EXOTIC = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int4", "uint2", "int8", "uint16", "complex64", "bool"]


@ekc.config
class Rates:
    rate: float = 0.25
    width: int = 3


class Encoder(eqx.Module):
    layers: list[Any]
    norm: eqx.nn.LayerNorm
    scale: jax.Array = eqx.field(converter=lambda value: jnp.asarray(value) * 2)
    options: dict[str, Any] = eqx.field(static=True)

    def __init__(self, key: jax.Array) -> None:
        self.layers = [eqx.nn.Linear(3, 3, key=key), jax.nn.gelu, eqx.nn.Dropout(0.3)]
        self.norm = eqx.nn.LayerNorm(3)
        self.scale = 1.0
        self.options = {"axis": (0, 1), "dtype": jnp.bfloat16, "limit": float("inf")}


class Classifier(eqx.Module, strict=True):
    encoder: Encoder
    heads: dict[str, eqx.nn.Linear]
    rates: Rates
    activation: Any
    name: str = eqx.field(static=True)

    def __check_init__(self) -> None:
        assert self.name == "first"


class WithLambda(eqx.Module):
    layer: eqx.nn.Linear
    rate: float
    act: Any = eqx.field(static=True)
    other: Any = None


def classifier(key: jax.Array = KEY) -> Classifier:
    heads = {"a.b": eqx.nn.Linear(3, 2, key=key), "c/d'": eqx.nn.Linear(3, 1, use_bias=False, key=key)}
    return Classifier(Encoder(key), heads, Rates(), functools.partial(jax.nn.softmax, axis=0), "first")


def equal(left: Any, right: Any) -> bool:
    return bool(eqx.tree_equal(left, right, typematch=True))


def cast(model: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, model)


MODELS = {
    "mlp": lambda: eqx.nn.MLP(2, 3, 4, 2, key=KEY),
    "mlp in bfloat16": lambda: cast(eqx.nn.MLP(2, 3, 4, 2, key=KEY), jnp.bfloat16),
    "conv": lambda: eqx.nn.Conv2d(1, 2, 3, key=KEY),
    "dropout": lambda: eqx.nn.Dropout(0.3),
    "layer norm": lambda: eqx.nn.LayerNorm(3, eps=1e-3),
    "gru": lambda: eqx.nn.GRUCell(2, 3, key=KEY),
    "attention": lambda: eqx.nn.MultiheadAttention(2, 4, key=KEY),
    "rotary": lambda: eqx.nn.RotaryPositionalEmbedding(4, dtype=jnp.float16),
    "batch norm": lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema"),
    "batch norm in batch mode": lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch"),
    "spectral norm": lambda: eqx.nn.make_with_state(eqx.nn.SpectralNorm)(
        eqx.nn.Linear(2, 3, key=KEY), "weight", key=KEY
    ),
    "sequence": lambda: eqx.nn.Sequential([eqx.nn.Linear(2, 3, key=KEY), eqx.nn.Lambda(jnp.tanh)]),
    "nested": classifier,
    "key": lambda: {"key": jax.random.split(KEY, 2), "rbg": jax.random.key(1, impl="rbg")},
    "one array": lambda: jnp.ones(2),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_without_a_template(tmp_path, name):
    model = MODELS[name]()
    save_model(tmp_path / "m", model)
    loaded = load_model(tmp_path / "m")
    leaves = [
        [leaf for leaf in jax.tree.leaves(tree) if type(leaf) is not functools.partial] for tree in (loaded, model)
    ]
    assert equal(*leaves)
    assert jax.tree.structure(loaded) == jax.tree.structure(model)  # classes, static fields, markers of states
    assert equal(load_model(tmp_path / "m", like=model), model)


def test_a_loaded_model_computes_the_same(tmp_path):
    model, state = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential([eqx.nn.Linear(2, 3, key=KEY), eqx.nn.BatchNorm(3, "b", mode="ema")])
    )()
    run = jax.vmap(lambda m, s, x: m(x, s), in_axes=(None, None, 0), out_axes=(0, None), axis_name="b")
    x = jnp.arange(8.0).reshape(4, 2)
    _, state = run(model, state, x)
    save_model(tmp_path / "m", (model, state))
    assert equal(run(*load_model(tmp_path / "m"), x), run(model, state, x))


def test_configs_in_a_model_stay_plain_data(tmp_path):
    trained = jax.tree.map(lambda leaf: leaf, classifier())  # the config's floats are arrays now
    save_model(tmp_path / "m", trained)
    for loaded in (load_model(tmp_path / "m"), load_model(tmp_path / "m", like=classifier())):
        assert loaded.rates == Rates()
        assert type(loaded.rates.rate) is float
        assert loaded.encoder.scale == 2  # the converter did not run again


@settings(max_examples=40)
@given(st.data())
def test_arrays_of_any_dtype_shape_and_name(data):
    names = data.draw(st.lists(st.text(max_size=5), unique=True, max_size=4))
    tree = {}
    for name in names:
        dtype, shape = (
            jnp.dtype(data.draw(st.sampled_from(EXOTIC))),
            data.draw(st.sampled_from([(), (0,), (2, 0), (3, 2)])),
        )
        array = np.random.default_rng(len(tree)).integers(0, 2, shape).astype(dtype)
        tree[name] = data.draw(st.sampled_from([array, jnp.asarray(array)]))
    with tempfile.TemporaryDirectory() as folder:
        save_model(f"{folder}/m", tree)
        for loaded in (load_model(f"{folder}/m"), load_model(f"{folder}/m", like=tree)):
            assert loaded.keys() == tree.keys()
            for name, leaf in tree.items():
                assert isinstance(loaded[name], jax.Array) == isinstance(leaf, jax.Array)
                assert (loaded[name].dtype, loaded[name].shape) == (leaf.dtype, leaf.shape)
                assert np.asarray(loaded[name]).tobytes() == np.asarray(leaf).tobytes()


def test_kinds_of_values_are_kept(tmp_path):
    model = (jnp.asarray(0.5), jnp.asarray(3), np.float32(1), np.ones(2), 0.1, True, 7, float("nan"))
    save_model(tmp_path / "m", model)
    for loaded in (load_model(tmp_path / "m"), load_model(tmp_path / "m", like=model)):
        assert [type(part) for part in loaded] == [type(part) for part in model]
        assert [part.weak_type for part in loaded[:2]] == [True, True]
        assert repr(loaded[4:]) == "(0.1, True, 7, nan)"


def test_numpy_opens_the_arrays_and_json_the_rest(tmp_path):
    save_model(tmp_path / "m", cast(classifier(), jnp.bfloat16))
    (file,) = (tmp_path / "m").glob("*.npz")
    with np.load(file, allow_pickle=False) as arrays:
        bits = arrays["encoder.layers[0].weight"]
    assert bits.dtype == np.uint16
    expected = Encoder(KEY).layers[0].weight.astype(jnp.bfloat16)
    assert (bits.view(jnp.bfloat16) == np.asarray(expected)).all()
    document = json.loads((tmp_path / "m" / "model.json").read_text())
    assert document["entries"]["encoder.layers[0].weight"] == {"dtype": "bfloat16", "shape": [3, 3]}


def test_parts_without_a_name_need_a_template(tmp_path, snapshot):
    class Local(eqx.Module):
        w: jax.Array

    build = lambda key, rate: WithLambda(
        eqx.nn.Linear(2, 2, key=key), rate, lambda x: x, [Local(jax.random.normal(key, (2,))), np.array(["text"])]
    )
    model = build(KEY, 0.5)
    save_model(tmp_path / "m", model)
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path / "m")
    snapshot("no_names", str(error.value).replace(str(tmp_path), "models").replace(__name__, "tests"))
    like = build(jax.random.key(1), 0.1)
    loaded = load_model(tmp_path / "m", like=like)
    assert equal(loaded.layer, model.layer)
    assert equal(loaded.other[0].w, model.other[0].w)
    assert loaded.rate == 0.5
    assert loaded.act is like.act


def test_a_template_may_be_shapes_only(tmp_path):
    model = classifier()
    save_model(tmp_path / "m", model)
    shapes = eqx.filter_eval_shape(classifier)
    loaded = load_model(tmp_path / "m", like=shapes)
    assert equal(loaded.heads, model.heads)


def test_every_mismatch_with_a_template_is_listed(tmp_path, snapshot):
    save_model(tmp_path / "m", {"layer": eqx.nn.Linear(2, 3, key=KEY), "rate": 0.5, "old": jnp.ones(1), "n": 1})
    like = {"layer": cast(eqx.nn.Linear(3, 3, key=KEY), jnp.float16), "rate": jnp.ones(()), "new": 1.0, "n": 1.0}
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path / "m", like=like)
    snapshot("mismatches", str(error.value).replace(str(tmp_path), "models"))


def test_saving_again_replaces_the_model_and_leaves_nothing(tmp_path):
    for value in (1.0, 2.0):
        save_model(tmp_path / "m", {"w": jnp.full(3, value)})
    assert load_model(tmp_path / "m")["w"][0] == 2
    (tmp_path / "m" / "arrays-00000000.npz").write_bytes(b"left by a killed save")
    (tmp_path / "m" / "README").write_text("mine")
    save_model(tmp_path / "m", {"w": jnp.full(3, 3.0)})
    assert load_model(tmp_path / "m")["w"][0] == 3
    assert len(list((tmp_path / "m").iterdir())) == 3


@pytest.mark.parametrize("place", ["write_atomically", "os.fsync", "np.lib.format.write_array"])
@pytest.mark.parametrize("before", [True, False])
def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch, place, before):
    if before:
        save_model(tmp_path / "m", jnp.ones(3))
    listing = sorted(tmp_path.rglob("*"))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"equikd.train._saved_model.{place}", fail)
        with pytest.raises(OSError, match="No space left"):
            save_model(tmp_path / "m", jnp.zeros(3))
    assert sorted(tmp_path.rglob("*")) == listing
    assert not before or load_model(tmp_path / "m")[0] == 1
    save_model(tmp_path / "m", jnp.zeros(3))


@pytest.mark.slow
def test_a_save_killed_anywhere_leaves_the_older_model(tmp_path):
    save_model(tmp_path / "m", jnp.ones(3))
    script = """if 1:
        import os, sys, jax.numpy as jnp
        from equikd.train import _saved_model
        _saved_model.write_atomically = lambda *args: os.kill(os.getpid(), 9)
        _saved_model.save_model(sys.argv[1], jnp.zeros(3))
    """
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "m")], check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == -9
    assert len(list((tmp_path / "m").iterdir())) == 3
    assert load_model(tmp_path / "m")[0] == 1
    save_model(tmp_path / "m", jnp.zeros(3))
    assert len(list((tmp_path / "m").iterdir())) == 2


def test_what_is_no_saved_model_is_neither_read_nor_written_over(tmp_path, snapshot):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("run", "file"):
        with pytest.raises(CheckpointError) as error:
            save_model(tmp_path / name, jnp.ones(1))
        snapshot(f"save_{name}", str(error.value).replace(str(tmp_path), "models"))
    for name in ("run", "file", "empty", "missing"):
        with pytest.raises(CheckpointError) as error:
            load_model(tmp_path / name)
        snapshot(f"load_{name}", str(error.value).replace(str(tmp_path), "models"))
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json"]
    save_model(tmp_path / "empty", jnp.ones(1))


@pytest.mark.parametrize("like", [None, {"w": jnp.ones(3)}])
@pytest.mark.parametrize("breakage", ["format", "json", "arrays", "truncated", "lie"])
def test_a_broken_model_is_said_to_be(tmp_path, breakage, like):
    save_model(tmp_path / "m", {"w": jnp.ones(3)})
    document, (file,) = tmp_path / "m" / "model.json", (tmp_path / "m").glob("*.npz")
    match breakage:
        case "format":
            document.write_text(document.read_text().replace('"equikd_model": 1', '"equikd_model": 99'))
        case "json":
            document.write_text(document.read_text()[:100])
        case "arrays":
            file.unlink()
        case "truncated":
            file.write_bytes(file.read_bytes()[:60])
        case "lie":
            document.write_text(document.read_text().replace('"w": {"dtype": "float32"', '"w": {"dtype": "float64"'))
    expected = {"format": "unknown format", "json": "no saved model"}.get(breakage, "is broken")
    with pytest.raises(CheckpointError, match=expected if not (like and breakage == "lie") else "1 leaves differ"):
        load_model(tmp_path / "m", like=like)


def test_a_dtype_that_jax_is_not_set_up_for_is_not_cast(tmp_path):
    with jax.enable_x64(True):
        save_model(tmp_path / "m", {"w": jnp.ones(2, jnp.float64), "n": np.ones(2)})
        assert load_model(tmp_path / "m")["w"].dtype == jnp.float64
    with pytest.raises(CheckpointError, match=r"w: JAX does not hold float64\[2\]"):
        load_model(tmp_path / "m")


def test_donated_arrays_are_refused_before_anything_is_written(tmp_path):
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(CheckpointError, match=r"w: its buffer was donated"):
        save_model(tmp_path / "m", {"w": gone})
    assert not list(tmp_path.iterdir())


def test_saving_needs_no_orbax():
    script = "import sys, equikd.train._saved_model; assert 'orbax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
    assert _saved_model.FORMAT == 1
