"""Ten architectures of the kinds that people write, each with the trainer that trains it: a table for tests.

The models' files know nothing of `equikd`. An entry says how one is built, called and trained, which of its
calls a training run watches, and what capturing its calls needs.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import equikd as ek
from equikd.examples.digits import load
from equikd.typing import Array, Float
from tests.zoo import _by_hand, ensemble, fixed_point, gpt, gru, mlp, moe, resnet, unet, vae, vit

LEVELS, LENGTH = 17, 23
Forward = Callable[[Any, Any, Any, jax.Array], Any]


@functools.cache
def digits() -> dict[str, np.ndarray]:
    """The digits; with noise, as `noisy`; the middle three rows as 24 levels of grey, as `tokens` and `following`."""
    data = load("train")
    noise = np.random.default_rng(0).normal(size=data["image"].shape).astype(np.float32)
    levels = (16 * data["image"][:, 3:6]).astype(np.int32).reshape(-1, LENGTH + 1)
    return {**data, "noisy": data["image"] + noise / 3, "tokens": levels[:, :-1], "following": levels[:, 1:]}


@ek.config.config
class GaussianKL(ek.losses.Loss):
    """KL(N(mean, variance) || N(0, 1)) of each code, in nats."""

    mean: ek.KeyPath
    log_variance: ek.KeyPath

    def values(self, mean: Float[Array, "b d"], log_variance: Float[Array, "b d"]) -> Float[Array, " b"]:
        return 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(axis=-1)


@functools.cache
def _built(entry: "Entry", seed: int) -> tuple[Any, eqx.nn.State]:
    return eqx.nn.make_with_state(entry.model)(**entry.settings, key=jax.random.key(seed))


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """One architecture.

    Attributes:
        model: its class.
        settings: arguments of its constructor, but for the key.
        by_hand: its forward pass with intermediates, `(model, state, example, key) -> (out, {path: value})`.
        watched: path of a call whose norm a training run can report.
        inputs: what the trainer connects, argument -> key path; the first one is the example.
        losses: what it is trained with.
        capture_options: what capturing of all its calls needs.
    """

    model: type[eqx.Module]
    settings: dict[str, Any]
    by_hand: Forward
    watched: str
    inputs: dict[str, str] = dataclasses.field(default_factory=lambda: {"x": "batch.image"})
    losses: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label")}
    )
    capture_options: dict[str, str] = dataclasses.field(default_factory=dict)

    def build(self, seed: int = 1) -> tuple[Any, eqx.nn.State]:
        """The model, and its state, which is empty for most."""
        return _built(self, seed)

    def forward(self, model: Any, state: Any, example: jax.Array, key: jax.Array) -> Any:
        """One example through the model, with the key and the state where it takes them.

        A state needs a map over examples with the name "batch", which batch normalisation takes its means over.
        """
        (argument,) = self.inputs
        taken = inspect.signature(self.model.__call__).parameters
        also = {name: value for name, value in {"key": key, "state": state}.items() if name in taken}
        return model(**{argument: example}, **also)

    def examples(self, count: int) -> jax.Array:
        """The first examples, batch axis first."""
        (path,) = self.inputs.values()
        return jnp.asarray(digits()[path.removeprefix("batch.")][:count])

    def trainer(self, **fields: Any) -> ek.Trainer:
        """A short run on batches of 16, with any field of the trainer replaced."""
        given: dict[str, Any] = {
            "model": ek.lazy(self.model)(**self.settings),
            "inputs": self.inputs,
            "losses": self.losses,
            "optimizer": ek.lazy(optax.adam)(learning_rate=1e-2),
            "train_data": ek.data.InMemory(digits(), batch_size=16),
            "num_steps": 40,
            "log_every": 20,
            "checkpoints": None,
            "writers": (),
        }
        return ek.Trainer(**given | fields)


IMAGE = {"pixels": 64, "classes": 10}

ZOO: dict[str, Entry] = {
    "mlp": Entry(mlp.Classifier, IMAGE, _by_hand.classifier, "body.layers[1]"),
    "resnet": Entry(resnet.ResNet, {"classes": 10}, _by_hand.residual, "blocks[1].conv1"),
    "vit": Entry(vit.VisionTransformer, {"size": 8, "classes": 10}, _by_hand.vision_transformer, "blocks[0].attention"),
    "gpt": Entry(
        gpt.GPT,
        {"words": LEVELS, "length": LENGTH},
        _by_hand.language_model,
        "blocks.attention",
        inputs={"tokens": "batch.tokens"},
        losses={"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.following")},
    ),
    "gru": Entry(
        gru.RowReader,
        {"features": 8, "classes": 10},
        _by_hand.row_reader,
        "cell",
        inputs={"rows": "batch.image"},
    ),
    "unet": Entry(
        unet.UNet,
        {},
        _by_hand.u_net,
        "pool[1]",
        inputs={"x": "batch.noisy"},
        losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.image")},
    ),
    "moe": Entry(
        moe.MixtureClassifier,
        IMAGE,
        _by_hand.mixture_of_experts,
        "mixture.experts[1]",
        capture_options={"absent": "zeros"},
    ),
    "vae": Entry(
        vae.VariationalAutoencoder,
        {"pixels": 64},
        _by_hand.autoencoder,
        "decoder.layers[0]",
        losses={
            "pixels": ek.losses.SigmoidBinaryCrossEntropy(logits="preds.reconstruction", labels="batch.image"),
            "kl": GaussianKL(mean="preds.mean", log_variance="preds.log_variance", weight=0.01),
        },
    ),
    "fixed_point": Entry(
        fixed_point.Equilibrium,
        IMAGE,
        _by_hand.equilibrium,
        "cell[0]",
        capture_options={"while_loops": "last"},
    ),
    "ensemble": Entry(ensemble.Ensemble, IMAGE, _by_hand.members, "members.layers[0]"),
}
