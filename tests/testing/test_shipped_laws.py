"""Every public metric and loss keeps the laws of `check_metric` and `check_loss`; a new class is found by itself."""

import jax
import pytest
from hypothesis import strategies as st

import equikd as ek
from equikd.losses import Loss
from equikd.metrics import Metric
from equikd.testing import check_loss, check_metric


def public(module, base):
    """The classes that can be used, by name."""
    found = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, base)]
    return {one.__name__: one for one in found if not one.__abstractmethods__}


unit = lambda random, shape: random.random(shape)
params = st.just({"w": jax.ShapeDtypeStruct((3, 2), "float32")})

# What is checked of a class that is not drawn with its defaults, and with which options.
PREPARED = {
    "Norm": (ek.metrics.Norm, {"shared": ["tree"]}),
    "ConfusionMatrix": (ek.metrics.ConfusionMatrix(preds="preds", labels="batch.y", max_classes=4), {}),
    "SSIM": (
        ek.metrics.SSIM(preds="preds", targets="batch.y"),
        {"axes": {"h": st.integers(11, 13), "w": st.integers(11, 13)}},
    ),
    "Huber": (ek.losses.Huber(preds="preds", targets="batch.y"), {}),
    "SoftmaxCrossEntropy": (
        ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.y", label_smoothing=0.1),
        {},
    ),
    "Focal": (ek.losses.Focal(logits="preds", labels="batch.y"), {"values": {"labels": unit}}),
    "KLDivergence": (ek.losses.KLDivergence(logits="preds", targets="batch.y"), {"values": {"targets": unit}}),
    "Contrastive": (ek.losses.Contrastive(queries="preds.a", keys="preds.b"), {}),
    "ParameterL2": (ek.losses.ParameterL2(), {"shared": ["params"], "given": {"params": params}}),
}
METRICS, LOSSES = public(ek.metrics, Metric), public(ek.losses, Loss)


def test_what_is_prepared_is_there():
    assert set(PREPARED) <= {*METRICS, *LOSSES}
    assert len(METRICS) > 20
    assert len(LOSSES) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", [*METRICS])
def test_every_metric(name):
    target, options = PREPARED.get(name, (METRICS[name], {}))
    check_metric(target, examples=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOSSES])
def test_every_loss(name):
    target, options = PREPARED.get(name, (LOSSES[name], {}))
    check_loss(target, examples=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mean", "Accuracy", "Min"])
def test_some_metrics(name):
    check_metric(METRICS[name], examples=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SquaredError", "Contrastive"])
def test_some_losses(name):
    target, options = PREPARED.get(name, (LOSSES[name], {}))
    check_loss(target, examples=1, **options)
