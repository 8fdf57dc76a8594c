"""Paths: one spelling, read back as it was written, and lawful reads and edits of any tree."""

import dataclasses
from collections import OrderedDict, namedtuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equikd.tree import (
    PathError,
    Wildcard,
    get,
    is_glob,
    items,
    join,
    keys_of,
    matches,
    named_leaves,
    parse,
    update,
    walk,
)

integers = st.integers(-100, 100)
bounds = st.none() | integers
slices = st.builds(slice, bounds, bounds, bounds)
axes = integers | slices | st.just(...)
keys = st.text() | axes | st.lists(axes, min_size=1, max_size=3).map(tuple)
trees = st.recursive(
    st.integers(),
    lambda t: (
        st.dictionaries(st.text(max_size=4), t, max_size=3)
        | st.lists(t, max_size=3).map(tuple)
        | st.lists(t, max_size=3)
    ),
    max_leaves=8,
)

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Plain:
    a: int = 1
    b: tuple[int, ...] = (2, 3)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a.b_1._c", ("a", "b_1", "_c")),
        ("optimizer[0].learning_rate", ("optimizer", 0, "learning_rate")),
        ("[0][-1]", (0, -1)),
        ("a['my key'].b", ("a", "my key", "b")),
        ('a["it\'s]"]', ("a", "it's]")),
        (r"a['back\\slash\'']", ("a", "back\\slash'")),
        ("x[..., :3]", ("x", (..., slice(None, 3)))),
        ("x[1:2:3]", ("x", slice(1, 2, 3))),
        ("x[0,]", ("x", (0,))),
        ("x[ 0 , 1 ]", ("x", (0, 1))),
        ("**.bias", (Wildcard("**"), "bias")),
        ("block*.*", (Wildcard("block*"), Wildcard("*"))),
        ("layers[*]", ("layers", Wildcard("*"))),
        ("größe", ("größe",)),
    ],
)
def test_parse(text, wanted):
    assert parse(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        ".",
        "a.",
        "a..b",
        ".a",
        "a[",
        "a[]",
        "a]",
        "a[0",
        "a[b]",
        "a['b]",
        "a['b', 'c']",
        "a[0]b",
        "a b",
        "1a",
        "a[1:2:3:4]",
    ],
)
def test_misspelt_paths_are_refused(text):
    with pytest.raises(PathError, match="is not a path"):
        parse(text)


@given(st.lists(keys, max_size=4).map(tuple))
def test_join_is_read_back(path):
    assert parse(join(path)) == path


@given(st.text(alphabet="ab.[]*'\"\\:,0- é", max_size=12))
def test_any_text_is_a_path_or_refused(text):
    try:
        path = parse(text)
    except PathError:
        return
    assert parse(join(path)) == path


@given(trees)
def test_every_walked_path_leads_to_its_part(tree):
    for path, part in walk(tree):
        assert get(tree, path) is part
        assert get(tree, join(path)) is part


@given(trees, st.data())
def test_an_update_changes_its_place_only(tree, data):
    before = dict(walk(tree))
    path = data.draw(st.sampled_from(list(before)))
    mark = object()
    changed = update(tree, path, lambda old: (mark, old))
    assert get(changed, path) == (mark, before[path])
    for other, part in before.items():
        if other[: len(path)] != path and path[: len(other)] != other:
            assert get(changed, other) is part
    assert dict(walk(tree)) == before


def test_items_of_everything_known():
    assert items({"a": 1}) == {"a": 1}
    assert items([7]) == items((7,)) == {0: 7}
    assert items(Point(1, 2)) == {"x": 1, "y": 2}
    assert items(Plain()) == {"a": 1, "b": (2, 3)}
    assert list(items(eqx.nn.Identity())) == []
    assert items(Plain) == items("text") == items(None) == items(jnp.ones(3)) == {}


def test_update_of_everything_known():
    tree = {"p": Point(1, [2, 3]), "d": Plain(), "o": OrderedDict(a=1)}
    assert update(tree, "p.y[-1]", lambda old: old + 1)["p"] == Point(1, [2, 4])
    assert update(tree, "d.b[0]", lambda old: old * 10)["d"] == Plain(b=(20, 3))
    assert update(tree, "o.a", lambda old: 5)["o"] == {"a": 5}
    assert tree["p"] == Point(1, [2, 3])


def test_update_of_a_module_with_its_own_constructor():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    changed = update(linear, "bias", jnp.zeros_like)
    assert changed.bias.tolist() == [0, 0]
    assert changed.weight is linear.weight
    assert linear.bias is not changed.bias


def test_a_missing_part_is_met_with_what_is_there(snapshot):
    tree = {"optimizer": {"learning_rate": 0.1, "b1": 0.9}, "layers": (1, 2)}
    for name, path in {
        "name": "optimizer.learning_rat",
        "index": "layers[2]",
        "below_a_leaf": "optimizer.b1.x",
    }.items():
        with pytest.raises(PathError) as caught:
            get(tree, path)
        snapshot(name, str(caught.value))
    with pytest.raises(PathError) as caught:
        parse("optimizer..b1")
    snapshot("misspelt", str(caught.value))


@pytest.mark.parametrize("path", ["layers[-3]", "layers[0:1]", "layers.x", "[0]", "layers['0']"])
def test_what_leads_nowhere(path):
    with pytest.raises(PathError):
        get({"layers": (1, 2)}, path)
    with pytest.raises(PathError):
        update({"layers": (1, 2)}, path, lambda old: old)


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("**", "", True),
        ("**", "a.b", True),
        ("*", "a", True),
        ("*", "", False),
        ("*", "a.b", False),
        ("**.bias", "bias", True),
        ("**.bias", "a[0].bias", True),
        ("**.bias", "a.bias.b", False),
        ("a.**.c", "a.c", True),
        ("a.**.c", "a.b[1].c", True),
        ("layers[*].w", "layers[3].w", True),
        ("layers.*.w", "layers[3].w", True),
        ("block*.w", "block12.w", True),
        ("block*.w", "bloc.w", False),
        ("a[1]", "a[1]", True),
        ("a[1]", "a['1']", False),
    ],
)
def test_matches(pattern, path, fits):
    assert matches(pattern, path) is fits


@given(st.lists(st.text() | integers, max_size=4).map(tuple))
def test_a_path_without_wildcards_matches_itself(path):
    assert matches(path, path)
    assert matches("**", path)
    assert not matches((*path, "more"), path)


def test_is_glob():
    assert is_glob("**.a")
    assert is_glob("a*")
    assert not is_glob("a['*']")


def test_named_leaves_follow_jax():
    tree = {"m": eqx.nn.Linear(2, 2, key=jax.random.key(0)), "t": (1.0, [2.0]), "a b": Point(3, 4)}
    named = named_leaves(tree)
    assert list(named.values()) == jax.tree.leaves(tree)
    assert list(named) == ["['a b'].x", "['a b'].y", "m.weight", "m.bias", "t[0]", "t[1][0]"]
    assert named_leaves({"t": (1, 2)}, is_leaf=lambda x: isinstance(x, tuple)) == {"t": (1, 2)}


def test_keys_of_every_kind():
    util = jax.tree_util
    path = (
        util.GetAttrKey("a"),
        util.SequenceKey(1),
        util.DictKey("b"),
        util.FlattenedIndexKey(2),
        util.DictKey((1, 2)),
    )
    assert keys_of((*path, "odd")) == ("a", 1, "b", 2, "(1, 2)", "odd")
