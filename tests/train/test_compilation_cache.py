"""Compiled programs on disk: a second process compiles nothing that the first one has compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import equikd as ek
from tests.train._small import small

RUN = """
import json, sys
import jax.monitoring
events = {}
jax.monitoring.register_event_listener(lambda event, **_: events.update({event: events.get(event, 0) + 1}))
import equikd as ek
trainer = ek.override(ek.config.from_json(open(sys.argv[1]).read()), json.loads(sys.argv[2]))
result = trainer.train()
print(json.dumps({"events": events, "loss": result.metrics["train/loss"], "step": int(result.state.step)}))
"""

DIGITS = {"num_steps": 3, "log_every": 3, "evals": {}, "writers": ()}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from equikd.examples.digits import Digits, get_config

    trainer = ek.override(get_config(Digits(width=8)), DIGITS)
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(ek.config.to_json(trainer))
    return path


def run(config: Path, override: dict[str, Any], **env: str) -> dict[str, Any]:
    home = str(Path(ek.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": home, **env}
    words = [sys.executable, "-c", RUN, str(config), json.dumps(override)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("by", ["field", "environment"])
def test_a_second_process_loads_what_the_first_has_compiled(config: Path, tmp_path: Path, by: str) -> None:
    kept = str(tmp_path / "new" / "cache")
    override = {"compilation_cache": kept} if by == "field" else {}
    env = {} if by == "field" else {"EQUIKD_COMPILATION_CACHE": kept}
    first, second = (run(config, override, **env) for _ in range(2))
    hits, misses = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
    assert first["events"].get(misses, 0) > 5
    assert second["events"].get(misses, 0) == 0
    assert second["events"][hits] >= first["events"][misses]
    assert first["loss"] == second["loss"]
    assert any(Path(kept).iterdir())


def test_settings_are_as_before_when_a_run_has_ended(tmp_path: Path) -> None:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    small(compilation_cache=str(tmp_path / "cache"), num_steps=1).train()
    assert [getattr(jax.config, name) for name in names] == before
    with pytest.raises(ek.errors.EquikdError):
        small(compilation_cache=str(tmp_path / "cache"), inputs={"x": "batch.nothing"}).train()
    assert [getattr(jax.config, name) for name in names] == before


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ek.errors.ConfigError, match="no directory for compiled programs"):
        small(compilation_cache=str(tmp_path / "file")).train()
    assert (tmp_path / "file").read_text() == "mine"
