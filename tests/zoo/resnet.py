"""A residual network with batch normalisation, whose running statistics are an `eqx.nn.State`.

He et al. 2015, "Deep residual learning for image recognition", arXiv:1512.03385. The model is written for one example;
batch normalisation sees the others through the axis named "batch", so it is to be mapped with that name.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray


class ResidualBlock(eqx.Module):
    """Two convolutions, and the way around them; a stride of 2 halves height and width."""

    conv1: eqx.nn.Conv2d
    norm1: eqx.nn.BatchNorm
    conv2: eqx.nn.Conv2d
    norm2: eqx.nn.BatchNorm
    shortcut: eqx.nn.Conv2d | eqx.nn.Identity

    def __init__(self, inputs: int, outputs: int, stride: int, *, key: PRNGKeyArray) -> None:
        first, second, around = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, use_bias=False, key=first)
        self.norm1 = eqx.nn.BatchNorm(outputs, axis_name="batch", mode="batch")
        self.conv2 = eqx.nn.Conv2d(outputs, outputs, 3, padding=1, use_bias=False, key=second)
        self.norm2 = eqx.nn.BatchNorm(outputs, axis_name="batch", mode="batch")
        if stride == 1 and inputs == outputs:
            self.shortcut = eqx.nn.Identity()
        else:
            self.shortcut = eqx.nn.Conv2d(inputs, outputs, 1, stride=stride, use_bias=False, key=around)

    def __call__(self, x: Float[Array, "c h w"], state: eqx.nn.State) -> tuple[Float[Array, "d i j"], eqx.nn.State]:
        y, state = self.norm1(self.conv1(x), state)
        y, state = self.norm2(self.conv2(jax.nn.relu(y)), state)
        return jax.nn.relu(y + self.shortcut(x)), state


class ResNet(eqx.Module):
    """A grey image to class scores: a stem, one block of each number of channels, the mean over the image, a head."""

    stem: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    blocks: list[ResidualBlock]
    head: eqx.nn.Linear
    channels: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, classes: int, channels: tuple[int, ...] = (4, 8), *, key: PRNGKeyArray) -> None:
        stem, head, *keys = jax.random.split(key, 2 + len(channels))
        self.stem = eqx.nn.Conv2d(1, channels[0], 3, padding=1, use_bias=False, key=stem)
        self.norm = eqx.nn.BatchNorm(channels[0], axis_name="batch", mode="batch")
        self.blocks = [
            ResidualBlock(inputs, outputs, stride=1 if index == 0 else 2, key=keys[index])
            for index, (inputs, outputs) in enumerate(zip((channels[0], *channels), channels, strict=False))
        ]
        self.head = eqx.nn.Linear(channels[-1], classes, key=head)
        self.channels = channels

    def __call__(self, x: Float[Array, "h w"], state: eqx.nn.State) -> tuple[Float[Array, " classes"], eqx.nn.State]:
        features, state = self.norm(self.stem(x[None]), state)
        features = jax.nn.relu(features)
        for block in self.blocks:
            features, state = block(features, state)
        return self.head(features.mean(axis=(1, 2))), state
