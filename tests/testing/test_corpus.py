"""On every annotated function of the corpus: of what is drawn to fit none is refused, of what is broken all are.

The draws and the verdict on what is a violation come from `equikd.testing`, the refusals from the binder; what one of
them gets wrong about the annotation language shows here.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from jaxtyping import TypeCheckError

from equikd.testing import DrawError, arguments, violations
from equikd.typing import typechecked


def load(name):
    path = Path(__file__).parents[1] / "typing" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


CORPUS = (sys.modules.get("corpus") or load("corpus")).CORPUS
NOTHING_TO_BREAK = {"plain_values", "plain_containers", "pytree_composite"}
NUMBERS = [15, pytest.param(100, marks=pytest.mark.slow)]


def some(number):
    return settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", CORPUS)
def test_valid_calls_are_taken(name, number):
    checked = typechecked(CORPUS[name])

    @some(number)
    @given(arguments(CORPUS[name], dtypes="all"))
    def taken(call):
        call.eval_shape(checked)

    taken()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", CORPUS)
def test_violations_are_refused(name, number):
    checked = typechecked(CORPUS[name])
    if name in NOTHING_TO_BREAK:
        with pytest.raises(DrawError, match="nothing can be broken"):
            violations(CORPUS[name])
        return

    @some(number)
    @given(violations(CORPUS[name], dtypes="all"))
    def refused(call):
        with pytest.raises(TypeCheckError):
            call.eval_shape(checked)

    refused()
