"""Summaries: images from floats of any kind, equality by content, reprs of one line, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from equikd.errors import WiringError
from equikd.metrics import BinCounts, Images, Summary, Texts, Values

_RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.float64])
def test_floats_are_shown_from_low_to_high(dtype):
    values = np.array([-3.0, -1.0, 0.0, 1.0, 5.0, np.inf, -np.inf, np.nan], np.float64).astype(dtype)
    images = Images.of(values.reshape(1, 2, 4, 1), low=-1.0, high=1.0)
    assert images.pixels.dtype == np.uint8
    assert images.pixels.ravel().tolist() == [0, 0, 128, 255, 255, 255, 0, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bytes_come_back_from_their_floats(dtype):
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    assert Images.of(pixels.astype(dtype) / 255) == Images(pixels)
    assert Images.of(pixels, low=3.0, high=4.0) == Images(pixels)


def test_bools_and_images_without_channels():
    mask = np.array([[[True, False]]])
    assert Images.of(mask, high=7.0).pixels.tolist() == [[[[255], [0]]]]
    assert Images.of(jnp.zeros((3, 4, 5))).pixels.shape == (3, 4, 5, 1)


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (2, 0, 4, 1)])
def test_nothing_is_an_image_too(shape):
    assert Images.of(np.zeros(shape)).pixels.shape == shape


WRONG = {
    "two_channels": lambda: Images.of(np.zeros((1, 4, 4, 2))),
    "floats": lambda: Images(np.zeros((1, 4, 4, 3))),
    "other_ints": lambda: Images.of(np.zeros((1, 4, 4, 3), int)),
    "one_image": lambda: Images.of(np.zeros((4, 4))),
    "one_text": lambda: Texts("the cat"),  # pyright: ignore[reportArgumentType]
    "bytes": lambda: Texts((b"the cat",)),  # pyright: ignore[reportArgumentType]
    "edges": lambda: BinCounts(np.zeros(3, int), np.zeros(3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_summary_is_refused(name, snapshot):
    with pytest.raises(WiringError) as error:
        WRONG[name]()
    snapshot(name, str(error.value))


def some() -> list[Summary]:
    """Summaries, no two of them equal."""
    pixels, edges = _pixels(), np.array([0.0, 1.0, 2.0])
    return [
        Images(pixels),
        Images(pixels[:1]),
        Images(pixels.reshape(2, 2, 3, 1)),
        Texts(("a", "b")),
        Texts(("a", "c")),
        Texts(()),
        BinCounts(np.array([1, 2]), edges),
        BinCounts(np.array([1, 2]), edges, below=1),
        BinCounts(np.array([1, 2]), edges + 1),
        Values(np.array([1.0, np.nan])),
        Values(np.array([1.0, 2.0])),
        Values(np.array([1.0, np.nan], np.float32)),
        Values({"x": np.array([1.0, np.nan])}),
        Values(np.array(["a"])),
        Values(np.array([1, np.nan], jnp.bfloat16)),
    ]


def _pixels():
    return np.arange(12, dtype=np.uint8).reshape(2, 3, 2, 1)


def test_equal_by_content():
    for i, one in enumerate(some()):
        for j, other in enumerate(some()):
            assert (one == other) is (i == j)
            assert hash(one) == hash(other) or i != j


def test_a_repr_is_one_short_line():
    large = [
        Images(np.zeros((8, 224, 224, 3), np.uint8)),
        Texts(("word " * 100_000,) * 100),
        BinCounts(np.zeros(10_000, int), np.linspace(0, 1, 10_001)),
        Values({f"x{i}": np.zeros(1000) for i in range(100)}),
    ]
    for one in large:
        assert len(repr(one)) < 200
        assert "\n" not in repr(one)
    assert repr(large[0]) == "Images(8 of 224 x 224 x 3)"


def test_contents_are_copies_that_stay():
    pixels = _pixels()
    images, values = Images(pixels), Values([pixels])
    pixels[:] = 0
    assert images == Images(_pixels())
    assert values == Values([_pixels()])
    with pytest.raises(ValueError, match="read-only"):
        images.pixels[:] = 0
