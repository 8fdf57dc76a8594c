"""Patterns: which leaves they match, and what is said of those that match none."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.errors import ConfigError
from equikd.optim._masks import trained
from equikd.optim._select import assign, collecting_problems, select
from equikd.tree import named_leaves
from tests.train._small import LayerNormed, quick

TREE = eqx.filter(LayerNormed(key=jax.random.key(0)), eqx.is_inexact_array)
PATHS = list(named_leaves(TREE))
PATTERNS = ["**", "first.**", "**.bias", "norm.*", eqx.nn.LayerNorm, eqx.nn.Linear, lambda path, leaf: leaf.ndim == 2]


def names(pattern: Any) -> list[str]:
    return [path for path, yes in zip(PATHS, select(pattern, TREE, "test"), strict=True) if yes]


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("first.**", ["first.weight", "first.bias"]),
        ("**.bias", ["first.bias", "last.bias", "norm.bias"]),
        (eqx.nn.LayerNorm, ["norm.weight", "norm.bias"]),
        (LayerNormed, PATHS),
        (lambda path, leaf: leaf.ndim == 2, ["first.weight", "last.weight"]),
        (("last.bias", (eqx.nn.LayerNorm,)), ["last.bias", "norm.weight", "norm.bias"]),
        ((), []),
    ],
    ids=["glob", "anywhere", "class", "root class", "predicate", "tuples", "nothing"],
)
def test_what_a_pattern_matches(pattern: Any, paths: list[str]) -> None:
    assert names(pattern) == paths


def test_a_class_inside_another_and_leaves_that_are_missing() -> None:
    tree = {"a": [eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)), None], "b": optax.MaskedNode(), "c": jnp.ones(3)}
    tree = eqx.filter(tree, eqx.is_inexact_array)
    expected = [path.startswith("a") for path in named_leaves(tree)]
    assert list(select(eqx.nn.Linear, tree, "test")) == list(select(eqx.nn.MLP, tree, "test")) == expected


@given(st.lists(st.sampled_from(PATTERNS), max_size=4))
def test_a_tuple_matches_what_any_of_its_members_does_and_freezing_is_the_complement(patterns: list[Any]) -> None:
    each = [select(one, TREE, "test") for one in patterns]
    together = select(tuple(patterns), TREE, "test")
    assert together == tuple(any(one[i] for one in each) for i in range(len(PATHS)))
    if patterns:
        assert trained(ek.optim.freeze(*patterns), TREE) == tuple(not one for one in together)
        mixed = trained(("first.**", eqx.nn.LayerNorm, ek.optim.freeze(*patterns)), TREE)
        wanted = select(("first.**", eqx.nn.LayerNorm), TREE, "test")
        assert mixed == tuple(one and not other for one, other in zip(wanted, together, strict=True))


def test_each_leaf_has_one_pattern_and_the_rest_has_another() -> None:
    assert assign(["**", "norm.**", "**.weight"], {"norm": {"bias": 1.0}, "x": {"bias": 1.0, "weight": 2.0}}, "t") == (
        1,
        0,
        2,
    )
    assert assign(["**.bias"], {"bias": 1.0, "weight": 2.0}, "t", whole=False) == (0, None)
    assert assign(["**", "a"], {"a": 1.0}, "t") == (1,)  # that nothing is left over is no slip


def test_no_parameters_at_all_are_no_slip() -> None:
    assert select("encoder.**", {}, "test") == ()


@pytest.mark.parametrize("pattern", ["a..b", 3, ("first.**", 3)])
def test_what_is_no_pattern_is_refused(pattern: Any) -> None:
    with pytest.raises(ConfigError, match="test: "):
        select(pattern, TREE, "test")


def test_problems_are_collected_while_an_optimizer_makes_its_state() -> None:
    problems: list[str] = []
    with collecting_problems("optimizer", problems):
        assert select(("wrong", "first.**"), TREE, "mask")[:2] == (True, True)
        select("wrong", TREE, "mask")
        assign(["first.*", "**.bias", "nowhere"], TREE, "optimizer")
    assert [text.splitlines()[0] for text in problems] == [
        "optimizer: mask: 'wrong' matches no parameter",
        "optimizer: 'nowhere' matches no parameter",
        "optimizer: 'first.*' and '**.bias' match the same parameters",
        "optimizer: no pattern matches last.weight, norm.weight",
    ]


def test_all_wrong_patterns_of_an_experiment_are_one_report_before_anything_runs(snapshot: Any) -> None:
    mask = ek.optim.decay(except_=("**.bais", eqx.nn.RMSNorm))
    trainer = quick(
        ek.lazy(LayerNormed)(),
        trainable=ek.optim.freeze("frist.**"),
        precision=ek.optim.Precision(keep=("norms.**", eqx.nn.BatchNorm)),
        optimizer={
            "first.weight": ek.lazy(optax.adamw)(1e-3, mask=mask),
            "norm.**": ek.optim.Ema(ek.optim.ScaleRates(ek.lazy(optax.sgd)(1e-3), {"norm.wieght": 0.1})),
            "norm.bias": ek.lazy(optax.sgd)(1e-3),
            "lst.*": ek.lazy(optax.sgd)(1e-3),
        },
    )
    with pytest.raises(ConfigError) as error:
        trainer.init()
    snapshot("everything", str(error.value))
    with pytest.raises(ConfigError, match="8 patterns are wrong"):
        ek.inspect.check(trainer)


def test_a_predicate_sees_shapes_and_dtypes_of_parameters_alone() -> None:
    seen = {}

    def predicate(path: str, leaf: Any) -> bool:
        seen[path] = (leaf.shape, leaf.dtype)
        return path == "first.bias"

    state = quick(trainable=(predicate, "last.weight")).init()
    assert list(named_leaves(state.params())) == ["first.bias", "last.weight"]
    assert seen["first.weight"] == ((8, 6), np.dtype("float32"))
