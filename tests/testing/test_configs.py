"""`ek.testing.check_config`: it passes on sound classes, and finds what is broken in unsound ones."""

import enum
from collections.abc import Callable
from typing import Any, Literal

import hypothesis
import jax
import pytest
from hypothesis import strategies as st

import equikd as ek
from equikd.config import config, field
from equikd.errors import ConfigError


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@config
class Inner:
    rate: float = 0.1
    count: int = 1


@config
class Everything:
    rate: float
    count: int
    flag: bool
    name: str
    mode: Mode
    kind: Literal["a", "b", 3]
    inner: Inner
    steps: int = field(dynamic=True, default=3)
    seed: int = field(dynamic=True, unsigned=True, default=0)
    maybe: float | None = None
    structural: float | None = field(dynamic=True, default=None)
    pair: tuple[float, int] = (0.5, 1)
    many: tuple[Inner, ...] = ()
    table: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Inner] = field(default_factory=dict)

    def validate(self):
        if self.count < 0:
            raise ValueError("count is negative")


@config
class Loose:
    anything: Any


def test_all_roles_pass():
    ek.testing.check_config(Everything, examples=25)


@pytest.mark.parametrize("cls", [ek.optim.WarmupCosine, ek.optim.Linear, ek.train.Checkpoints, ek.train.Console])
def test_shipped_classes_pass(cls):
    ek.testing.check_config(cls, examples=15)


@pytest.mark.slow
def test_instances_are_valid_and_fields_can_be_given():
    ek.testing.check_config(Loose, fields={"anything": st.sampled_from(["a", 1, None])}, examples=10)
    drawn = ek.testing.configs(Everything, fields={"count": st.just(7)})

    assert hypothesis.find(drawn, lambda cfg: True).count == 7


def test_a_field_that_says_too_little_is_named(snapshot):
    with pytest.raises(ConfigError) as error:
        ek.testing.configs(Loose)
    snapshot("says_too_little", str(error.value))


def test_a_broken_law_is_found(monkeypatch):
    import equikd.testing._configs as laws

    monkeypatch.setattr(laws, "override", lambda cfg, changes: cfg)
    with pytest.raises(AssertionError, match=r"override set|kept the structure"):
        ek.testing.check_config(Inner, examples=20)


def test_a_lossy_round_trip_is_found(monkeypatch):
    import equikd.testing._configs as laws

    monkeypatch.setattr(laws, "from_json", lambda text: Inner())
    with pytest.raises(AssertionError, match="JSON -> config changed"):
        ek.testing.check_config(Inner, examples=20)


@config
class Tree:
    value: float = 0.5
    parts: "tuple[Tree, ...]" = ()


def test_recursive_classes_and_dynamic_ints_in_containers_are_drawn():
    ek.testing.check_config(Tree, examples=10)
    ek.testing.check_config(ek.optim.PiecewiseConstant, examples=10)


@config
class Activated:
    act: Callable = jax.nn.gelu
    rate: float = 0.1


@config
class Demanding:
    act: Callable
    rate: float
    schedule: ek.optim.Schedule
    inner: Activated


@config
class Nested:
    part: Demanding


def test_a_field_that_says_too_little_keeps_its_default():
    ek.testing.check_config(Activated, examples=10)
    assert hypothesis.find(ek.testing.configs(Activated), lambda cfg: cfg.rate > 1).act is jax.nn.gelu
    drawn = ek.testing.configs(Activated, fields={"act": st.just(jax.nn.relu)})
    assert hypothesis.find(drawn, lambda cfg: True).act is jax.nn.relu


@pytest.mark.parametrize(
    "cls", [ek.losses.SquaredError, ek.losses.SoftmaxCrossEntropy, ek.metrics.Accuracy, ek.metrics.Mean]
)
def test_losses_and_metrics_pass(cls):
    ek.testing.check_config(cls, examples=15)


def test_key_paths_are_valid_and_a_union_is_drawn_from_what_says_enough():
    loss = hypothesis.find(ek.testing.configs(ek.losses.SquaredError), lambda loss: loss.weight > 1 and loss.mask)
    for path in (loss.preds, loss.targets, loss.mask):
        assert ek.tree.parse(path)
    assert hypothesis.find(ek.testing.configs(ek.losses.SquaredError), lambda loss: loss.mask is None)


def test_required_fields_are_named_all_at_once(snapshot):
    with pytest.raises(ConfigError) as error:
        ek.testing.check_config(Demanding)
    snapshot("required", str(error.value))
    with pytest.raises(ConfigError) as error:
        ek.testing.check_config(Nested)
    snapshot("required_inside", str(error.value))


def test_a_join_needs_its_schedules():
    with pytest.raises(ConfigError, match=r"fields=\{'schedules': strategy\}"):
        ek.testing.check_config(ek.optim.Join)
    members = {"schedules": st.just((ek.optim.Constant(1.0),) * 2), "boundaries": st.tuples(st.integers(0, 99))}
    ek.testing.check_config(ek.optim.Join, fields=members, examples=10)


def test_fields_that_do_not_exist_and_abstract_classes_are_refused(snapshot):
    with pytest.raises(ConfigError) as error:
        ek.testing.check_config(Activated, fields={"acts": st.none()})
    snapshot("unknown_field", str(error.value))
    with pytest.raises(ConfigError, match="Loss is abstract"):
        ek.testing.check_config(ek.losses.Loss)
