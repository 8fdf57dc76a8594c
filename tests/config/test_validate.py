"""`validate` runs over the whole tree on the host, all failures at once; `host` gives Python numbers back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equikd.config import config, field, host, lazy, override, pin, ref, validate
from equikd.errors import ConfigError


@config
class Opt:
    learning_rate: float = 1e-3
    steps: int = 10

    def validate(self):
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.steps % 2:
            raise ValueError("steps must be even")


@config
class Run:
    opt: Opt = Opt()
    more: dict[str, Opt] = field(default_factory=dict)
    node: Any = None
    rate: float = 0.5

    def validate(self):
        if self.rate >= 1:
            raise AssertionError("rate must be below 1")


def test_a_valid_config_comes_back():
    run = Run(more={"a": Opt()})
    assert validate(run) is run


def test_all_failures_at_once_with_their_paths(snapshot):
    node = lazy(dict)(opt=Opt(steps=3))
    run = Run(Opt(-1.0), {"a b": Opt(steps=1)}, node, rate=2.0)
    with pytest.raises(ConfigError) as caught:
        validate(run)
    snapshot("failures", str(caught.value))
    with pytest.raises(ConfigError, match=r"^cfg\.opt: learning_rate must be positive"):
        validate(Run(Opt(-1.0)), "cfg")


def test_construction_and_transformations_do_not_validate():
    bad = Opt(-1.0)
    jax.tree.map(lambda x: x, bad)
    assert override(bad, {"steps": 3}).steps == 3
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        bad.validate()


def test_pins_and_references_are_seen_as_their_values():
    assert validate(Run(Opt(pin(0.5))))
    assert validate(Run(Opt(ref("rate"))))
    with pytest.raises(ConfigError, match=r"opt: learning_rate must be positive, got -1\.0"):
        validate(Run(Opt(pin(-1.0))))
    with pytest.raises(ConfigError, match=r"opt: learning_rate must be positive, got -2\.0"):
        validate(Run(Opt(ref("rate")), rate=-2.0))


def test_inside_a_trace_it_says_so(snapshot):
    with pytest.raises(ConfigError) as caught:
        jax.jit(lambda run: validate(run).rate)(Run())
    snapshot("inside_a_trace", str(caught.value))


def test_other_errors_keep_their_traceback():
    @config
    class Buggy:
        def validate(self):
            return self.no_such_field

    with pytest.raises(AttributeError):
        validate(Buggy())


@config
class Everything:
    rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = field(dynamic=True, default=None)
    weights: dict[str, float] = field(default_factory=lambda: {"a": 0.3})
    seed: int = field(dynamic=True, default=3)
    node: Any = lazy(optax.sgd)(1e-4)
    data: Any = field(opaque=True, default=None)
    name: str = "x"


decimals = st.decimals(-1000, 1000, places=4, allow_nan=False).map(float)


@given(decimals, st.tuples(decimals, decimals), st.none() | decimals, st.integers(-5, 5))
def test_host_is_the_inverse_of_a_round_trip_through_the_device(rate, betas, clip, seed):
    cfg = Everything(rate, betas, clip, {"a": rate}, seed, lazy(optax.sgd)(rate))
    assert host(jax.tree.map(lambda x: x, cfg)) == cfg
    assert host(jax.jit(lambda c: c)(cfg)) == cfg
    assert host(cfg) == cfg


def test_host_takes_the_shortest_decimal_of_the_dtype():
    cfg = jax.tree.map(lambda x: x, Everything(0.1 + 0.2))
    assert host(cfg).rate == 0.3
    assert host(jax.tree.map(lambda x: x.astype(jnp.bfloat16), cfg)).rate == 0.3
    with jax.enable_x64(True):
        assert host(jax.tree.map(lambda x: x, Everything(0.1 + 0.2))).rate == 0.1 + 0.2
    special = jax.tree.map(lambda x: x, Everything(float("inf"), (float("nan"), -0.0)))
    assert repr((host(special).rate, host(special).betas)) == "(inf, (nan, -0.0))"


def test_host_leaves_the_rest_alone():
    data = {"x": np.float32(3), "y": np.ones(2)}
    cfg = Everything(data=data)
    assert host(cfg).data is data
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), cfg)
    assert host(stacked).rate.shape == (2,)
    assert isinstance(host(jax.vmap(host)(stacked)).rate, jax.Array)
    assert host(jax.random.key(0)).shape == ()
    assert host((np.int8(3), jnp.int32(4), jnp.bool_(True), jnp.complex64(1j))) == (np.int8(3), 4, True, 1j)
