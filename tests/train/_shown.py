"""`small` with pictures and texts among its data, metrics that show them, and readers of TensorBoard events.

As a config module it is trained from the command line.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import equikd as ek
from tests.train._small import BATCH, arrays, quick


def pictured(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Rows with an image and a text each."""
    draw = np.random.default_rng(seed)
    image = draw.integers(0, 256, (rows, 5, 4, 3)).astype(np.float32) / 255
    return {**arrays(rows, seed), "image": image, "tokens": draw.integers(0, 26, (rows, 6)).astype(np.int32)}


class Letters:
    """Made by a node."""

    def __init__(self, first: str = "a") -> None:
        self.first = ord(first)

    def __call__(self, tokens: np.ndarray) -> str:
        return "".join(chr(self.first + int(token)) for token in tokens)


METRICS = {
    "accuracy": ek.metrics.Accuracy(preds="preds", labels="batch.label"),
    "pictures/some": ek.metrics.ShowImages(images="batch.image", n=3),
    "sample": ek.metrics.ShowTexts(tokens="batch.tokens", decode=ek.lazy(Letters)(first="A"), n=2),
    "weights": ek.metrics.Histogram(values="params.first.weight", low=-0.25, high=0.25, bins=5, mask=None),
}
TRAIN, TEST = pictured(4 * BATCH, 0), pictured(50, 1)


WRITTEN: list[Any] = []


@ek.config.config
class Keep:
    """A writer that keeps all records in `WRITTEN`."""

    def open(self, run: Any) -> "Keep":
        WRITTEN.clear()
        return self

    def tick(self, step: int) -> None: ...
    def write(self, record: Any) -> None:
        WRITTEN.append(record)

    def flush(self) -> None: ...
    def close(self) -> None: ...


def shown(**fields: Any) -> ek.Trainer:
    """A trainer that shows images and texts in training and in an eval; the latter's last batch is ragged."""
    made: dict[str, Any] = {
        "metrics": METRICS,
        "train_data": ek.data.InMemory(TRAIN, batch_size=BATCH),
        "evals": {"test": ek.evals.Eval(data=ek.data.InMemory(TEST, batch_size=20), every=4)},
        "num_steps": 8,
        "log_every": 4,
        "writers": (ek.train.TensorBoard(),),
    }
    return quick(**made | fields)


def get_config() -> ek.Trainer:
    return shown()


def events(workdir: Path, split: str) -> EventAccumulator:
    """What TensorBoard reads of a run."""
    found = EventAccumulator(str(workdir / "tensorboard" / split), size_guidance={"tensors": 0, "histograms": 0})
    return found.Reload()


def images(found: EventAccumulator, tag: str) -> dict[int, ek.metrics.Images]:
    """Step -> the images of a tag, decoded; their width and height are as the event says."""
    made = {}
    for event in found.Tensors(tag):
        width, height, *files = event.tensor_proto.string_val
        pixels = []
        for file in files:
            with Image.open(io.BytesIO(file)) as image:
                assert image.size == (int(width), int(height))
                pixels.append(np.asarray(image).reshape(int(height), int(width), -1))
        made[event.step] = ek.metrics.Images(np.stack(pixels))
    return made
