"""ShowImages and ShowTexts: the first real rows, whatever the batches; never padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equikd.config import config, validate
from equikd.errors import ConfigError, WiringError
from equikd.metrics import Aux, Images, Metric, ShowImages, ShowTexts, State, Texts, empty_state, truncate_field
from equikd.metrics._rows import Rows
from equikd.testing import check_metric
from equikd.typing import Array, Bool, Float, ShapeError
from equikd.wiring import KeyPath

N, ROWS = 3, 4


def letters(tokens):
    return "".join(chr(97 + token) for token in tokens)


@jax.jit
def images_of(images, mask):
    return ShowImages(images="batch.image", n=N, low=-1.0).from_values(images, mask)


@jax.jit
def texts_of(tokens, mask):
    return ShowTexts(tokens="batch.tokens", decode=letters, n=N).from_values(tokens, mask)


_MERGE = jax.jit(lambda a, b: a | b)
masks = st.lists(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS), min_size=1, max_size=4)


@settings(max_examples=25)
@given(masks, st.integers(0, 99), st.sampled_from([np.nan, np.inf]))
def test_the_first_real_rows_of_any_batches(masks, seed, junk):
    random, mask = np.random.default_rng(seed), np.array(masks)
    image = random.uniform(-1, 1, (*mask.shape, 2, 3, 1)).astype(np.float32)
    tokens = random.integers(0, 26, (*mask.shape, 5)).astype(np.int32)
    shown, spelt = Images.of(image[mask][:N], low=-1.0), Texts(tuple(map(letters, tokens[mask][:N])))
    image[~mask], tokens[~mask] = junk, 77
    batches = [(jnp.asarray(x), jnp.asarray(t), jnp.asarray(m)) for x, t, m in zip(image, tokens, mask, strict=True)]
    images, texts = images_of(batches[0][0], batches[0][2]), texts_of(batches[0][1], batches[0][2])
    for x, t, m in batches[1:]:
        images, texts = _MERGE(images, images_of(x, m)), _MERGE(texts, texts_of(t, m))
    assert images.finalize().compute() == shown
    assert texts.finalize().compute() == spelt


def test_no_rows_show_nothing():
    image, mask = jnp.full((ROWS, 2, 3, 1), jnp.nan), jnp.zeros(ROWS, bool)
    tokens = jnp.full((ROWS, 5), -1)
    for state in (images_of(image, mask), empty_state(images_of(image, mask))):
        assert state.finalize().compute() == Images(np.zeros((0, 2, 3, 1), np.uint8))
    for state in (texts_of(tokens, mask), empty_state(texts_of(tokens, mask))):
        assert state.finalize().compute() == Texts(())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.uint8, jnp.bool_])
@pytest.mark.parametrize("channels", [(), (1,)])
def test_dtypes(dtype, channels):
    image = jnp.asarray([[0, 1]] * 2, dtype).reshape(2, 1, 2, *channels)
    state = ShowImages(images="preds").from_values(image, jnp.ones(2, bool))
    expected = np.array([0, 1 if dtype == jnp.uint8 else 255] * 2, np.uint8)
    assert state.finalize().compute() == Images(expected.reshape(2, 1, 2, 1))


@pytest.mark.parametrize("shape", [(ROWS, 2, 3, 2), (ROWS, 2, 3, 5), (ROWS, 2), (ROWS, 2, 3, 3, 3)])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(ShapeError, match="images"):
        ShowImages(images="preds").from_values(jnp.zeros(shape), jnp.ones(ROWS, bool))


@pytest.mark.parametrize("n", [0, -1])
def test_to_show_nothing_is_refused(n):
    for metric in (ShowImages(images="preds", n=n), ShowTexts(tokens="preds", n=n)):
        with pytest.raises(ConfigError, match="the first n rows"):
            validate(metric)
    with pytest.raises(ConfigError, match="a range without width"):
        validate(ShowImages(images="preds", low=1.0))


@pytest.mark.parametrize(("columns", "rows", "across"), [(2, 2, 2), (3, 1, 3), (8, 1, 3)])
@pytest.mark.parametrize("scale", [1, 2])
def test_columns_lay_images_out_as_one(columns, rows, across, scale):
    values = jnp.arange(4 * 2 * 3, dtype=jnp.uint8).reshape(4, 2, 3)
    metric = ShowImages(images="preds", n=4, columns=columns, scale=scale)
    (grid,) = metric.from_values(values, jnp.array([True, True, False, True])).finalize().compute().pixels
    assert grid.shape == (rows * (2 + 1) * scale - scale, across * (3 + 1) * scale - scale, 1)
    grid = np.pad(grid, ((0, scale), (0, scale), (0, 0)), constant_values=128)
    small = grid[::scale, ::scale, 0]
    np.testing.assert_array_equal(grid[..., 0], small.repeat(scale, 0).repeat(scale, 1))
    cells = small.reshape(rows, 3, across, 4).swapaxes(1, 2).reshape(-1, 3, 4)
    np.testing.assert_array_equal(cells[:3, :2, :3], values[jnp.array([0, 1, 3])])
    empty = cells[:, :2, :3][3:]
    assert (cells[:, 2] == 128).all()
    assert (cells[:, :, 3] == 128).all()
    assert (empty == 128).all()


def test_a_grid_of_nothing_and_of_colours_with_opacity():
    metric = ShowImages(images="preds", n=2, columns=2, scale=3)
    none = metric.from_values(jnp.zeros((2, 2, 2, 4)), jnp.zeros(2, bool)).finalize().compute()
    assert none.pixels.shape == (0, 6, 6, 4)
    (grid,) = metric.from_values(jnp.zeros((2, 2, 2, 4)), jnp.ones(2, bool)).finalize().compute().pixels
    assert grid[0, 6].tolist() == [128, 128, 128, 255]
    assert grid[0, 0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("field", ["columns", "scale"])
def test_no_columns_and_no_scale_are_refused(field):
    with pytest.raises(ConfigError, match=f"ShowImages.{field}: too small"):
        validate(ShowImages(images="preds", **{field: 0}))


def test_low_and_high_may_be_traced():
    image, mask = jnp.linspace(0, 2, 2 * 2 * 3).reshape(2, 2, 3), jnp.ones(2, bool)
    shown = jax.jit(lambda metric: metric.from_values(image, mask))(ShowImages(images="preds", n=2, high=2.0))
    assert shown.finalize().compute() == Images.of(image, high=2.0)


def test_a_mask_of_tokens_leaves_tokens_out():
    tokens = jnp.array([[2, 0, 19, 9], [9, 9, 9, 9], [3, 14, 6, 9]])
    mask = jnp.array([[True, True, True, False], [False] * 4, [True, True, True, False]])
    state = ShowTexts(tokens="preds", decode=letters).from_values(tokens, mask)
    assert state.finalize().compute() == Texts(("cat", "dog"))


def test_without_a_decode_the_numbers_are_shown():
    state = ShowTexts(tokens="preds").from_values(jnp.array([[3, 1]], jnp.uint8), jnp.ones(1, bool))
    assert state.finalize().compute() == Texts(("3 1",))


def test_texts_of_length_0():
    state = ShowTexts(tokens="preds", decode=letters).from_values(jnp.zeros((2, 0), jnp.int32), jnp.ones(2, bool))
    assert state.finalize().compute() == Texts(("", ""))


def unknown(tokens):
    raise KeyError("no such token")


def as_bytes(tokens):
    return letters(tokens).encode()


def test_a_decode_that_fails_is_named():
    def results(decode):
        state = ShowTexts(tokens="preds", decode=decode).from_values(jnp.zeros((1, 2), jnp.int32), jnp.ones(1, bool))
        return Aux(metrics={"sample": state}).summaries()

    with pytest.raises(KeyError, match="no such token") as error:
        results(unknown)
    assert "while computing metric 'sample' (ShownTexts.compute)" in error.value.__notes__
    with pytest.raises(WiringError, match=r"ShowTexts.decode \(as_bytes\) gives no text\n.* bytes b'aa' of int32\[2\]"):
        results(as_bytes)


def test_decoders_of_one_making_are_equal():
    tokens, mask = jnp.zeros((1, 2), jnp.int32), jnp.ones(1, bool)

    def made(suffix):
        return lambda tokens: letters(tokens) + suffix

    a, b, c = (ShowTexts(tokens="preds", decode=d).from_values(tokens, mask) for d in (made("."), made("."), letters))
    assert (a | b).finalize().compute() == Texts(("aa.", "aa."))
    with pytest.raises(WiringError, match="decode"):
        a | c


@pytest.mark.parametrize(
    "examples", [pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("metric", [ShowImages(images="preds", n=3), ShowTexts(tokens="preds", n=3)])
def test_laws(metric, examples):
    axes = {"b": st.sampled_from([3, 4])}
    check_metric(metric, axes=axes, examples=examples)


class ShownWrong(State):
    rows: Rows = truncate_field(2)

    def compute(self) -> Images:
        return Images(self.rows.values)


@config
class ShowsPadding(Metric):
    images: KeyPath = "preds"

    def from_values(self, images: Float[Array, "b h w"], mask: Bool[Array, " b"]) -> ShownWrong:
        pixels = jnp.clip(images[..., None] * 50, 0, 255).astype(jnp.uint8)
        return ShownWrong(Rows(pixels, jnp.ones_like(mask)))


def test_the_laws_compare_summaries_by_content():
    with pytest.raises(AssertionError, match="ShowsPadding"):
        check_metric(ShowsPadding(), axes={"b": st.sampled_from([3, 4])}, examples=2)
