"""How well the players do: how often the discriminator is right, and how far the samples are from real images."""

import jax.numpy as jnp
import numpy as np

from equikd.config import config
from equikd.metrics import Average, Metric, State, state_field, sum_field
from equikd.typing import Array, Bool, Float, Int
from equikd.wiring import KeyPath


@config
class VerdictAccuracy(Metric):
    """How often a score says what it should; 0.5 on real images and samples alike is a discriminator that is beaten."""

    scores: KeyPath
    """Key path of the log odds that an image is real, float `b`."""
    real: bool
    """The right verdict."""

    def from_values(self, scores: Float[Array, " b"], mask: Bool[Array, " b"]) -> Average:
        """How often the sign is the right one."""
        return Average.of((scores > 0) == self.real, mask)


class Moments(State):
    """Mean and covariance of vectors, as sums.

    Attributes:
        count: how many vectors.
        total: their sum, float `d`.
        products: sum of their outer products, float `d d`.
    """

    count: Int[Array, ""] = sum_field()
    total: Float[Array, " d"] = sum_field()
    products: Float[Array, "d d"] = sum_field()

    @classmethod
    def of(cls, rows: Float[Array, " b *n"], mask: Bool[Array, " b"]) -> "Moments":
        """Those of the rows that count."""
        vectors = jnp.where(mask[:, None], rows.reshape(len(rows), -1), 0)
        return cls(mask.sum(), vectors.sum(0), vectors.T @ vectors)

    def compute(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance, float64 `d` and `d d`; nan of nothing."""
        total, products = np.asarray(self.total, np.float64), np.asarray(self.products, np.float64)
        mean = total / self.count
        return mean, products / self.count - np.outer(mean, mean)


@config
class FrechetDistance(Metric):
    """Distance of two sets of images, |m - n|^2 + tr(C + D - 2 (C D)^(1/2)), of means m, n and covariances C, D.

    Of the pixels themselves, where the usual one (Heusel et al. 2017, arXiv:1706.08500) has features of a network that
    is no part of this example. It falls as samples get better and more varied, and is not 0 for few images of one kind.
    """

    real: KeyPath
    """Key path of real images, float `b *n`."""
    fake: KeyPath
    """Key path of samples, float `b *n`."""

    class State(State):
        """Moments of both."""

        real: Moments = state_field()
        fake: Moments = state_field()

        def compute(self) -> np.floating | float:
            """The distance; nan of nothing."""
            (m, c), (n, d) = self.real.compute(), self.fake.compute()
            if not np.isfinite(m).all():
                return np.nan
            values, vectors = np.linalg.eigh(c)
            root = vectors * np.sqrt(values.clip(0)) @ vectors.T  # of c; what rounding makes negative is 0
            overlap = np.sqrt(np.linalg.eigvalsh(root @ d @ root).clip(0)).sum()
            return ((m - n) ** 2).sum() + np.trace(c) + np.trace(d) - 2 * overlap

    def from_values(self, real: Float[Array, " b *n"], fake: Float[Array, " b *n"], mask: Bool[Array, " b"]) -> State:
        """Moments of the rows that count."""
        return self.State(Moments.of(real, mask), Moments.of(fake, mask))
