"""PNG: Pillow decodes every size and kind of image to the bytes that were written."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from equikd.train._png import png


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3, 4]), st.integers(0, 2**32 - 1))
def test_pixels_come_back(height, width, channels, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels)).astype(np.uint8)
    with Image.open(io.BytesIO(png(pixels))) as image:
        assert image.mode == {1: "L", 3: "RGB", 4: "RGBA"}[channels]
        np.testing.assert_array_equal(np.asarray(image).reshape(pixels.shape), pixels)


@pytest.mark.parametrize("change", [lambda x: x[::-1, ::2], lambda x: x.transpose(1, 0, 2)], ids=["strides", "axes"])
def test_arrays_that_do_not_lie_in_one_piece(change):
    pixels = change(np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3))
    with Image.open(io.BytesIO(png(pixels))) as image:
        np.testing.assert_array_equal(np.asarray(image), pixels)
