"""What paths name, and what is said of those that name nothing."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import equikd as ek
from equikd.intermediates import Inputs, IntermediateError, available

WIDTH = 4
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (WIDTH,))


def call(model, *args, **kwargs):
    return model(*args, **kwargs)


def linear(seed=0):
    return eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(seed))


class Layer(eqx.Module):
    attention: eqx.nn.Linear
    scale: float = eqx.field(static=True, default=2.0)

    def __call__(self, x):
        return self.scores(x) * self.scale

    def scores(self, x):
        return jnp.tanh(self.attention(x))


class Encoder(eqx.Module):
    layers: list[Layer]
    unused: eqx.nn.Linear

    def __init__(self):
        self.layers, self.unused = [Layer(linear(1)), Layer(linear(2))], linear(3)

    @property
    def first(self):
        return self.layers[0]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model(eqx.Module):
    encoder: Encoder
    head: eqx.nn.Linear
    table: dict[Any, Any]
    offset: jax.Array

    def __init__(self):
        self.encoder, self.head, self.offset = Encoder(), linear(4), X
        self.table = {"two words": linear(5), "größe": linear(7), "by number": {3: linear(6), -1: linear(8)}}

    def encode(self, x):
        return self.encoder(x)

    def __call__(self, x):
        x = self.table["two words"](self.table["by number"][3](self.table["größe"](self.encode(x))))
        return self.head(self.head(x)) + self.offset


MODEL = Model()


def capture(*paths, model=MODEL, **options):
    return ek.capture(call, paths, **options)(model, X)[1]


def test_attributes_items_and_negative_indices(same):
    one, two = MODEL.encoder.layers
    found = capture("encoder.layers[0]", "encoder.layers[-1]", "encoder", "encoder.layers[0].attention")
    first, second = one(X), two(one(X))
    same(list(found.values()), [first, second, second, one.attention(X)])


def test_dict_keys_of_any_kind(same):
    found = capture(
        "table['two words']", "table['by number'][3]", "table.größe", "table['größe']", "table['by number'][3][0]"
    )
    value = MODEL.table["größe"](MODEL.encoder(X))
    same(found["table.größe"], value)
    same(found["table['größe']"], value)
    third = MODEL.table["by number"][3](value)
    same(found["table['by number'][3]"], third)
    same(found["table['by number'][3][0]"], third)
    same(found["table['two words']"], MODEL.table["two words"](third))


def test_methods_also_the_models_own(same):
    found = capture("encoder.layers[1].scores", "encode", "encoder.__call__", "encoder.layers[0].scores[0]")
    one, two = MODEL.encoder.layers
    same(found["encode"], MODEL.encoder(X))
    same(found["encoder.__call__"], MODEL.encoder(X))
    same(found["encoder.layers[0].scores[0]"], one.scores(X))
    same(found["encoder.layers[1].scores"], two.scores(one(X)))


def test_names_that_lead_to_the_same_object(same):
    found = capture("encoder.first", "encoder.first.attention")
    first = MODEL.encoder.layers[0]
    same(found, {"encoder.first": first(X), "encoder.first.attention": first.attention(X)})
    sequential = eqx.nn.Sequential([linear(), eqx.nn.Lambda(jnp.sin), linear(1)])
    same(capture("[-1]", model=sequential), {"[-1]": sequential(X)})


def test_the_number_of_a_call(same):
    found = capture("head[0]", "head[1]", "head[-1]", "head[-2]", "head.__call__[1]")
    same([found["head[0]"], found["head[1]"]], [found["head[-2]"], found["head[-1]"]])
    same(found["head.__call__[1]"], MODEL.head(found["head[0]"]))


def test_inputs_of_a_call(same):
    found = capture(
        "encoder.inputs", "encoder.inputs[0]", "head[1].inputs[0]", "head[0]", "encoder.layers[1].scores.inputs"
    )
    assert isinstance(found["encoder.inputs"], Inputs)
    same(found["encoder.inputs"].args, (X,))
    same(found["encoder.inputs[0]"], X)
    same(found["head[1].inputs[0]"], found["head[0]"])
    same(found["encoder.layers[1].scores.inputs"][0], MODEL.encoder.layers[0](X))


def test_inputs_by_name_and_in_a_scan(same):
    class Cell(eqx.Module):
        def __call__(self, state, *, by, flag="text"):
            return state * by

    class Loop(eqx.Module):
        cell: Cell = Cell()

        def __call__(self, x):
            return jax.lax.scan(lambda c, by: (self.cell(c, by=by), None), x, jnp.arange(3.0))[0]

    found = capture("cell.inputs.by", "cell.inputs['by']", "cell[1].inputs[0]", model=Loop())
    same(found, {"cell.inputs.by": jnp.arange(3.0), "cell.inputs['by']": jnp.arange(3.0), "cell[1].inputs[0]": 0 * X})


class HasInputs(eqx.Module):
    """Parts and methods that bear the name which is also that of what is called on."""

    part: Any
    plain: Any

    class Part(eqx.Module):
        inputs: eqx.nn.Linear

        def __call__(self, x):
            return 2 * self.inputs(x)

    class Plain(eqx.Module):
        inputs: int

        def __call__(self, x):
            return 3 * x

        def outputs(self):
            return None

    def __call__(self, x):
        return self.plain(self.part(x))


def test_a_part_that_is_called_inputs(same):
    model = HasInputs(HasInputs.Part(linear()), HasInputs.Plain(4))
    found = capture("part.inputs", "part.__call__.inputs", "plain.inputs", model=model)
    same(found["part.inputs"], linear()(X))
    same(found["part.__call__.inputs"].args, (X,))
    same(found["plain.inputs"].args, (2 * linear()(X),))


def test_patterns_give_what_fits_and_is_called():
    assert list(capture("encoder.layers[*].attention")) == [f"encoder.layers[{i}].attention" for i in (0, 1)]
    assert list(capture("**.attention")) == [f"encoder.layers[{i}].attention" for i in (0, 1)]
    assert list(capture("*")) == ["encoder", "head[0]", "head[1]"]  # not what is not called: table, offset
    with pytest.raises(IntermediateError, match="of what fits, nothing is called"):
        capture("encoder.*")
    assert list(capture("encoder.layers[*].scores")) == [f"encoder.layers[{i}].scores" for i in (0, 1)]
    assert list(capture("*.inputs")) == ["encoder.inputs", "head[0].inputs", "head[1].inputs"]
    assert set(capture("**", "encoder")) >= {"encoder", "encoder.layers[0].attention", "table.größe", "head[1]"}


def test_available_lists_what_is_called_with_shapes():
    found = available(lambda model, x: jax.vmap(model)(x), MODEL, jax.ShapeDtypeStruct((5, WIDTH), jnp.float32))
    layers = [f"encoder.layers[{at}]{below}" for at in (0, 1) for below in ("", ".attention")]
    table = ["table['by number'][3]", "table.größe", "table['two words']"]
    assert list(found) == ["encoder", *layers, "head", *table]
    assert {path: [value.shape for value in calls] for path, calls in found.items() if path in ("encoder", "head")} == {
        "encoder": [(5, WIDTH)],
        "head": [(5, WIDTH)] * 2,
    }


def test_all_that_is_available_can_be_captured(same):
    listed = available(call, MODEL, X)
    paths = [path if len(calls) == 1 else f"{path}[{at}]" for path, calls in listed.items() for at in range(len(calls))]
    shapes = [value for calls in listed.values() for value in calls]
    assert [(v.shape, v.dtype) for v in capture(*paths).values()] == [(v.shape, v.dtype) for v in shapes]


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("misspelt", ["encoder.layrs[1].attention"]),
        ("misspelt_in_a_list", ["encoder.layers[0].atention"]),
        ("index", ["encoder.layers[7]"]),
        ("list", ["encoder.layers"]),
        ("array", ["encoder.layers[0].attention.weight"]),
        ("static", ["encoder.layers[0].scale"]),
        ("empty", [""]),
        ("no_path", ["encoder..layers"]),
        ("not_called", ["encoder.unused"]),
        ("several", ["head"]),
        ("several_inputs", ["head.inputs"]),
        ("too_many", ["head[2]"]),
        ("once", ["encoder[3]"]),
        ("pattern", ["layers[*]"]),
        ("pattern_nowhere", ["encoder.blocks[*]"]),
        ("slice", ["encoder[..., :2]"]),
        ("part_of_the_value", ["encoder.logits"]),
        ("model", ["[0]"]),
        ("many_at_once", ["encoder.layrs", "head", "encoder.unused", "headd", "encoder.inputs[3]"]),
        ("two_misspelt", ["encoder.laiers[0]", "tabel.größe"]),
    ],
)
def test_what_is_said_of_paths_that_give_nothing(name, paths, snapshot):
    with pytest.raises(IntermediateError) as caught:
        capture(*paths)
    snapshot(name, str(caught.value))


def test_an_item_of_what_is_returned(same, snapshot):
    class Pair(eqx.Module):
        def __call__(self, x):
            return x, {"y": 2 * x}

    class Holder(eqx.Module):
        pair: Callable[..., Any] = Pair()

        def __call__(self, x):
            return self.pair(x)[0]

    same(capture("pair[0][1].y", model=Holder()), {"pair[0][1].y": 2 * X})
    with pytest.raises(IntermediateError) as caught:
        capture("pair[1]", model=Holder())
    snapshot("item", str(caught.value))


def test_a_value_without_arrays_is_told(snapshot):
    class Text(eqx.Module):
        def __call__(self, x):
            return "text"

    class Holder(eqx.Module):
        part: Text = Text()

        def __call__(self, x):
            return (x, self.part(x))[0]

    with pytest.raises(IntermediateError) as caught:
        capture("part", model=Holder())
    snapshot("no_array", str(caught.value))
