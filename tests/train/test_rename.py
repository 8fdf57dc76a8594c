"""Renaming by patterns: a bijection there and back changes nothing, wildcards carry over what they matched."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equikd.train._rename import rename_problems, renamed
from equikd.tree import Wildcard, join, parse

TOPS = ("a", "b", "head", "layers")
KEYS = st.sampled_from(TOPS) | st.integers(0, 12)
PATHS = st.tuples(st.sampled_from((*TOPS, "other")), st.lists(KEYS, max_size=3)).map(
    lambda one: join((one[0], *one[1]))
)


@given(paths=st.sets(PATHS, min_size=1), tops=st.permutations(TOPS))
def test_a_bijection_there_and_back_changes_nothing(paths, tops):
    values = {*paths, *(f"{top}.w" for top in TOPS)}  # each pattern must match something
    rename = {f"{old}.**": f"{new}.**" for old, new in zip(TOPS, tops, strict=True)}
    assert rename_problems(rename) == []
    there = renamed(values, rename)
    assert len(set(there.values())) == len(values)
    news = dict(zip(TOPS, tops, strict=True)) | {"other": "other"}
    assert all(parse(new) == (news[parse(old)[0]], *parse(old)[1:]) for old, new in there.items())
    back = renamed(there.values(), {new: old for old, new in rename.items()})
    assert all(back[there[path]] == path for path in values)


PIECES = st.one_of(  # of a path: pattern there, pattern here, keys there, keys here
    st.sampled_from(TOPS).map(lambda name: (name, name.upper(), *_one(name, name.upper()))),
    KEYS.map(lambda key: (Wildcard("*"), Wildcard("*"), *_one(key, key))),
    st.integers(0, 12).map(lambda n: (Wildcard("block*"), Wildcard("*"), *_one(f"block{n}", n))),
    st.integers(0, 12).map(lambda n: (Wildcard("in*put"), Wildcard("*_x"), *_one(f"in{n}put", f"{n}_x"))),
)


def _one(old: Any, new: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return (old,), (new,)


@given(data=st.data())
def test_wildcards_carry_over_what_they_matched(data):
    pieces = data.draw(st.lists(PIECES, min_size=1, max_size=4))
    if data.draw(st.booleans()):  # with two of them the way is back is not always the same
        keys = tuple(data.draw(st.lists(KEYS, max_size=3)))
        pieces.insert(data.draw(st.integers(0, len(pieces))), (Wildcard("**"), Wildcard("**"), keys, keys))
    old, new = (join(piece[side] for piece in pieces) for side in (0, 1))
    path, wanted = (join(key for piece in pieces for key in piece[side]) for side in (2, 3))
    assert rename_problems({old: new}) == []
    assert renamed([path], {old: new}) == {path: wanted}
    assert renamed([wanted], {new: old}) == {wanted: path}


@pytest.mark.parametrize(
    ("rename", "path", "wanted"),
    [
        ({"**": "base.**"}, "w", "base.w"),
        ({"**": "base.**"}, "", "base"),
        ({"base.**": "**"}, "base.a[0]", "a[0]"),
        ({"**": "base.**", "head.**": "head.**"}, "head.w", "head.w"),
        ({"**.a.**": "**.b.**"}, "x.a.y.a.z", "x.b.y.a.z"),
        ({"layers[*].**": "blocks[*].**"}, "layers[3].w", "blocks[3].w"),
        ({"block*.**": "blocks[*].**"}, "block12.w", "blocks[12].w"),
        ({"blocks[*].**": "block*.**"}, "blocks[12].w", "block12.w"),
        ({"*.*": "b.*.*"}, "x['1']", "b.x['1']"),
        ({"a": "b"}, "a", "b"),
    ],
)
def test_renamed(rename, path, wanted):
    assert rename_problems(rename) == []
    assert renamed([path], rename) == {path: wanted}
