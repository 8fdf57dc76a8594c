"""Errors: the builder lays its answers out in one order, and every error type is caught by its base."""

import pytest

from equikd import errors
from equikd.errors import ConfigError, EquikdError, listing, message, nearest, report


def test_a_message_answers_in_order(snapshot):
    full = message(
        "optimizer.learning_rat: no such argument",
        where="--cfg.optimizer.learning_rat",
        got="'learning_rat'",
        expected="one of\nlearning_rate, b1, b2",
        near=("learning_rate", "b1"),
        fix="write optimizer.learning_rate",
    )
    snapshot("full", full)
    assert [line.split(":")[0].strip() for line in full.splitlines()[1:] if not line.startswith("   ")] == [
        "where",
        "got",
        "expected",
        "nearest",
        "fix",
    ]


def test_unknown_answers_are_left_out():
    assert message("wrong") == "wrong"
    assert message("wrong", got="") == "wrong\n  got:      "
    assert "nearest" not in message("wrong", near=())


def test_a_report_joins_messages_and_a_single_one_stands_alone(snapshot):
    assert report("2 things are wrong", ["a: no"]) == "a: no"
    snapshot("report", report("2 things are wrong", [message("a: no", got="1"), message("b: no", fix="write\n2")]))


def test_nearest_is_ordered_and_never_repeats():
    assert nearest("learning_rat", ["b1", "learning_rate", "learning_rate"]) == ("learning_rate",)
    assert nearest("xyz", ["learning_rate"]) == ()
    assert nearest("b", ["b1", "b2", "b3", "b4"], count=2) == ("b4", "b3")


@pytest.mark.parametrize(
    ("count", "limit", "text"), [(0, 2, ""), (2, 2, "0, 1"), (3, 2, "0, 1, ... (1 more)"), (13, 12, None)]
)
def test_listing_cuts_and_counts(count, limit, text):
    cut = listing(range(count), limit)
    assert cut == text if text is not None else cut.endswith(", ... (1 more)")


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("ConfigError", TypeError),
        ("WiringError", ValueError),
        ("CheckpointError", ValueError),
        ("DataError", ValueError),
    ],
)
def test_each_error_is_an_equikd_error_and_a_python_one(name, also):
    kind = getattr(errors, name)
    assert issubclass(kind, EquikdError)
    assert issubclass(kind, also)
    with pytest.raises(also, match="text"):
        raise kind("text")
    assert issubclass(EquikdError, Exception)
    assert ConfigError.__doc__


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("lr", "learning_rate"),
        ("epochs", "num_steps"),
        ("steps", "num_steps"),
        ("optim", "optimizer"),
        ("dataset", "train_data"),
        ("bs", "batch_size"),
        ("optimizer.lr", "optimizer.learning_rate"),
    ],
)
def test_nearest_knows_what_others_call_it(name, first):
    options = ["step", "learning_rate", "num_steps", "optimizer", "train_data", "batch_size", "optimizer.learning_rate"]
    found = nearest(name, options)
    assert found[0] == first or (name == "optimizer.lr" and first in found)
    assert first not in nearest(name, [option for option in options if option != first])


def test_a_report_is_cut_after_ten(snapshot):
    assert "more" not in report("10 are wrong", [f"{i}: no" for i in range(10)])
    snapshot("long_report", report("12 are wrong", [f"{i}: no" for i in range(12)]))
