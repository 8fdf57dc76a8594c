"""The laws of config classes, as one call in a test: `ek.testing.check_config(MyConfig)`.

A config goes through JSON and back unchanged; flattens and unflattens to itself; keeps its structure when a float
changes, and changes it with any static value; what `override` sets is what `diff` finds; equal configs hash equal; and
a damaged JSON text either loads to something that round-trips or is refused with a `ConfigError`.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from equikd.config import diff, from_json, host, override, to_json
from equikd.config._dataclass import comparison_key
from equikd.config._edit import flatten
from equikd.errors import ConfigError
from equikd.testing._strategies import configs
from equikd.tree import named_leaves

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def check_config(
    cls: type,
    *,
    fields: "Mapping[str, SearchStrategy[Any]] | None" = None,
    where: Any = None,
    examples: int = 50,
) -> None:
    """Check the laws of a config class on drawn instances.

    Args:
        cls: the config class, importable by name (JSON names it).
        fields: field -> strategy, for fields whose annotation says too little; without it they keep their default.
        where: predicate that instances must satisfy, beside their own `validate`.
        examples: how many are drawn.

    Raises:
        AssertionError: a law is broken; the smallest instance found is in the text.
        ConfigError: fields that cannot be drawn and have no default, all at once.

    Example:
        >>> from equikd.optim import WarmupCosine
        >>> check_config(WarmupCosine, examples=10)
    """
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    drawn = configs(cls, fields=fields)
    drawn = drawn.filter(where) if where is not None else drawn
    quiet = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.differing_executors]

    once = settings(
        max_examples=examples, deadline=None, suppress_health_check=quiet, database=None, report_multiple_bugs=False
    )

    @once
    @given(drawn, st.data())
    def laws(cfg: Any, data: Any) -> None:
        _round_trips(cfg)
        _flattens(cfg)
        _structure(cfg, data)
        _edits(cfg, data)
        _damaged(cfg, data)

    laws()


def _equal(a: Any, b: Any) -> bool:
    return comparison_key(a) == comparison_key(b)


def _round_trips(cfg: Any) -> None:
    text = to_json(cfg)
    again = from_json(text)
    assert _equal(again, cfg), f"JSON -> config changed {cfg!r} to {again!r}"
    assert to_json(again) == text, f"JSON -> config -> JSON changed the text of {cfg!r}"
    assert again == cfg, f"equal configs that are not ==: {cfg!r}"
    assert hash(again) == hash(cfg), f"equal configs with different hashes: {cfg!r}"


def _flattens(cfg: Any) -> None:
    leaves, tree = jax.tree.flatten(cfg)
    again = jax.tree.unflatten(tree, leaves)
    assert jax.tree.structure(again) == tree, f"flatten -> unflatten changed the structure of {cfg!r}"
    assert _equal(host(again), cfg), f"flatten -> unflatten -> host changed {cfg!r} to {host(again)!r}"


def _floats(cfg: Any) -> list[str]:
    return [path for path, leaf in named_leaves(cfg).items() if np.issubdtype(leaf.dtype, np.floating)]


def _structure(cfg: Any, data: Any) -> None:
    from hypothesis import strategies as st

    floats, tree = _floats(cfg), jax.tree.structure(cfg)
    if floats:
        path = data.draw(st.sampled_from(floats))
        other = override(cfg, {path: 0.25})
        assert jax.tree.structure(other) == tree, f"changing the float {path} changed the structure of {cfg!r}"
    leaves = set(named_leaves(cfg))
    statics = {
        path: value for path, value in flatten(cfg).items() if path not in leaves and type(value) in (bool, int, str)
    }
    if statics:
        path = data.draw(st.sampled_from(sorted(statics)))
        value = statics[path]
        changed = (not value) if type(value) is bool else value + ("x" if type(value) is str else 1)
        try:
            other = override(cfg, {path: changed})
        except ConfigError:  # the annotation does not admit it, as of a Literal
            return
        assert jax.tree.structure(other) != tree, f"changing the static {path} kept the structure of {cfg!r}"


def _edits(cfg: Any, data: Any) -> None:
    from hypothesis import strategies as st

    floats = _floats(cfg)
    chosen = data.draw(st.lists(st.sampled_from(floats), unique=True, max_size=3)) if floats else []
    before = flatten(cfg)
    changes = {path: 0.75 if before[path] != 0.75 else 0.5 for path in chosen}
    found = {path: after for path, _, after in diff(cfg, override(cfg, changes))}
    assert found == changes, f"override set {changes}, diff found {found}, in {cfg!r}"


def _damaged(cfg: Any, data: Any) -> None:
    from hypothesis import strategies as st

    text = to_json(cfg)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 6)))
    piece = data.draw(st.text('{}[]",:0123456789.eE-_ truefalsn\\', max_size=4))
    damaged = text[:start] + piece + text[stop:]
    try:
        loaded = from_json(damaged)
    except ConfigError:
        return
    written = to_json(loaded)
    assert to_json(from_json(written)) == written, (
        f"a damaged text loads to what does not round-trip: {json.dumps(damaged)}"
    )
