"""Summaries: results that are no numbers. A metric whose value is an image, a text or a histogram computes one.

    def compute(self) -> ek.metrics.Images:
        return ek.metrics.Images.of(self.rows.values, low=-1.0, high=1.0)

A state's `compute` gives a scalar, a summary, or a dict of both. Scalars go to all writers; summaries to those that can
show them (TensorBoard), to `Record.summaries` and to `result.summaries`, by `split/name`. They are plain values on the
host, equal by content. `ShowImages`, `ShowTexts` and `Histogram` make the usual ones.
"""

import dataclasses
from collections.abc import Iterable
from types import ModuleType
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import WiringError, message
from equikd.metrics._elements import arrays_of, wide

CHANNELS = (1, 3, 4)
_SHORT = 40  # characters of a text in a repr


class Summary:
    """Base of all results that are no scalars; a summary that no writer knows is kept in the results alone.

    A class of one's own is a frozen dataclass made with `eq=False`, whose fields hold numpy arrays, texts or trees of
    these: two summaries are equal if their class and contents are, nan being equal to nan.
    """

    @final
    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        (ours, tree), (theirs, other_tree) = jax.tree.flatten(vars(self)), jax.tree.flatten(vars(other))
        return tree == other_tree and all(map(_same, ours, theirs))

    @final
    def __hash__(self) -> int:
        leaves, tree = jax.tree.flatten(vars(self))
        return hash((type(self), tree, tuple(np.shape(leaf) for leaf in leaves)))


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray):
        return type(one) is type(other) and bool(one == other)
    if not isinstance(other, np.ndarray) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(np.all((one == other) | ((one != one) & (other != other))))


def _kept(array: Any) -> np.ndarray:
    """A copy on the host that stays as it is."""
    kept = np.array(array)
    kept.flags.writeable = False
    return kept


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Images(Summary):
    """Images of one size, as a screen shows them.

    Attributes:
        pixels: uint8 `n h w c`; `c` is 1 (grey), 3 (red, green, blue) or 4 (and opacity).

    Raises:
        WiringError: another dtype or shape.

    Example:
        >>> images = Images.of(np.array([[[0.0, 0.5], [1.0, np.nan]]]))
        >>> images, images.pixels[0, :, :, 0].tolist()
        (Images(1 of 2 x 2 x 1), [[0, 128], [255, 0]])
    """

    pixels: np.ndarray

    def __post_init__(self) -> None:
        pixels = _kept(self.pixels)
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] not in CHANNELS:
            got = f"{pixels.dtype}{list(pixels.shape)}"
            expected = "uint8[n, h, w, c], c being 1, 3 or 4"
            fix = None if pixels.dtype == np.uint8 else "ek.metrics.Images.of(values, low=0.0, high=1.0)"
            raise WiringError(message("Images: not images", got=got, expected=expected, fix=fix))
        object.__setattr__(self, "pixels", pixels)

    @classmethod
    def of(cls, values: Any, *, low: float = 0.0, high: float = 1.0) -> "Images":
        """Images from floats between `low` (black) and `high` (white), from bools, or from uint8 as they are.

        Args:
            values: float, bool or uint8, `n h w c` or `n h w`. What lies outside is cut off; nan is black.
            low: the value that is shown as 0.
            high: the value that is shown as 255.

        Raises:
            WiringError: another dtype or shape.
        """
        values = np.asarray(values)
        if not (values.dtype in (np.uint8, np.bool_) or jnp.issubdtype(values.dtype, jnp.floating)):
            got, fix = f"{values.dtype}{list(values.shape)}", "astype: of other ints nobody knows which one is white"
            raise WiringError(message("Images: not images", got=got, expected="floats, bools or uint8", fix=fix))
        return cls(as_pixels(values, low, high))

    def __repr__(self) -> str:
        count, *size = self.pixels.shape
        return f"Images({count} of {' x '.join(map(str, size))})"


def as_pixels(values: Any, low: Any, high: Any) -> Any:
    """Images as uint8 `n h w c`; inside a trace too.

    Args:
        values: float, bool or uint8 (kept as it is), `n h w c` or `n h w`.
        low: the float that becomes 0, as does nan.
        high: the float that becomes 255.
    """
    arrays: ModuleType = arrays_of(values)
    if values.ndim == 3:
        values = values[..., None]
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        low, high = 0.0, 1.0
    # Nothing is added to a product, so that no compiler can fuse the two and round in another way.
    scaled = (wide(values) - low) / (high - low)
    scaled = arrays.where(arrays.isnan(scaled), arrays.zeros_like(scaled), arrays.clip(scaled, 0.0, 1.0))
    return arrays.round(scaled * 255.0).astype(np.uint8)


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Texts(Summary):
    """Texts, each on its own.

    Attributes:
        texts: tuple of str.

    Raises:
        WiringError: something else.

    Example:
        >>> Texts(("the cat", "sat"))
        Texts(2: 'the cat', 'sat')
    """

    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        alone = isinstance(self.texts, str | bytes) or not isinstance(self.texts, Iterable)
        texts = (self.texts,) if alone else tuple(self.texts)
        wrong = texts if alone else [text for text in texts if type(text) is not str]
        if wrong:
            got = f"{type(wrong[0]).__name__} {wrong[0]!r:.80}"
            raise WiringError(message("Texts: not a tuple of texts", got=got, expected='Texts(("one", "two"))'))
        object.__setattr__(self, "texts", texts)

    def __repr__(self) -> str:
        shown = [repr(text if len(text) <= _SHORT else text[: _SHORT - 3] + "...") for text in self.texts[:3]]
        return f"Texts({len(self.texts)}: {', '.join([*shown, *(['...'] if len(self.texts) > 3 else [])])})"


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BinCounts(Summary):
    """How many values lie in each bin: a histogram.

    Attributes:
        counts: int `bins`.
        edges: float `bins + 1`, ascending; nan where nothing was counted.
        below: how many lie below the first edge.
        above: how many lie above the last edge, or are nan.

    Raises:
        WiringError: the edges do not fit the counts.

    Example:
        >>> found = BinCounts(np.array([3, 1]), np.array([0.0, 0.5, 1.0]), below=0, above=2)
        >>> found, found.total
        (BinCounts(4 in 2 bins from 0 to 1, 0 below, 2 above), 6)
    """

    counts: np.ndarray
    edges: np.ndarray
    below: int = 0
    above: int = 0

    def __post_init__(self) -> None:
        counts, edges = _kept(self.counts), _kept(self.edges)
        if counts.ndim != 1 or len(counts) < 1 or edges.shape != (len(counts) + 1,):
            got = f"counts {list(counts.shape)}, edges {list(edges.shape)}"
            raise WiringError(message("BinCounts: no bins", got=got, expected="one edge more than counts"))
        kept = {"counts": counts, "edges": edges, "below": int(self.below), "above": int(self.above)}
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    @property
    def total(self) -> int:
        """How many values there are, inside and outside."""
        return int(self.counts.sum()) + self.below + self.above

    def __repr__(self) -> str:
        span = f"{len(self.counts)} bins from {float(self.edges[0]):.6g} to {float(self.edges[-1]):.6g}"
        return f"BinCounts({int(self.counts.sum())} in {span}, {self.below} below, {self.above} above)"


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Values(Summary):
    """Arrays as they are; no writer shows them, `result.summaries` and `Record.summaries` have them.

    Attributes:
        values: a numpy array, or a pytree of arrays.

    Example:
        >>> found = Values({"x": np.zeros((2, 3), np.float32)})
        >>> found, found.values["x"].shape
        (Values(float32[2, 3]), (2, 3))
    """

    values: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", jax.tree.map(_kept, self.values))

    def __repr__(self) -> str:
        shapes = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(self.values)]
        return f"Values({', '.join(shapes[:4] + (['...'] if len(shapes) > 4 else []))})"
