"""A recurrent network that reads an image row by row, in a scan over time.

Cho et al. 2014, "Learning phrase representations using RNN encoder-decoder", arXiv:1406.1078.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class RowReader(eqx.Module):
    """A sequence of rows to class scores, from the last hidden state."""

    encoder: eqx.nn.Linear
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear
    hidden: int = eqx.field(static=True)

    def __init__(self, features: int, classes: int, hidden: int = 24, *, key: PRNGKeyArray) -> None:
        encoder, cell, head = jax.random.split(key, 3)
        self.encoder = eqx.nn.Linear(features, hidden, key=encoder)
        self.cell = eqx.nn.GRUCell(hidden, hidden, key=cell)
        self.head = eqx.nn.Linear(hidden, classes, key=head)
        self.hidden = hidden

    def __call__(self, rows: Float[Array, "t d"]) -> Float[Array, " classes"]:
        def read(hidden, row):
            return self.cell(jax.nn.relu(self.encoder(row)), hidden), None

        hidden, _ = jax.lax.scan(read, jnp.zeros(self.hidden), rows)
        return self.head(hidden)
