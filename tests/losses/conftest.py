"""Mixing dtypes is an error in the tests of losses, as it may be in a user's program."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
