"""What `_first_step.py` does, as one would write it by hand for this one model: the bare step and nothing else.

It imports JAX, Equinox and optax, draws a shuffled batch, initialises, and steps.
"""

import time

import jax

from benchmarks._task import TASKS, shuffled
from benchmarks.peers.bare import flat_step


def main(name: str, *, compile_only: bool = False) -> None:
    """Print the time at the end of the first step; or the seconds of its trace, compile and run alone."""
    task = TASKS[name]
    leaves, step = flat_step(task, with_loss=True)
    images, labels = next(shuffled(task))
    if compile_only:
        jax.block_until_ready(jax.live_arrays())
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(step, donate_argnums=0)(leaves, images, labels))
    print(time.perf_counter() - start if compile_only else time.time())
