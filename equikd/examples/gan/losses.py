"""What the players play for: each loss is small where the discriminator gives the wanted verdict."""

import jax

from equikd.config import config
from equikd.losses import Loss
from equikd.typing import Array, Float
from equikd.wiring import KeyPath


@config
class Verdict(Loss):
    """Cross entropy of scores with one verdict for all of them: -log sigmoid(score) for real, of -score for fake.

    The discriminator's loss is `Verdict("preds.real", real=True)` and `Verdict("preds.fake", real=False)`; that of the
    generator, `Verdict("preds.fake", real=True)`, is the one that does not saturate where it loses (Goodfellow et al.
    2014, arXiv:1406.2661, section 3).
    """

    depends_on = "element"

    scores: KeyPath
    """Key path of the log odds that an image is real, float `b`."""
    real: bool
    """The verdict that costs nothing."""

    def values(self, scores: Float[Array, " b"]) -> Float[Array, " b"]:
        """The cross entropy of each score."""
        return jax.nn.softplus(-scores if self.real else scores)
