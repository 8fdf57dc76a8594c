"""The training loop of Equinox's documentation: `eqx.filter_jit` around a step that takes the model as it is."""

from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import optax

from benchmarks._models import loss_of, make_model
from benchmarks._task import RATE, Task
from benchmarks.peers._peer import Peer, Training


def start(task: Task) -> Training:
    """Compiles at the first batch."""
    optimizer = optax.adam(RATE)

    @eqx.filter_jit
    def make_step(model: Any, opt_state: Any, images: Any, labels: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    def train(batches: Iterable[Any]) -> Iterator[Any]:
        model = make_model(task)
        opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
        for images, labels in batches:
            model, opt_state, loss = make_step(model, opt_state, images, labels)
            yield loss

    return train


PEER = Peer(start)
