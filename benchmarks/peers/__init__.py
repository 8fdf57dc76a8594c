"""Training steps and loops written by hand, for the same models and data: what equikd is measured against.

A file a peer, each written as the peer's own documentation would write it, and each with a `Peer` named `PEER`:

`bare`            a donated `jax.jit` on flat leaves: the least that a step in JAX can cost, and the baseline of all
`documented`      the `filter_jit` loop of Equinox's documentation
`linen`           flax.linen: a `TrainState`, and a donated `jax.jit`
`nnx`             flax.nnx: `nnx.jit` and `nnx.Optimizer`
`torch_eager`     PyTorch, eager
`lightning_fit`   PyTorch Lightning's `Trainer.fit`; a loop alone
`kauldron_train`  Kauldron's `Trainer`

None of their packages is a dependency of equikd: a peer that is not installed is skipped, with a line that says so.
"""

import importlib
from collections.abc import Iterable
from importlib import metadata

from benchmarks.peers._peer import Peer as Peer

FILES = {  # name in the figures -> file
    "filter_jit": "documented",
    "linen": "linen",
    "nnx": "nnx",
    "torch": "torch_eager",
    "lightning": "lightning_fit",
    "kauldron": "kauldron_train",
}
PACKAGES = {"filter_jit": "equinox", "linen": "flax", "nnx": "flax"}  # where it is not the name in the figures


def available(names: Iterable[str] = FILES) -> dict[str, Peer]:
    """Name -> peer, for those whose packages are installed; a line for each of the others."""
    found: dict[str, Peer] = {}
    for name in names:
        try:
            found[name] = importlib.import_module(f"benchmarks.peers.{FILES[name]}").PEER
        except Exception as error:  # one that is installed may not fit the JAX that is here
            print(f"skipped: the peer {name}: {type(error).__name__}: {error}", flush=True)
    return found


def versions(names: Iterable[str]) -> dict[str, str]:
    """Package -> version, for peers that are there."""
    return {package: metadata.version(package) for package in sorted({PACKAGES.get(name, name) for name in names})}
