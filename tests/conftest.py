"""Shared fixtures: message snapshots, compile counting, a Hypothesis profile for CI."""

import gc
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Names of the programs that XLA has compiled since `clear`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **details: object) -> None:
        del duration
        if event == COMPILE_EVENT:
            self.names.append(str(details.get("fun_name")))

    def clear(self) -> None:
        self.names.clear()


_COMPILATIONS = Compilations()


@pytest.fixture(scope="session", autouse=True)
def _compilations_are_counted() -> None:
    """A renamed event would make every `names == []` true: a fresh function must count."""
    _COMPILATIONS.clear()
    jax.jit(lambda x: x + 1)(1.0)
    assert _COMPILATIONS.names, f"{COMPILE_EVENT} is no longer recorded"


_MODULES = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _programs_are_let_go() -> Iterator[None]:
    """Compiled programs are kept by JAX: those of all test files together would take gigabytes of a worker's memory."""
    yield
    if next(_MODULES) % 20 == 0:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def compilations() -> Compilations:
    """Counts backend compilations from here on: `compilations.names`, `compilations.clear()`."""
    _COMPILATIONS.clear()
    return _COMPILATIONS


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`snapshot(name, text)`: text equals tests/snapshots/TEST_FILE/name.txt; EQUIKD_UPDATE_SNAPSHOTS=1 rewrites."""
    folder = Path(__file__).parent / "snapshots" / request.path.stem

    def compare(name: str, text: str) -> None:
        path = folder / f"{name}.txt"
        text = re.sub(r"(?:/[\w.\-]+)+/([\w.\-]+\.(?:py|json|jsonl))", r"\1", text)  # no machine paths
        text = re.sub(r"0x[0-9a-f]{6,}", "0x...", text)
        text = re.sub(r"(\.py):\d+", r"\1:N", text).rstrip() + "\n"
        if os.environ.get("EQUIKD_UPDATE_SNAPSHOTS"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no snapshot {path.name}; run with EQUIKD_UPDATE_SNAPSHOTS=1 and read what it writes"
        assert text == path.read_text()

    return compare
