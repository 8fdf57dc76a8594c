"""Wiring: what key paths mean, and that every wrong one is met at once, with what is near and what is there."""

import enum
from collections import UserDict
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equikd.config import config, from_json, override, roles, to_json
from equikd.errors import ConfigError, WiringError
from equikd.tree import join
from equikd.wiring import NAMES, UNSET, Context, KeyPath, Unwired, available, fill, key_paths, lookup


class Output(NamedTuple):
    logits: object
    count: object = 7


class Model(eqx.Module):
    weight: jax.Array
    image: KeyPath = eqx.field(static=True, default="batch.image")
    label: KeyPath | None = eqx.field(static=True, default=None)
    unknown: "OnlyForCheckers" = None  # noqa: F821

    @property
    def twice(self):
        return 2 * self.weight


class Attributed(dict):
    """A dict whose entries are attributes too, as many libraries have it."""

    __getattr__ = dict.__getitem__


class Ambiguous(dict):
    image = "the attribute"


@config
class Error:
    preds: KeyPath
    targets: KeyPath
    mask: KeyPath | None = "mask"
    scale: float = 1.0

    def values(self, preds, targets, mask=None, scale=2.0):
        return preds, targets, mask, scale

    def needs_more(self, preds, extra):
        return preds, extra


image = jnp.arange(24.0).reshape(2, 3, 4)
CONTEXT = Context(
    step=jnp.int32(3),
    batch={"image": image, "my label": jnp.arange(2), "meta": [{"id": 5}, "x"], 3: "three"},
    mask=jnp.ones(2, bool),
    preds=Output(logits=image[..., 0]),
    model=Model(jnp.ones(2)),
)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("step", CONTEXT.step),
        ("batch.image", image),
        ("batch['image']", image),
        ("batch['my label'][0]", jnp.arange(2)[0]),
        ("batch.image[..., :3]", image[..., :3]),
        ("batch.image[0, -1]", image[0, -1]),
        ("batch.image[1][..., 0]", image[1][..., 0]),
        ("batch.image[::2, 0:1]", image[::2, 0:1]),
        ("batch.image[0:99]", image),
        ("batch.meta[0].id", 5),
        ("batch.meta[-1]", "x"),
        ("batch[3]", "three"),
        ("preds.logits", image[..., 0]),
        ("preds[0]", image[..., 0]),
        ("preds.count", 7),
        ("model.weight", jnp.ones(2)),
        ("model.twice", 2 * jnp.ones(2)),
    ],
)
def test_what_a_key_path_means(path, value):
    found = lookup(CONTEXT, path)
    assert np.array_equal(found, value) if hasattr(value, "shape") else found == value


def test_it_means_the_same_for_tracers_and_shapes():
    def f(image, host):
        context = Context(batch={"image": image, "host": host}, model=Model(image))
        return lookup(context, "batch.image[0, ..., :2]"), lookup(context, "model.weight[1]")

    shapes = jax.eval_shape(f, image, np.ones(3))
    assert [shape.shape for shape in shapes] == [(3, 2), (3, 4)]


NOWHERE = {
    "near": "batch.imag",
    "elsewhere": "image",
    "item_of_an_array": "batch.image.x",
    "index_out_of_bounds": "batch.image[..., 4]",
    "too_many_indices": "batch.image[0, 0, 0, 0]",
    "index_of_a_list": "batch.meta[2]",
    "of_a_named_tuple": "preds.logit",
    "not_computed": "grads.weight",
    "no_name": "prediction.logits",
    "misspelt": "batch..image",
    "pattern": "batch.*",
    "empty": "",
    "below_a_leaf": "step.x",
}


@pytest.mark.parametrize("name", NOWHERE)
def test_what_leads_nowhere(name, snapshot):
    with pytest.raises(WiringError) as caught:
        lookup(CONTEXT, NOWHERE[name])
    assert len(str(caught.value).splitlines()) <= 40
    snapshot(name, str(caught.value))


NO_PARTS = """
    batch.keys batch.items preds._fields preds.index batch.meta.append batch.image.shape
    batch.image.T batch[0] batch[0:1] batch.image[3] batch.image[-3] step[0] batch.meta['0']
    mask.any batch.meta[1].upper params totals
""".split()


@pytest.mark.parametrize("path", NO_PARTS)
def test_attributes_of_containers_and_arrays_are_no_parts(path):
    with pytest.raises(WiringError):
        lookup(CONTEXT, path)
    host = CONTEXT.replace(batch={**CONTEXT.batch, "image": np.asarray(image)})
    with pytest.raises(WiringError):
        lookup(host, path)


def test_an_item_that_is_an_attribute_too_is_an_error_if_they_differ(snapshot):
    assert lookup(Context(batch=Attributed(image=1)), "batch.image") == 1
    assert lookup(Context(batch=Ambiguous(label=1)), "batch.label") == 1
    assert lookup(Context(batch=Ambiguous(label=1)), "batch.image") == "the attribute"
    assert lookup(Context(batch=UserDict(keys=1, data=2, image=3)), "batch.image") == 3
    assert lookup(Context(batch={"keys": 1}), "batch.keys") == 1
    with pytest.raises(WiringError) as caught:
        lookup(Context(batch=Ambiguous(image=1)), "batch.image")
    snapshot("ambiguous", str(caught.value))


def test_the_context_holds_what_is_filled():
    assert Context().tree_items() == {}
    assert repr(UNSET) == "(not computed here)"
    assert set(CONTEXT.tree_items()) == {"step", "batch", "mask", "preds", "model"}
    assert CONTEXT.replace(grads=None).tree_items()["grads"] is None
    assert NAMES == tuple(
        "step key batch mask model preds interms losses params grads updates opt_state extra config".split()
    )


def test_available_paths():
    paths = available(CONTEXT)
    for path in ("step", "batch.image", "batch['my label']", "preds.logits", "model.weight", "mask"):
        assert path in paths
        lookup(CONTEXT, path)
    assert "batch.meta[1]" not in paths
    assert len(available(CONTEXT, limit=3)) == 3


trees = st.recursive(
    st.just(image) | st.just(np.ones(2)),
    lambda t: (
        st.dictionaries(st.text(max_size=3), t, min_size=1, max_size=3)
        | st.lists(t, min_size=1, max_size=3)
        | st.builds(Output, t)
    ),
    max_leaves=6,
)


@given(trees)
def test_every_available_path_can_be_looked_up(tree):
    context = Context(batch=tree)
    for path in available(context):
        lookup(context, path)
    assert join(("batch",)) in available(context)


def test_key_paths_of_configs_and_modules():
    assert key_paths(Error("preds", "batch.y")) == {"preds": "preds", "targets": "batch.y", "mask": "mask"}
    assert key_paths(Error("preds", "batch.y", None)) == {"preds": "preds", "targets": "batch.y"}
    assert key_paths(Model(jnp.ones(1))) == {"image": "batch.image"}
    assert key_paths(enum) == {}

    @config
    class Held:
        paths: dict[str, KeyPath]
        one: KeyPath = "preds"

    assert key_paths(Held({"x": "batch.x"})) == {"one": "preds"}


def test_key_paths_are_static_strings():
    error = Error("preds", "batch.y")
    assert roles(Error)["preds"] == ("static", "annotated KeyPath")
    assert len(jax.tree.leaves(error)) == 1
    assert jax.tree.structure(error) != jax.tree.structure(override(error, {"preds": "other"}))
    assert from_json(to_json(error)) == error
    with pytest.raises(ConfigError, match=r"Error\.preds: wrong kind of value\n.*\n  expected: KeyPath"):
        Error(3, "batch.y")


def test_fill_takes_the_arguments_that_fields_name():
    error = Error("preds.logits", "batch['my label']")
    filled = fill(error, Error.values, CONTEXT)
    assert list(filled) == ["preds", "targets", "mask"]
    assert error.values(**filled)[3] == 2.0
    assert "mask" not in fill(override(error, {"mask": None}), Error.values, CONTEXT)


def test_all_wrong_paths_at_once(snapshot):
    with pytest.raises(Unwired) as caught:
        fill(Error("preds.logit", "batch.label", "batch..x"), Error.values, CONTEXT)
    assert len(caught.value.errors) == 3
    snapshot("fill", str(caught.value))
    snapshot("fill_with_place", "\n".join(caught.value.lines("losses.ce")))
    with pytest.raises(Unwired) as caught:
        fill(Error("preds.logits", "mask"), Error.needs_more, CONTEXT)
    snapshot("unfilled", str(caught.value))
