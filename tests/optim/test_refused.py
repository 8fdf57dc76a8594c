"""Numbers that make no sense are refused on the host."""

import math

import pytest

from equikd.config import ref, validate
from equikd.errors import ConfigError
from equikd.optim import (
    Constant,
    Cosine,
    CosineOneCycle,
    Exponential,
    InverseSquareRoot,
    Join,
    Linear,
    LinearOneCycle,
    PiecewiseConstant,
    Polynomial,
    WarmupCosine,
    WarmupExponential,
    WarmupStableDecay,
)
from tests.optim._cases import CASES


@pytest.mark.parametrize("name", sorted(CASES))
def test_validate_lets_good_numbers_pass(name):
    assert validate(CASES[name]) is CASES[name]


def test_numbers_that_make_no_sense(snapshot):
    texts = []
    for schedule in [
        Linear(0.0, 1.0, -1),
        Linear(0.0, 1.0, -3, transition_begin=-2),
        Polynomial(0.0, 1.0, -1.0, 5),
        Cosine(1.0, 0),
        Cosine(1.0, 10, exponent=-1.0),
        Exponential(1.0, -1, -0.5, -1),
        WarmupCosine(0.0, 1.0, -1, 10),
        WarmupCosine(0.0, 1.0, 10, 10),
        WarmupExponential(0.0, 1.0, -1, -1, -0.5, -2),
        InverseSquareRoot(0.0, 1.0, -1),
        WarmupStableDecay(0.0, 1.0, 10, 20, 25),
        WarmupStableDecay(0.0, 1.0, -1, -1, 25, power=0.0),
        CosineOneCycle(0, 1.0, div_factor=0.0, final_div_factor=-1.0),
        CosineOneCycle(100, 1.0, pct_start=1.0),
        LinearOneCycle(1, 1.0),
        LinearOneCycle(100, 1.0, pct_start=0.9),
        LinearOneCycle(100, 1.0, pct_start=-0.1),
        LinearOneCycle(100, 1.0, pct_start=math.nan),
        PiecewiseConstant(1.0, ((-5, 0.5), (10, -0.1))),
        Join((), ()),
        Join((Constant(1.0), Constant(2.0)), ()),
        Join((Constant(1.0), 0.5), (10,)),
        Join((Constant(1.0), Constant(2.0), Constant(3.0)), (10, 5)),
        Join((Constant(1.0), Cosine(1.0, 0)), (-1,)),
    ]:
        with pytest.raises(ConfigError) as error:
            validate(schedule)
        texts.append(f"{schedule}\n{error.value}")
    snapshot("numbers", "\n\n".join(texts))


@pytest.mark.parametrize(
    ("boundaries", "text"),
    [
        ((1.5,), r"Join.boundaries\[0\]: wrong kind"),
        ((2**31,), r"Join.boundaries\[0\]: out of range"),
        (5, "Join.boundaries"),
    ],
    ids=["float", "too_large", "no_tuple"],
)
def test_boundaries_are_whole_numbers(boundaries, text):
    with pytest.raises(ConfigError, match=text):
        Join((Constant(1.0), Constant(2.0)), boundaries)


def test_what_a_reference_will_say_is_not_known_on_the_host():
    for schedule in [
        WarmupCosine(0.0, 1.0, ref("warmup"), 10),
        LinearOneCycle(ref("num_steps"), 1.0),
        PiecewiseConstant(1.0, ((ref("first"), 0.5), ref("second"))),
        Join((Constant(1.0), ref("other"), Constant(3.0)), (ref("first"), 5)),
        Join((Constant(1.0), Constant(2.0)), ref("turns")),
        Join(ref("members"), (5,)),
    ]:
        assert validate(schedule) is schedule
