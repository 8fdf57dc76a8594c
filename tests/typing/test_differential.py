"""Against stock jaxtyping and beartype, on flat arguments: the same verdict."""

import inspect

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import AnnotationError, TypeCheckError, jaxtyped

from equikd.typing import Array, Bool, Float, Int, Num, Shaped, ShapeError, typechecked

FAMILIES = [Float, Int, Bool, Num, Shaped]
DTYPES = {"float32": jnp.float32, "int32": jnp.int32, "bool": jnp.bool_}
WORDS = ["a", "b", "c", "3", "_", "#a", "#b", "#3", "rows=2", "a+b", "2*a", "b-1", "#a*2", "{n}", "{n}+a"]
GROUPS = ["*s", "...", "*#s", "*_", "*t"]


@st.composite
def annotations(draw):
    words = draw(st.lists(st.sampled_from(WORDS), max_size=3))
    if draw(st.booleans()):
        words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(GROUPS)))
    family, array_type = draw(st.sampled_from(FAMILIES)), draw(st.sampled_from([Array, Array, np.ndarray]))
    annotation = family[array_type, " ".join(words)]
    return annotation | None if draw(st.integers(0, 9)) == 0 else annotation


@st.composite
def values(draw, annotation, sizes):
    """An array that often fits: named axes by `sizes`, now and then another."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.sampled_from([None, 1.0, "text", 3]))
    members = [one for one in getattr(annotation, "__args__", [annotation]) if one is not type(None)]
    shape: list[int] = []
    for word in members[0].dim_str.split():
        a, b = sizes["a"], sizes["b"]
        known = {
            **sizes,
            "3": 3,
            "_": 2,
            "rows=2": 2,
            "{n}": 2,
            "{n}+a": 2 + a,
            "a+b": a + b,
            "2*a": 2 * a,
            "b-1": b - 1,
        }
        known["a*2"] = known["2*a"]
        if word in GROUPS:
            shape += [2, 3][: draw(st.integers(0, 2)) if draw(st.integers(0, 5)) == 0 else sizes["rank"]]
        elif word.startswith("#") and draw(st.booleans()):
            shape.append(1)
        else:
            shape.append(known[word.removeprefix("#")])
    if shape and draw(st.integers(0, 7)) == 0:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(0, 4))
    if draw(st.integers(0, 14)) == 0:
        shape = [*shape, 1] if draw(st.booleans()) else shape[1:]
    dtype = members[0].dtypes
    fitting = [name for name in DTYPES if members[0].dtype is Shaped or name in dtype]
    name = draw(st.sampled_from(fitting if draw(st.integers(0, 9)) else list(DTYPES)))
    module = np if (members[0].array_type is np.ndarray) != (draw(st.integers(0, 14)) == 0) else jnp
    return module.ones(shape, DTYPES[name])


def function_of(parameters, result):
    def function(*args, **kwargs):
        return kwargs["out"]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()]
    listed.append(inspect.Parameter("n", inspect.Parameter.KEYWORD_ONLY, annotation=int))
    listed.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY))
    function.__signature__ = inspect.Signature(listed, return_annotation=result)
    return function


COUNTS = {"fits": 0, "refused": 0}


@pytest.mark.slow
@hypothesis.settings(max_examples=400, suppress_health_check=list(hypothesis.HealthCheck))
@given(st.data())
def test_same_verdict_on_flat_arguments(data):
    names = ["x", "y", "z"][: data.draw(st.integers(1, 3))]
    parameters = {name: data.draw(annotations(), label=name) for name in names}
    result = data.draw(annotations(), label="result")
    sizes = {name: data.draw(st.integers(1, 4)) for name in "abc"} | {"rank": data.draw(st.integers(0, 2))}
    call = {name: data.draw(values(annotation, sizes)) for name, annotation in parameters.items()}
    call |= {"n": 2, "out": data.draw(values(result, sizes))}
    function = function_of(parameters, result)
    try:
        jaxtyped(typechecker=beartype)(function)(**call)
        expected = "fits"
    except TypeCheckError:
        expected = "refused"
    except AnnotationError:  # it refuses to use a name before it is bound; we solve it
        hypothesis.reject()
    try:
        typechecked(function)(**call)
        found = "fits"
    except ShapeError as error:
        found = f"refused: {error}"
    assert found.partition(":")[0] == expected, found
    COUNTS[expected] += 1


@pytest.mark.slow
def test_both_verdicts_occurred():
    """Runs after the property, in the order of the file: neither verdict is rare."""
    if sum(COUNTS.values()) < 100:
        test_same_verdict_on_flat_arguments()
    assert min(COUNTS.values()) > 0.08 * sum(COUNTS.values()), COUNTS
