"""Metrics that show some of the rows: `ShowImages` and `ShowTexts`, whose values are summaries.

Both keep the first n real rows of an interval or dataset in a fixed shape, so that they work on the device like any
other metric; padding is never shown. Images become bytes where they are computed, texts are made of tokens on the host.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from equikd.config import config
from equikd.errors import ConfigError, WiringError, message
from equikd.metrics._base import Metric
from equikd.metrics._elements import each
from equikd.metrics._rows import Rows
from equikd.metrics._state import State, static_field, truncate_field
from equikd.metrics._summaries import Images, Texts, as_pixels
from equikd.typing import Array, Bool, Float, Integer
from equikd.wiring import KeyPath


def check_count(owner: str, n: Any) -> None:
    """Refuse to keep no rows."""
    if type(n) is not int or n < 1:
        raise ConfigError(
            message(f"{owner}: it shows the first n rows", got=f"n={n!r}", expected="an int of 1 or more")
        )


@functools.cache  # the state's class is part of the program: one for each n and layout, for good
def _images(n: int, columns: int | None, scale: int) -> Callable[[Rows], State]:
    class ShownImages(State):
        __qualname__ = "ShownImages"
        rows: Rows = truncate_field(n)

        def compute(self) -> Images:
            pixels = np.asarray(self.rows.values).repeat(scale, axis=1).repeat(scale, axis=2)
            return Images(pixels if columns is None else tiled(pixels, columns, gap=scale))

    return ShownImages


def tiled(pixels: np.ndarray, columns: int, *, gap: int) -> np.ndarray:
    """Images beside and below each other, as one image; none as none.

    Args:
        pixels: uint8 `n h w c`.
        columns: how many stand beside each other.
        gap: grey pixels between two of them.

    Example:
        >>> tiled(np.zeros((5, 8, 8, 1), np.uint8), 3, gap=2).shape
        (1, 18, 28, 1)
    """
    count, height, width, channels = pixels.shape
    if not count:
        return pixels
    columns, down = min(columns, count), -(-count // columns)
    full = np.full((down * columns, height + gap, width + gap, channels), 128, np.uint8)
    full[..., 3:] = 255  # where there is opacity, the grey is opaque
    full[:count, :height, :width] = pixels
    grid = full.reshape(down, columns, *full.shape[1:]).swapaxes(1, 2)
    return grid.reshape(1, down * (height + gap), columns * (width + gap), channels)[:, : -gap or None, : -gap or None]


@config
class ShowImages(Metric):
    """The first n images, as `Images`; TensorBoard shows them.

    Floats are shown from `low` (black) to `high` (white), what lies outside as the nearer of the two, nan as black.
    Bytes (uint8) and bools are shown as they are. `low` and `high` may change without a new compile. With `columns`
    they are laid out as one image, which is how samples of a generator are looked at.

    Example:
        >>> images, mask = jnp.zeros((3, 28, 28, 1)), jnp.array([True, False, True])
        >>> ShowImages(images="batch.image").from_values(images, mask).finalize().compute()
        Images(2 of 28 x 28 x 1)
    """

    images: KeyPath
    """Key path of the images: float, bool or uint8, `b h w c` with 1, 3 or 4 channels, or `b h w`."""
    n: int = 8
    """How many are shown."""
    low: float = 0.0
    """The float that is black."""
    high: float = 1.0
    """The float that is white."""
    columns: int | None = None
    """How many stand beside each other in one image that holds them all; None: each is an image of its own."""
    scale: int = 1
    """Pixels of the screen, in height and width, for one of the image's."""

    def validate(self) -> None:
        """Refuse a range without width, no images, no columns or a scale below 1."""
        check_count("ShowImages", self.n)
        for name, value in (("columns", self.columns), ("scale", self.scale)):
            if value is not None and value < 1:
                raise ConfigError(
                    message(f"ShowImages.{name}: too small", got=f"{value}", expected="an int of 1 or more")
                )
        if not self.low < self.high:
            got = f"low={self.low}, high={self.high}"
            raise ConfigError(message("ShowImages: a range without width", got=got, expected="low < high"))

    def from_values(
        self,
        images: Float[Array, "b h w"]
        | Float[Array, "b h w 1"]
        | Float[Array, "b h w 3"]
        | Float[Array, "b h w 4"]
        | UInt8[Array, "b h w"]
        | UInt8[Array, "b h w 1"]
        | UInt8[Array, "b h w 3"]
        | UInt8[Array, "b h w 4"]
        | Bool[Array, "b h w"]
        | Bool[Array, "b h w 1"],
        mask: Bool[Array, " b"],
    ) -> State:
        """The first images that the mask keeps, as bytes."""
        return _images(self.n, self.columns, self.scale)(Rows(as_pixels(images, self.low, self.high), mask))


class Decoder:
    """A function in a static field: those that one line of code has made are equal.

    A node makes its object again in each trace; what tells two experiments apart is the node in their config. So two of
    these that one line has made must not be told apart by what they hold: states of two metrics never merge.
    """

    def __init__(self, function: Callable[[Any], str]) -> None:
        self.function = function
        self.made_by = getattr(inspect.unwrap(function), "__code__", None) or type(function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decoder) and self.made_by is other.made_by

    def __hash__(self) -> int:
        return hash(self.made_by)

    def __call__(self, tokens: np.ndarray) -> str:
        """The text of some tokens, int `t`."""
        text = self.function(tokens)
        if not isinstance(text, str):
            name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
            got = f"{type(text).__name__} {text!r:.80} of {tokens.dtype}{list(tokens.shape)}"
            raise WiringError(message(f"ShowTexts.decode ({name}) gives no text", got=got, expected="a str"))
        return str(text)


@functools.cache
def _texts(n: int) -> Callable[[Rows, Decoder], State]:
    class ShownTexts(State):
        __qualname__ = "ShownTexts"
        rows: Rows = truncate_field(n)
        decode: Decoder = static_field()

        def compute(self) -> Texts:
            tokens, keep = (np.asarray(part) for part in self.rows.values)
            return Texts(tuple(self.decode(row[kept]) for row, kept in zip(tokens, keep, strict=True)))

    return ShownTexts


def numbers(tokens: np.ndarray) -> str:
    """Tokens as their numbers.

    Example:
        >>> numbers(np.array([3, 1, 2]))
        '3 1 2'
    """
    return " ".join(map(str, tokens.tolist()))


@config
class ShowTexts(Metric):
    """The first n texts, decoded from tokens, as `Texts`; TensorBoard shows them.

    Example:
        >>> def letters(tokens):
        ...     return "".join(chr(97 + token) for token in tokens)
        >>> tokens, mask = jnp.array([[2, 0, 19], [9, 9, 9], [3, 14, 6]]), jnp.array([True, False, True])
        >>> ShowTexts(tokens="batch.tokens", decode=letters).from_values(tokens, mask).finalize().compute()
        Texts(2: 'cat', 'dog')
    """

    tokens: KeyPath
    """Key path of the tokens, any integer dtype, `b t`."""
    decode: Callable[[Any], str] | None = None
    """A function from the tokens of one text (a numpy int array `t`) to str, or a node that makes one; it is called on
    the host. None: their numbers."""
    n: int = 8
    """How many are shown."""

    def validate(self) -> None:
        """Refuse to show nothing."""
        check_count("ShowTexts", self.n)

    def from_values(self, tokens: Integer[Array, "b t"], mask: Bool[Array, "b ..."]) -> State:
        """The first texts that the mask keeps; of a mask `b t`, the tokens that it keeps of these."""
        keep = each(tokens, mask)
        real = mask if mask.ndim == 1 else jnp.any(mask, axis=1)
        return _texts(self.n)(Rows((tokens, keep), real), Decoder(self.decode or numbers))
