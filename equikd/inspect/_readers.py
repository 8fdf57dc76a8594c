"""Who reads what: the key paths of an experiment, each with the config paths that hold it."""

from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx

from equikd.config import resolve
from equikd.model._interms import GRADIENTS, is_below
from equikd.train._setup import Setup
from equikd.tree import Path, PathError, find, is_glob, items, join, matches, parse
from equikd.wiring import Context, key_paths, root_of


def readers_of(setup: Setup) -> dict[str, tuple[str, ...]]:
    """Key path -> the config paths that hold it, those of evals only where they are their own."""
    found: dict[str, list[str]] = {}
    for where, paths in _owners(setup.config, setup.state.model):
        for name, path in paths.items():
            found.setdefault(path, []).append(join((*parse(where), *parse(name))))
    own = [text for texts in found.values() for text in texts]
    for one in setup.evals:
        for where, paths in _owners(one.config, setup.state.model):
            for name, path in paths.items():
                text = join((*parse(where), *parse(name)))
                if text not in own:
                    found.setdefault(path, []).append(f"evals.{one.name}.{text}")
    return {path: tuple(texts) for path, texts in found.items()}


def _owners(config: Any, model: Any) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Config path -> the key paths held there, of model, losses and metrics."""
    yield "inputs", config.inputs
    if isinstance(model, eqx.Module):
        yield "model", key_paths(model)
    for part in ("losses", "metrics"):
        for name, owner in resolve(getattr(config, part), root=config, path=part).items():
            yield join((part, name)), owner.reads()


def counted(context: Context, path: str) -> str:
    """A key path, its negative indices counted from the front."""
    value: Any = context
    at: Path = ()
    for key in _plain(path):
        try:
            found = find(value, key, at)
        except PathError:  # an attribute, or an index into an array
            break
        value, at = items(value)[found], (*at, found)
    return join((*at, *parse(path)[len(at) :]))


def _plain(path: str | Path) -> Path:
    """The keys of a path up to its first slice, which reads all that stands there."""
    keys = parse(path) if isinstance(path, str) else path
    stop = next((i for i, key in enumerate(keys) if not isinstance(key, str | int)), len(keys))
    return keys[:stop]


def _names(key_path: str, path: str) -> bool:
    """Whether a key path is that of an intermediate, fits it, or leads into its value."""
    if is_glob(key_path):
        return matches(key_path, path)
    rest = key_path.removeprefix(path)
    return path.startswith(f"{key_path}[") or (rest != key_path and (not rest or rest.startswith("[")))


def read_by(path: str, readers: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The config paths whose key path names what stands at `path`, something in it, or something around it."""
    if root_of(path) == "interms" or is_below(path, GRADIENTS):  # a layer, and one below it, are two values
        return [text for key_path, texts in readers.items() if _names(key_path, path) for text in texts]
    keys = parse(path)
    found = []
    for key_path, texts in readers.items():
        wanted = _plain(key_path)
        common = min(len(wanted), len(keys))
        if wanted[:common] == keys[:common]:
            found += texts
    return found
