"""Starting from weights: what is taken, what is refused, and that nothing but arrays is."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import equikd as ek
from equikd.config._flags import edited
from equikd.errors import CheckpointError, ConfigError, EquikdError
from equikd.train import InitFrom, _checkpoint, _source
from equikd.train._init_from import _weights, weights_of
from equikd.train._setup import prepare
from equikd.train._weights import Places
from equikd.tree import matches, named_leaves, parse
from tests.train import _experiment, _small
from tests.train._experiment import Args, Net
from tests.train._small import CLASSES, FEATURES, WIDTH, assert_same, differs, quick

KEY = jax.random.key(5)


def net(width: int = 8, **changes: Any) -> ek.Trainer:
    trainer = _experiment.get_config(Args(num_steps=4, save_every=2, width=width, log_every=2))
    lighter = {"writers": (), "evals": {}, "metrics": {}, "optimizer": ek.lazy(optax.sgd)(0.1, momentum=0.9)}
    return ek.override(trainer, {"seed": 1} | lighter | changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A directory with the run `a`, which has trained BatchNorm and dropout, and its result."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, net(seed=0).train(folder / "a")


@pytest.fixture
def here(runs, monkeypatch):
    """The result of the run `a` in the working directory."""
    folder, result = runs
    monkeypatch.chdir(folder)
    return result


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def arrays_of(state: Any) -> Any:
    """A model's arrays without its hyperparameters."""
    leaves = zip(jax.tree.leaves(state.model), state.hyperparameter, strict=True)
    return [leaf for leaf, hyper in leaves if not hyper]


def refusal(trainer: ek.Trainer, kind: type[EquikdError] = CheckpointError) -> str:
    """What a fresh start says."""
    with pytest.raises(kind) as error:
        trainer.init()
    assert len(str(error.value).splitlines()) <= 40
    return str(error.value).replace(str(Path.cwd()), "HERE")


# What is taken


def test_a_run_gives_its_model_and_state_and_nothing_else(here, capsys):
    fresh = net().init()
    before = contents(Path("a"))
    state = net(init_from="a", **{"model.dropout": 0.125}).init()
    assert contents(Path("a")) == before  # only read
    assert capsys.readouterr().err == "init_from: 9 of 9 arrays from checkpoint 4 of a\n"
    assert_same(arrays_of(state), arrays_of(here.state))
    assert_same(state.model_state, here.state.model_state)
    assert differs(fresh.model_state, here.state.model_state)
    assert float(state.model.dropout.p) == 0.125  # of the config
    assert_same((state.step, state.opt_state, state.key), (fresh.step, fresh.opt_state, fresh.key))
    assert jax.tree.structure(state) == jax.tree.structure(fresh)


@pytest.mark.parametrize("place", [InitFrom("a", step=2), "a/checkpoints/2", InitFrom(Path("a/checkpoints/2"))])
def test_one_checkpoint(here, place):
    state = net(init_from=place).init()
    assert_same((state.model.first, state.model_state), _at_step_2())
    assert differs(state.model.first, here.model.first)


def _at_step_2() -> Any:
    saved = net(seed=0).restore("a", 2)
    return saved.model.first, saved.model_state


def test_a_saved_model(here, tmp_path, capsys):
    fresh = net().init()
    ek.save_model(tmp_path / "alone", here.model)
    state = net(init_from=tmp_path / "alone").init()
    assert_same(arrays_of(state), arrays_of(here.state))
    assert_same(state.model_state, fresh.model_state)  # the source has none
    told = capsys.readouterr().err
    assert told.endswith(f"6 of 6 arrays from the saved model {tmp_path}/alone; it holds no eqx.nn.State\n")

    ek.save_model(tmp_path / "both", (here.model, here.state.model_state))
    state = net(init_from=tmp_path / "both").init()
    assert_same((arrays_of(state), state.model_state), (arrays_of(here.state), here.state.model_state))

    live = Net(8, 0.1, key=KEY)  # with its first state inside
    ek.save_model(tmp_path / "live", live)
    state = net(init_from=tmp_path / "live").init()
    assert_same(state.model.first, live.first)
    assert_same(state.model_state, eqx.nn.State(live))
    assert "no eqx.nn.State" not in capsys.readouterr().err.splitlines()[-1]


def test_training_starts_there_and_a_resume_ignores_it(here, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree("a", source)
    trainer = net(init_from=str(source), num_steps=2)
    state = trainer.init()
    for batch, _ in zip(trainer.batches(state), range(2), strict=False):
        state, _ = ek.train.step(trainer, state, batch)
    assert_same(trainer.train(tmp_path / "b").state, state)
    whole = ek.override(trainer, {"num_steps": 4}).train().state
    capsys.readouterr()
    shutil.rmtree(source)
    resumed = ek.override(trainer, {"num_steps": 4})
    assert_same(resumed.train(tmp_path / "b").state, whole)
    assert "init_from" not in capsys.readouterr().err
    assert_same(resumed.restore(tmp_path / "b").model, whole.model)
    resumed.evaluate(whole)
    with pytest.raises(CheckpointError, match="there is nothing at"):
        resumed.train(tmp_path / "c")
    assert not (tmp_path / "c").exists()

    text = (tmp_path / "b" / "config.json").read_text()
    assert ek.config.from_json(text).init_from == str(source)


def test_it_is_data_and_retraces_nothing(here):
    one = InitFrom("a", step=2, rename={"first.**": "first.**"}, include=("**",), cast=True)
    assert ek.config.from_json(ek.config.to_json(one)) == one
    trainer = net(init_from=one)
    assert ek.override(trainer, {"init_from.step": 4}).init_from.step == 4
    assert not hasattr(trainer.in_step, "init_from")
    plain = quick()
    plain.train()
    folder = Path("plain")
    ek.save_model(folder, plain.init().model)
    before = _small.Plain.traces[0]
    ek.override(plain, {"init_from": "plain"}).train()
    ek.override(plain, {"init_from": InitFrom("plain", include="first.**", partial=True)}).train()
    assert _small.Plain.traces[0] == before


def test_optimizer_and_extra_are_made_of_the_weights(tmp_path):
    ek.save_model(tmp_path / "m", _small.Plain(key=KEY))
    state = quick(init_from=tmp_path / "m", init_extra=lambda model: model.first.weight).init()
    assert_same(state.extra, _small.Plain(key=KEY).first.weight)


# Parts, and other names


class Adapted(eqx.Module):
    """A model with an adapter of low rank beside its first layer."""

    base: _small.Plain
    down: jax.Array
    up: jax.Array

    def __init__(self, rank: int, *, key: jax.Array) -> None:
        self.base = _small.Plain(key=key)
        self.down, self.up = jnp.ones((rank, FEATURES)), jnp.zeros((WIDTH, rank))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.base.last(jax.nn.relu(self.base.first(x) + self.up @ self.down @ x))


class Headed(eqx.Module):
    body: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, classes: int = CLASSES, width: int = WIDTH, *, key: jax.Array) -> None:
        self.body = eqx.nn.Linear(FEATURES, width, key=key)
        self.head = eqx.nn.Linear(width, classes, key=jax.random.fold_in(key, 1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jax.nn.relu(self.body(x)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A saved model with `first` and `last`."""
    path = tmp_path_factory.mktemp("saved") / "plain"
    ek.save_model(path, _small.Plain(key=KEY))
    return path


@pytest.mark.parametrize("more", [{"partial": True}, {"exclude": ("down", "up")}, {"include": "base.**"}])
def test_below_a_wrapper(plain, more):
    trainer = quick(ek.lazy(Adapted)(2), trainable=("down", "up"))
    trainer = ek.override(trainer, {"init_from": InitFrom(plain, rename={"**": "base.**"}, **more)})
    found = ek.inspect.check(trainer).init_from
    assert found is not None
    assert found.taken["base.first.weight"] == "first.weight"
    assert (found.missing, found.excluded) == ((("down", "up"), ()) if "partial" in more else ((), ("down", "up")))
    model = trainer.init().model
    assert_same(model.base, _small.Plain(key=KEY))
    assert_same(model.down, np.ones((2, FEATURES), np.float32))


def test_a_new_head(plain):
    names = {"first.**": "body.**", "last.**": "head.**"}
    trainer = quick(ek.lazy(Headed)(5), seed=3)
    fresh = trainer.init().model
    model = ek.override(trainer, {"init_from": InitFrom(plain, rename=names, exclude="head.**")}).init().model
    assert_same(model.body, _small.Plain(key=KEY).first)
    assert_same(model.head, fresh.head)
    partly = ek.override(trainer, {"init_from": InitFrom(plain, rename=names, partial=True, cast=True)})
    assert "head.weight (last.weight there): float32[3, 8]" in refusal(partly)  # a shape is never passed over


class Norms(eqx.Module):
    """Two layers whose states have the same shapes."""

    one: eqx.nn.BatchNorm
    two: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        self.one, self.two = (eqx.nn.BatchNorm(FEATURES, "batch", mode="ema") for _ in range(2))
        self.last = eqx.nn.Linear(FEATURES, CLASSES, key=key)

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        x, state = self.one(x, state)
        x, state = self.two(x, state)
        return self.last(x), state


class Wrapped(eqx.Module):
    base: Any

    def __init__(self, base: Any) -> None:
        self.base = base

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        return self.base(x, state)


@pytest.mark.parametrize("kind", ["checkpoint", "saved model"])
def test_values_of_the_state_go_by_path(tmp_path, kind):
    trainer = quick(ek.lazy(Norms)())
    model, state = eqx.nn.make_with_state(Norms)(key=KEY)
    numbers = iter(range(2, 99))
    fill = lambda leaf: jnp.full(leaf.shape, next(numbers)).astype(leaf.dtype)
    state = jax.tree.map(fill, state)
    if kind == "checkpoint":
        _saved_checkpoint(tmp_path / "run", trainer.init(model=model, model_state=state))
    else:
        ek.save_model(tmp_path / "run", (model, state))
    swap = InitFrom(tmp_path / "run", rename={"one.**": "two.**", "two.**": "one.**"})
    swapped = ek.override(trainer, {"init_from": swap}).init()
    for here, there in (("one", "two"), ("two", "one")):
        mine, theirs = (getattr(one, name).ema_state_index for one, name in ((swapped.model, here), (model, there)))
        assert_same(swapped.model_state.get(mine), state.get(theirs))
    below = InitFrom(tmp_path / "run", rename={"**": "base.**"})
    wrapped = quick(ek.lazy(Wrapped)(ek.lazy(Norms)()), init_from=below).init()
    assert_same((wrapped.model.base, jax.tree.leaves(wrapped.model_state)), (model, jax.tree.leaves(state)))


def test_a_swap_and_a_partial_load(plain, capsys):
    swapped = InitFrom(plain, rename={"first.**": "last.**", "last.**": "first.**"})
    assert "float32[8, 6] in the saved model, float32[3, 8] in this model" in refusal(quick(init_from=swapped))
    trainer = quick(init_from=InitFrom(plain, rename={"last.*": "lost.*"}, partial=True))
    found = ek.inspect.check(trainer).init_from
    assert found is not None
    assert (found.missing, found.unused) == (("last.weight", "last.bias"), ("last.weight", "last.bias"))
    assert set(found.taken) == {"first.weight", "first.bias"}
    fresh = quick().init().model
    capsys.readouterr()
    model = trainer.init().model
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert str(found) in told
    assert_same(model.first, _small.Plain(key=KEY).first)
    assert_same(model.last, fresh.last)


# Kinds of arrays


class Zoo(eqx.Module):
    """A model with all kinds of arrays."""

    linear: eqx.nn.Linear
    phase: Any
    nothing: Any
    table: Any
    flags: Any
    keys: jax.Array
    named: dict[str, Any]

    def __init__(self, seed: int = 0, dtype: Any = jnp.float32, ints: Any = jnp.int32, *, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(FEATURES, CLASSES, dtype=dtype, key=key)
        self.phase = np.asarray([1 + seed * 1j, 2.0], np.complex64)
        self.nothing = np.zeros((0, 3), dtype)
        self.table = np.arange(seed, seed + 4).astype(ints)
        self.flags = np.asarray([seed > 0, True])
        self.keys = jax.random.split(jax.random.key(seed), 2)
        self.named = {"a.b": np.full(2, seed, dtype), "c/d'": np.full((), seed, np.float16)}

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x.astype(self.linear.weight.dtype)).astype(jnp.float32)


@pytest.mark.parametrize("kind", ["checkpoint", "saved model"])
def test_all_kinds_of_arrays(tmp_path, kind):
    zoo = Zoo(7, key=KEY)
    if kind == "checkpoint":
        _saved_checkpoint(tmp_path / "run", quick(ek.lazy(Zoo)(7)).init(model=zoo))
    else:
        ek.save_model(tmp_path / "run", zoo)
    trainer = quick(ek.lazy(Zoo)(3), init_from=tmp_path / "run")
    assert_same(trainer.init().model, zoo)


def _saved_checkpoint(path: Path, state: Any, step: int = 10) -> None:
    with ek.train.CheckpointStore(path / "checkpoints", keep=9) as store:
        store.save(step, eqx.filter({"state": state}, eqx.is_array), {"model": _source.model_facts(state)})


def test_dtypes_are_cast_on_request(tmp_path, snapshot):
    wide = Zoo(7, key=KEY)
    ek.save_model(tmp_path / "wide", wide)
    narrow = quick(ek.lazy(Zoo)(3, jnp.bfloat16, jnp.int8), init_from=tmp_path / "wide")
    snapshot("dtypes", refusal(narrow).replace(str(tmp_path), "HERE"))
    cast = ek.override(narrow, {"init_from": InitFrom(tmp_path / "wide", cast=True)})
    found = ek.inspect.check(cast).init_from
    assert found is not None
    assert set(found.cast) == {"linear.weight", "linear.bias", "nothing", "table", "named['a.b']"}
    model = cast.init().model
    assert_same(model.linear, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide.linear))
    assert_same(model.table, np.arange(7, 11, dtype=np.int8))
    assert_same((model.phase, model.keys, model.flags), (wide.phase, wide.keys, wide.flags))

    ek.save_model(tmp_path / "narrow", model)  # and back
    back = quick(ek.lazy(Zoo)(3), init_from=InitFrom(tmp_path / "narrow", cast=True)).init().model
    assert_same(back.linear, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.linear))


class Held(eqx.Module):
    linear: eqx.nn.Linear
    held: Any

    def __init__(self, held: Any, *, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(FEATURES, CLASSES, key=key)
        self.held = held

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def of_dtype(dtype: Any, value: Any = 1) -> ek.Trainer:
    return quick(ek.lazy(Held)(ek.lazy(jnp.full)((2,), value, dtype)))


def saved_with(path: Path, held: Any) -> Path:
    ek.save_model(path, eqx.tree_at(lambda m: m.held, Held(0.0, key=KEY), held))
    return path


def test_what_cast_does_not_do(tmp_path, snapshot):
    told = []
    for name, held, dtype in (
        ("a float for an int", jnp.ones(2), jnp.int32),
        ("a complex for a float", jnp.ones(2, jnp.complex64), jnp.float32),
        ("a bool for a float", jnp.ones(2, bool), jnp.float32),
        ("keys for a float", jax.random.split(KEY, 2), jnp.float32),
    ):
        path = saved_with(tmp_path / name.replace(" ", "_"), held)
        told.append(refusal(ek.override(of_dtype(dtype), {"init_from": InitFrom(path, cast=True)})))
    snapshot("not_cast", "\n\n".join(told).replace(str(tmp_path), "HERE"))


def test_values_that_do_not_fit(tmp_path, snapshot):
    told = []
    for name, held, dtype in (
        ("too_large", np.asarray([1e30, 1], np.float32), jnp.float16),
        ("too_many", np.asarray([1, 300], np.int32), jnp.int8),
        ("negative", np.asarray([1, -1], np.int32), jnp.uint32),
        ("eight_bits", np.asarray([1, 1e6], np.float32), jnp.float8_e4m3fn),
    ):
        path = saved_with(tmp_path / name, jnp.asarray(held))
        trainer = ek.override(of_dtype(dtype), {"init_from": InitFrom(path, cast=True)})
        with pytest.raises(CheckpointError) as error:
            trainer.train(tmp_path / "run")
        assert not (tmp_path / "run").exists()
        told.append(str(error.value))
    snapshot("do_not_fit", "\n\n".join(told).replace(str(tmp_path), "HERE"))
    path = saved_with(tmp_path / "infinite", jnp.asarray([jnp.inf, jnp.nan]))  # as they were: nothing is lost
    held = ek.override(of_dtype(jnp.bfloat16), {"init_from": InitFrom(path, cast=True)}).init().model.held
    np.testing.assert_array_equal(np.isnan(np.asarray(held, np.float32)), [False, True])


def test_dtypes_that_jax_does_not_hold_without_x64(tmp_path):
    path = saved_with(tmp_path / "m", np.asarray([0.1, 0.2]))
    held = ek.override(of_dtype(jnp.float32), {"init_from": InitFrom(path, cast=True)}).init().model.held
    assert_same(held, jnp.asarray([0.1, 0.2], jnp.float32))


def test_arrays_keep_their_sharding(tmp_path):
    spread = NamedSharding(Mesh(np.asarray(jax.devices()).reshape(-1), ("data",)), PartitionSpec("data"))
    live = _small.Plain(key=KEY)
    live = eqx.tree_at(lambda m: m.first, live, jax.device_put(live.first, spread))  # 8 rows on 8 devices
    saved = _small.Plain(key=jax.random.key(9))
    ek.save_model(tmp_path / "m", saved)
    trainer = ek.override(quick(), {"init_from": tmp_path / "m", "model": None})
    state = trainer.init(model=live)
    assert_same(state.model, saved)
    assert state.model.first.weight.sharding.is_equivalent_to(spread, 2)
    ek.save_model(tmp_path / "spread", eqx.tree_at(lambda m: m.first, saved, jax.device_put(saved.first, spread)))
    assert_same(quick(init_from=tmp_path / "spread").init().model, saved)


def test_a_live_model_is_filled_and_stays_the_callers(plain):
    live = _small.Plain(key=jax.random.key(9))
    kept = jax.tree.map(jnp.copy, live)
    trainer = ek.override(quick(), {"model": None, "init_from": InitFrom(plain, include="first.**")})
    model = trainer.init(model=live).model
    assert_same((model.first, model.last), (_small.Plain(key=KEY).first, kept.last))
    assert_same(live, kept)


# Hyperparameters


class Scaled(eqx.Module):
    linear: eqx.nn.Linear
    scale: Any

    def __init__(self, scale: Any = 0.5, learned: bool = False, *, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(FEATURES, CLASSES, key=key)
        self.scale = jnp.asarray(2.0) if learned else scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.scale


def test_hyperparameters_are_the_configs(tmp_path, snapshot):
    given, learned = quick(ek.lazy(Scaled)(0.25)), quick(ek.lazy(Scaled)(learned=True))
    _saved_checkpoint(tmp_path / "given", given.init())
    _saved_checkpoint(tmp_path / "learned", learned.init())
    ek.save_model(tmp_path / "saved", given.init().model)
    for name in ("given", "saved"):
        other = quick(ek.lazy(Scaled)(0.75), init_from=tmp_path / name)
        assert float(other.init().model.scale) == 0.75
    told = [
        refusal(ek.override(learned, {"init_from": tmp_path / "given"})),  # a number there, an array here
        refusal(ek.override(given, {"init_from": tmp_path / "learned"})),  # an array there, a number here
    ]
    snapshot("hyperparameters", "\n\n".join(told).replace(str(tmp_path), "HERE"))


# What is refused


def test_paths_shapes_and_dtypes_are_told_at_once(plain, tmp_path, snapshot):
    trainer = quick(ek.lazy(Headed)(5, 9), init_from=plain)
    text = refusal(trainer)
    snapshot("apart", text.replace(str(plain.parent), "HERE"))
    with pytest.raises(CheckpointError) as error:
        ek.inspect.check(trainer)
    assert str(error.value) == text
    renamed_too = InitFrom(plain, rename={"first.**": "body.**"})
    text = refusal(ek.override(trainer, {"init_from": renamed_too}))
    snapshot("apart_renamed", text.replace(str(plain.parent), "HERE"))
    ek.save_model(tmp_path / "many", {f"part{i}": np.zeros(i, np.float32) for i in range(60)})
    text = refusal(ek.override(trainer, {"init_from": tmp_path / "many"}))
    assert "... and 35 more" in text


def test_wrong_patterns(plain, snapshot):
    wrong = (
        InitFrom(plain, rename={"frst.**": "body.**", "**.wieght": "**.w", "last.b": "last.c"}),
        InitFrom(plain, rename={"first.*": "last.*"}),
        InitFrom(plain, rename={"first.**": "a.**", "**.bias": "b.**", "**": "c.**"}),
        InitFrom(plain, include="frist.**", exclude=("head.**", "**.bais")),
        InitFrom(plain, rename={"**": "base.**"}, partial=True),
        InitFrom(plain, exclude="**"),
    )
    told = [refusal(quick(init_from=one)) for one in wrong]
    snapshot("wrong_patterns", "\n\n".join(told).replace(str(plain.parent), "HERE"))


def test_wrong_settings(snapshot):
    told = [refusal(quick(init_from=""), ConfigError)]
    rename = {"a.*": "b", "c[": "d", "e[0:2]": "f", "": "g"}
    told.append(refusal(quick(init_from=InitFrom("", step=-1, rename=rename, exclude="a..b")), ConfigError))
    with pytest.raises(ConfigError) as error:
        quick(init_from=3)
    told.append(str(error.value))
    told.append(refusal(quick(init_from=ek.lazy(dict)(path="a")), ConfigError))
    snapshot("wrong_settings", "\n\n".join(told))


def test_places_without_weights(here, tmp_path, monkeypatch, snapshot):
    shutil.copytree("a", tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    ek.save_model("saved", _small.Plain(key=KEY))
    shutil.copytree("a/checkpoints/2", "a/checkpoints/9.orbax-checkpoint-tmp")
    ek.override(net(), {"checkpoints": None, "num_steps": 1}).train("young")
    Path("notes").mkdir()
    Path("notes/config.json").write_text('{"model_type": "bert"}')
    Path("empty").mkdir()
    Path("weights.npz").write_bytes(b"")
    places = ["b", "runs/none/at/all", "notes", "empty", "weights.npz", ".", "young", "gs://bucket/a"]
    places += ["a/config.json", "a/checkpoints", "a/checkpoints/2/arrays", "a/checkpoints/7", "saved/model.json"]
    places += ["a/checkpoints/9.orbax-checkpoint-tmp", "~nobody-of-this-name/a"]
    wanted = [*places, InitFrom("a", step=3), InitFrom("a/checkpoints/2", step=2), InitFrom("saved", step=2)]
    told = [refusal(net(init_from=one)) for one in wanted]
    text = re.sub(r"(a directory with )_CHECKPOINT.*", r"\1...", "\n\n".join(told))  # orbax's own names
    snapshot("places", text)


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


DAMAGES = {
    "document_cut": lambda run, model: (_cut(run / "checkpoint.json"), _cut(model / "model.json")),
    "document_gone": lambda run, model: ((run / "checkpoint.json").unlink(), (model / "model.json").unlink()),
    "format": lambda run, model: (
        _edit(run / "checkpoint.json", format=9),
        _edit(model / "model.json", equikd_model=9),
    ),
    "odd": lambda run, model: (_edit(run / "checkpoint.json", leaves=3), _edit(model / "model.json", entries=[])),
    "odd_names": lambda run, model: (
        _edit(run / "checkpoint.json", leaves={"state.model.[": {"dtype": "int8", "shape": []}}),
        _edit(model / "model.json", leaves=["a..b"]),
    ),
    "odd_facts": lambda run, model: (_edit(run / "checkpoint.json", facts={"model": 3}), None),
    "arrays_cut": lambda run, model: (_cut(_largest(run / "arrays")), _cut(next(model.glob("*.npz")))),
    "arrays_gone": lambda run, model: (shutil.rmtree(run / "arrays"), next(model.glob("*.npz")).unlink()),
    "no_model": lambda run, model: (_edit(run / "checkpoint.json", leaves={}), None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_sources(here, tmp_path, monkeypatch, snapshot, damage):
    shutil.copytree("a", tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    ek.save_model("saved", (here.model, here.state.model_state))
    DAMAGES[damage](Path("a/checkpoints/4"), Path("saved"))
    if damage == "document_gone":  # a step without a document is none; the one before is the newest
        assert "checkpoint 2 of a" in str(ek.inspect.check(net(init_from="a")))
        told = [refusal(net(init_from=one)) for one in ("a/checkpoints/4", "saved")]
    else:
        told = [refusal(net(init_from="a"))]
        told += [] if damage in ("odd_facts", "no_model") else [refusal(net(init_from="saved"))]
    text = re.sub(r"arrays-\w+\.npz", "arrays-0.npz", "\n\n".join(told))
    text = re.sub(r"(JSONDecodeError: ).*", r"\1...", text)  # where it was cut depends on the seconds that it holds
    snapshot(damage, re.sub(r"(missing or cut short: ).*", r"\1...", text))


def test_bits_that_have_flipped(here, tmp_path):
    ek.save_model(tmp_path / "m", (here.model, here.state.model_state))
    file = next((tmp_path / "m").glob("*.npz"))
    with zipfile.ZipFile(file) as archive:
        start = archive.getinfo("[0].first.weight.npy").header_offset
    data = bytearray(file.read_bytes())
    data[start + 300] ^= 255
    file.write_bytes(data)
    trainer = net(init_from=tmp_path / "m")
    ek.inspect.check(trainer)  # reads no arrays
    with pytest.raises(CheckpointError, match="the saved model is broken"):
        trainer.train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_only_documents_are_read_before_it_starts(here, monkeypatch):
    def never(*_: Any) -> Any:
        raise AssertionError("arrays were read")

    monkeypatch.setattr(_source, "read_arrays", never)
    found = ek.inspect.check(net(init_from="a"))
    assert found.init_from is not None
    assert "Starts from\n  9 of 9 arrays from checkpoint 4 of a\n" in str(found)
    assert "Starts from" not in str(ek.inspect.check(net()))
    with pytest.raises(AssertionError):
        net(init_from="a").init()


def test_of_a_checkpoint_the_model_alone_is_read(here, monkeypatch):
    read, names = _checkpoint.read_stored, []
    monkeypatch.setattr(_checkpoint, "read_stored", lambda path, wanted: (names.extend(wanted), read(path, wanted))[1])
    net(init_from=InitFrom("a", include="first.**")).init()
    assert sorted(names) == ["state.model.first.bias", "state.model.first.weight"]


def test_a_saved_model_is_not_code(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    ek.save_model(tmp_path / "m", _small.Plain(key=KEY))
    document = tmp_path / "m" / "model.json"
    document.write_text(re.sub(r'"[\w.]+:Plain"', '"evil:Plain"', document.read_text()))
    with pytest.raises(SystemExit):
        ek.load_model(tmp_path / "m")
    assert_same(quick(init_from=tmp_path / "m").init().model, _small.Plain(key=KEY))
    assert "evil" not in sys.modules


def test_a_run_at_work_moves_on(tmp_path):
    """The checkpoint that was looked at is gone when its arrays are read: the newest is taken, and named."""
    states = [quick(seed=seed).init() for seed in (1, 2)]
    _saved_checkpoint(tmp_path / "run", states[0], 10)
    trainer = quick(init_from=tmp_path / "run")
    shapes = prepare(trainer).state
    one, exact = (
        weights_of(ek.override(trainer, {"init_from": place}), shapes)
        for place in (tmp_path / "run", InitFrom(tmp_path / "run", step=10))
    )
    assert one is not None
    assert exact is not None
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "10")
    _saved_checkpoint(tmp_path / "later", states[1], 20)
    shutil.move(tmp_path / "later" / "checkpoints" / "20", tmp_path / "run" / "checkpoints" / "20")
    fresh = quick(seed=5).init()
    values = one.read()
    assert_same(values.fill(fresh.model, fresh.model_state)[0], states[1].model)
    assert "checkpoint 20 of" in str(values.taken)
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 10"):
        exact.read()


# The law of rename, on models; that of paths is in test_rename.py

TOPS = ("a", "b", "head", "layers")


@given(data=st.data(), order=st.permutations(range(4)))
@settings(max_examples=15)
def test_a_model_there_and_back_is_the_same(data, order):
    tree = {top: {"w": np.full(2, number, np.float32), "b": [np.int32(number)]} for number, top in enumerate(TOPS)}
    model = jax.tree.map(jnp.asarray, tree)
    depth = data.draw(st.sampled_from(["{}.**", "{}.b[*]", "{}.w"]))
    rename = {depth.format(old): depth.format(TOPS[new]) for old, new in zip(TOPS, order, strict=True)}
    there = _carried(model, rename)
    for old, new in rename.items():
        taken = [path for path in named_leaves(model) if matches(old, path)]
        assert taken
        for path in taken:
            target = path.replace(parse(old)[0], parse(new)[0], 1)
            assert_same(named_leaves(there)[target], named_leaves(model)[path])
    assert_same(_carried(there, {new: old for old, new in rename.items()}), model)


def _carried(model: Any, rename: dict[str, str]) -> Any:
    """Another model, filled with the arrays of one that was saved."""
    blank = jax.tree.map(jnp.zeros_like, model)
    with tempfile.TemporaryDirectory() as folder:
        ek.save_model(f"{folder}/m", model)
        places = Places(named_leaves(blank), frozenset(), frozenset())
        return _weights(InitFrom(f"{folder}/m", rename=rename), places).read().fill(blank, None)[0]


# The command line


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    words = (words[0], str(root / "tests" / "train" / "_experiment.py"), *words[1:])
    return subprocess.run(
        [sys.executable, "-m", "equikd", *words, "--args.num_steps=4", "--args.save_every=2", "--cfg.writers=()"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(root), "COLUMNS": "200"},
        check=False,
    )


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    assert run(tmp_path, "train", "--workdir", "a").returncode == 0
    found = run(tmp_path, "check", "--cfg.init_from=a")
    assert found.returncode == 0, found.stderr
    assert "Starts from\n  9 of 9 arrays from checkpoint 4 of a\n" in found.stdout
    done = run(tmp_path, "train", "--workdir", "b", "--cfg.init_from=a")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "init_from: 9 of 9 arrays from checkpoint 4 of a"
    assert json.loads((tmp_path / "b" / "config.json").read_text())["init_from"] == "a"
    wrong = run(tmp_path, "train", "--workdir", "c", "--cfg.init_from=a", "--args.width=5")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("init_from: checkpoint 4 of a does not fit this model: 7 paths differ\n")
    assert not (tmp_path / "c").exists()
    again = run(tmp_path, "train", "--workdir", "b", "--cfg.init_from=gone")  # it goes on from its own
    assert again.returncode == 0, again.stderr


def test_flags_reach_into_it():
    trainer = edited(net(init_from=InitFrom("a")), {"init_from.path": "b", "init_from.exclude": "x.**,y"})
    trainer = edited(trainer, {"init_from.rename": '{"old.**": "new.**"}', "init_from.step": "3"})
    assert trainer.init_from == InitFrom("b", step=3, rename={"old.**": "new.**"}, exclude=("x.**", "y"))
    assert edited(trainer, {"init_from": "runs/1"}).init_from == "runs/1"
    assert edited(net(), {"init_from": "7"}).init_from == "7"
