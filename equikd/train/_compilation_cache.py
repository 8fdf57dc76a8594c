"""Compiled programs on disk: what one process has compiled, the next one loads.

It is JAX's persistent compilation cache, with every program in it, small ones too: the start of a run compiles dozens
of these. JAX keys programs by their text, by the options of the compiler and by the machine, so a directory may serve
many experiments, and be deleted at any time. JAX's settings are what they were when a run has ended.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from jax.experimental.compilation_cache.compilation_cache import reset_cache

from equikd._compat import CONFIG
from equikd.errors import ConfigError, message

ENVIRONMENT = "EQUIKD_COMPILATION_CACHE"


@contextlib.contextmanager
def compilation_cache(directory: str | os.PathLike[str] | None) -> Iterator[None]:
    """Inside, JAX takes compiled programs from a directory, and puts new ones there.

    Args:
        directory: where they are kept, made if it is not there; None: what `EQUIKD_COMPILATION_CACHE` says, and where
            that is not set or empty, JAX's settings stay as they are.

    Raises:
        ConfigError: the directory cannot be made, or is a file.
    """
    directory = directory or os.environ.get(ENVIRONMENT) or None
    if directory is None:
        yield
        return
    path = pathlib.Path(directory).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got = error.strerror or str(error)
        what = f"compilation_cache: {path} is no directory for compiled programs"
        raise ConfigError(message(what, got=got, fix="the path of a directory that may be written to")) from None
    settings = {
        "jax_compilation_cache_dir": str(path),
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(CONFIG, name) for name in settings}
    try:
        _use(settings)
        yield
    finally:
        _use(before)


def _use(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        CONFIG.update(name, value)
    reset_cache()  # the directory is looked at once, when the first program is compiled
