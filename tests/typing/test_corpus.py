"""On every annotated function of the corpus: what fits passes, what does not is refused, and the message says where."""

import importlib.util
import inspect
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import AnnotationError, TypeCheckError, jaxtyped

from equikd.typing import ShapeError, typechecked, typechecker
from equikd.typing._nodes import ArrayNode, FieldsNode, UnionNode, children
from equikd.typing._plan import nodes_of
from equikd.typing._uses import occurrences


def load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


corpus = sys.modules.get("corpus") or load("corpus")
NAMES = list(corpus.CORPUS)
BAD = [(name, index) for name, (_, bad) in corpus.EXAMPLES.items() for index in range(len(bad))]


def test_the_corpus_is_large():
    assert len(NAMES) >= 60
    assert len(BAD) >= 150
    assert all(bad for _, bad in corpus.EXAMPLES.values())


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_passes(name):
    good, _ = corpus.EXAMPLES[name]
    result = typechecked(corpus.CORPUS[name])(**good)
    expected = corpus.CORPUS[name](**good)
    assert jax.tree.structure(result) == jax.tree.structure(expected)


@pytest.mark.parametrize(("name", "index"), BAD)
def test_what_does_not_is_refused(name, index):
    good, bad = corpus.EXAMPLES[name]
    with pytest.raises(ShapeError) as error:
        typechecked(corpus.CORPUS[name])(**(good | bad[index]))
    text = str(error.value)
    assert len(text.splitlines()) < 30
    assert text.startswith(f"{name}: ")
    assert "corpus.py" in text
    assert isinstance(error.value, TypeCheckError)
    assert isinstance(error.value, AnnotationError)


@pytest.mark.parametrize("name", NAMES)
def test_as_a_typechecker_of_jaxtypings(name):
    function = jaxtyped(typechecker=typechecker)(corpus.CORPUS[name])
    good, bad = corpus.EXAMPLES[name]
    function(**good)
    for change in bad:
        with pytest.raises(ShapeError):
            function(**(good | change))


# Random changes of one array, against jaxtyping's own verdict on each array inside the arguments, one by one.


def leafwise_verdict(function, arguments):
    """Whether jaxtyping admits all arrays; None where it cannot say (it needs a name or an argument that it lacks)."""
    nodes = nodes_of(function, inspect.signature(function))
    found = [one for name, value in arguments.items() for one in occurrences(nodes[name], value, name)]
    for owner in {id(one.owner): one.owner for one in found}.values():
        mine = [one for one in found if one.owner is owner]
        with jaxtyped("context"):
            for one in sorted(mine, key=lambda one: any(axis.kind == "symbolic" for axis in one.rule.axes)):
                dims = " ".join(axis.text for axis in one.rule.axes)
                try:
                    if not isinstance(one.value, getattr(jaxtyping, one.rule.dtype)[one.rule.array_type, dims]):
                        return False
                except AnnotationError:
                    return None
    return True


def changed(draw, leaf):
    """An array that differs in one axis, in rank or in dtype; or the same."""
    module = np if isinstance(leaf, np.ndarray) else jnp
    shape, kind = list(leaf.shape), draw(st.sampled_from(["axis", "axis", "rank", "dtype", "same"]))
    if kind == "axis" and shape:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(0, 6))
    elif kind == "rank":
        shape = [*shape, 2] if draw(st.booleans()) else shape[1:]
    dtype = draw(st.sampled_from([jnp.float32, jnp.int32, jnp.bool_])) if kind == "dtype" else leaf.dtype
    return module.ones(shape, dtype)


def is_array(leaf):
    return isinstance(leaf, jax.Array | np.ndarray) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def could_be_two_arrays(node):
    inner = children(node).values() if not isinstance(node, FieldsNode) else ()
    arrays = isinstance(node, UnionNode) and sum(isinstance(one, ArrayNode) for one in node.members) > 1
    return arrays or any(map(could_be_two_arrays, inner))


@pytest.mark.parametrize("name", NAMES)
def test_a_random_change_gets_jaxtypings_verdict_on_each_array(name):
    function, (good, _) = corpus.CORPUS[name], corpus.EXAMPLES[name]
    if any(map(could_be_two_arrays, nodes_of(function, inspect.signature(function)).values())) or name == "keywords":
        return

    @settings(max_examples=25, database=None)
    @given(st.data())
    def same(data):
        leaves, tree = jax.tree.flatten(good)
        places = [index for index, leaf in enumerate(leaves) if is_array(leaf)]
        if not places:
            return
        place = data.draw(st.sampled_from(places))
        leaves[place] = changed(data.draw, leaves[place])
        arguments = jax.tree.unflatten(tree, leaves)
        expected = leafwise_verdict(function, arguments)
        if expected is None:
            return
        try:
            typechecked(function)(**arguments)
            fits = True
        except ShapeError as error:
            fits = "result" in str(error).partition("\n")[0]  # the arguments fit, what the trivial body returns may not
        assert fits == expected

    same()
