"""Losses of vectors, of distributions, of pairs in a batch, of parameters, and of whatever a key path names.

`Contrastive` is the one whose rows depend on each other: its value of a row is a function of all rows that count, so
its mean over a batch is not the mean over the batch's halves, and micro-batches see fewer negatives.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from equikd.config import config
from equikd.errors import WiringError, listing, message
from equikd.losses._base import Loss, replace_masked, widened
from equikd.typing import Array, Bool, Float, Num
from equikd.wiring import KeyPath, KeyPaths, leaves_at


@config
class Cosine(Loss):
    """One minus the cosine of the angle between two vectors, 1 - preds . targets / (|preds| |targets|), from 0 to 2.

    `optax.losses.cosine_distance`, but with an epsilon that is not 0 by default, so that a vector of zeros gives 1 and
    a finite gradient instead of nan. Computed in float32 at least.

    Example:
        >>> loss = Cosine(preds="preds", targets="batch.y")
        >>> loss.values(jnp.array([[1.0, 0.0], [0.0, 0.0]]), jnp.array([[-3.0, 0.0], [1.0, 0.0]])).tolist()
        [2.0, 1.0]
    """

    depends_on = "element"

    preds: KeyPath
    """Key path of the predicted vectors, float `b *n d`."""
    targets: KeyPath
    """Key path of the vectors to point along, `b *n d`, any numeric dtype."""
    epsilon: float = 1e-12
    """Smallest squared length that a vector is divided by, above 0; a traced float."""

    def validate(self) -> None:
        """Refuse an epsilon that is not above 0."""
        if isinstance(self.epsilon, float) and not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, got {self.epsilon}")

    def values(self, preds: Float[Array, "b *n d"], targets: Num[Array, "b *n d"]) -> Float[Array, " b *n"]:
        """The cosine distance of each pair of vectors."""
        preds, targets = widened(preds, targets)
        return optax.losses.cosine_distance(preds, targets, epsilon=jnp.asarray(self.epsilon, preds.dtype))


@config
class KLDivergence(Loss):
    """KL(targets || softmax(logits)) = sum_k t_k (log t_k - log softmax(logits)_k), in nats, one value for each row.

    `optax.losses.kl_divergence` of `log_softmax(logits)`; log probabilities are logits too, and stay as they are. Terms
    with t_k = 0 are 0, also against a class that a logit of -inf rules out, in the gradient as well (Kullback and
    Leibler 1951). Its gradient with respect to the logits is that of `SoftmaxCrossEntropy` on the same targets.
    Computed in float32 at least.

    Example:
        >>> loss = KLDivergence(logits="preds.logits", targets="batch.teacher")
        >>> print(loss.values(jnp.array([[0.0, 0.0]]), jnp.array([[1.0, 0.0]])).round(3))
        [0.693]
    """

    depends_on = "element"

    logits: KeyPath
    """Key path of unnormalised (or normalised) log probabilities, float `b *n classes`."""
    targets: KeyPath
    """Key path of probabilities, `b *n classes`; taken as they are, and not normalised."""

    def values(
        self, logits: Float[Array, "b *n classes"], targets: Num[Array, "b *n classes"]
    ) -> Float[Array, " b *n"]:
        """The divergence of each row."""
        logits, targets = widened(logits, targets)
        log_preds = jax.nn.log_softmax(logits)
        # 0 log 0 is 0 in value alone: the chain rule would multiply that 0 by the infinite slope of the logarithm.
        some = targets != 0
        log_preds = jnp.where(some, log_preds, jnp.zeros_like(log_preds))
        return optax.losses.kl_divergence(log_preds, jnp.where(some, targets, jnp.ones_like(targets)))


@config
class Contrastive(Loss):
    """InfoNCE: find the key of each query among the keys of the batch, -log(exp(s_ii / t) / sum_j exp(s_ij / t)).

    s_ij is the cosine of query i and key j, t the temperature (van den Oord et al. 2018, arXiv:1807.03748). Keys of
    rows that the mask leaves out are no negatives; a lone row has none and the value 0. `symmetric=True` takes the mean
    with the loss of finding each key's query (CLIP, Radford et al. 2021, arXiv:2103.00020). optax has
    `softmax_cross_entropy_with_integer_labels`, used here, and `ntxent`, which is the loss of two views in one array
    and has other negatives. A temperature that is learned: scale the vectors in the model, with `normalize=False` and
    `temperature=1.0`. Computed in float32 at least. Memory is that of b x b numbers.

    Example:
        >>> loss = Contrastive(queries="preds.image", keys="preds.text", temperature=0.5)
        >>> two = jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> print(loss.values(two, two, jnp.array([True, True])).round(3))
        [0.127 0.127]
    """

    depends_on = "batch"

    queries: KeyPath
    """Key path of the vectors that search, float `b d`."""
    keys: KeyPath
    """Key path of the vectors to be found, float `b d`; those of the same row belong together."""
    temperature: float = 0.07
    """What similarities are divided by, above 0; a traced float."""
    symmetric: bool = False
    """Mean over both directions instead of queries to keys alone."""
    normalize: bool = True
    """Cosines, instead of the plain inner products."""

    def validate(self) -> None:
        """Refuse a temperature that is not above 0."""
        if isinstance(self.temperature, float) and not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")

    def values(
        self, queries: Float[Array, "b d"], keys: Float[Array, "b d"], mask: Bool[Array, " b"]
    ) -> Float[Array, " b"]:
        """The loss of each row among those that the mask keeps."""
        queries, keys = widened(*replace_masked((queries, keys), mask))
        if self.normalize:
            queries, keys = _unit(queries), _unit(keys)
        # Full precision: a small temperature multiplies what a tensor core rounds away.
        scores = jnp.matmul(queries, keys.T, precision="highest") / jnp.asarray(self.temperature, queries.dtype)
        # Each row keeps its own key, so that rows that do not count are finite, and their gradients 0 instead of nan.
        kept = mask[None, :] | jnp.eye(mask.shape[0], dtype=bool)
        values = _own_column(scores, kept)
        return (values + _own_column(scores.T, kept)) / 2 if self.symmetric else values


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1; zeros stay, with a finite gradient."""
    squared = jnp.sum(x * x, axis=-1, keepdims=True)
    return x / jnp.sqrt(jnp.maximum(squared, jnp.asarray(1e-12, x.dtype)))


def _own_column(scores: jax.Array, kept: jax.Array) -> jax.Array:
    """Cross entropy of row i's scores with the label i, among the columns that are kept."""
    scores = jnp.where(kept, scores, jnp.full_like(scores, -jnp.inf))
    return optax.losses.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(scores.shape[0]))


@config
class ParameterL2(Loss):
    """The sum of the squares of parameters, sum_p |p|^2, over those whose paths fit a pattern.

    Without a factor 1/2: `weight=0.5 * l` gives the gradient l p. Unlike the decay of `optax.adamw` it goes through the
    optimizer's moments with the other losses. Computed in float32 at least.

    Example:
        >>> from equikd.wiring import Context
        >>> params = {"layers": [{"weight": jnp.array([1.0, 2.0]), "bias": jnp.array([9.0])}]}
        >>> ParameterL2("params.**.weight", weight=1e-4).from_context(Context(params=params)).compute().item()
        5.0
    """

    params: KeyPaths = "params"
    """Key path of the parameters, any tree, or a pattern of them such as `params.**.weight`; leaves that are no arrays
    of floats are left out. An eval has `model` in place of `params`."""
    mask: KeyPath | None = None
    """None: parameters have no batch axis."""

    def values(self, params: Any) -> Float[Array, ""]:
        """The sum of squares.

        Raises:
            WiringError: there are no floats.
        """
        leaves = leaves_at(self.params, params)
        floats = [jnp.asarray(leaf) for leaf in leaves.values() if _is_inexact(leaf)]
        if not floats:
            got = listing(leaves) or "nothing"
            raise WiringError(message(f"params = {self.params!r}: no arrays of floats", got=got))
        squares = [jnp.sum(jnp.real(leaf * leaf.conj())) for leaf in widened(*floats)]
        return sum(squares[1:], start=squares[0])


def _is_inexact(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


@config
class Value(Loss):
    """What a key path names is the loss: a loss that the model itself returns, say, or a penalty in `interms`.

    Values have the batch axis first, as a model that is called per example gives them; a scalar needs `mask=None`. A
    negative weight makes it larger instead of smaller.

    Example:
        >>> from equikd.wiring import Context
        >>> context = Context(preds={"balance": jnp.array([2.0, jnp.nan])}, mask=jnp.array([True, False]))
        >>> Value(value="preds.balance", weight=0.1).from_context(context).compute().item()
        2.0
    """

    depends_on = "element"

    value: KeyPath
    """Key path of the values, float `b *n`, or a scalar with `mask=None`."""

    def values(self, value: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """The values themselves."""
        return value
