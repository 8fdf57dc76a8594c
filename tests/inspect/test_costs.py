"""What a step costs: XLA's account, and the products counted by hand."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.train._costs import _account, costs_of, products_of, scaled
from equikd.train._peak import peak_of, seconds_at_peak
from equikd.train._products import products_in
from equikd.train._program import program_for
from equikd.train._setup import prepare
from tests.train._small import small

ROWS, INPUTS, WIDTH, OUTPUTS = 64, 128, 256, 32
# Each product of the forward pass has one for the gradient of its weight; and one for that of its input, which the
# first layer does not need.
BY_HAND = 2 * ROWS * (2 * INPUTS * WIDTH + 3 * WIDTH * WIDTH + 3 * WIDTH * OUTPUTS)


def plain(**fields: Any) -> ek.Trainer:
    """Three layers, trained in batches of `ROWS`."""
    draw = np.random.default_rng(0)
    data = {"x": draw.normal(size=(ROWS, INPUTS)), "label": draw.integers(0, OUTPUTS, ROWS)}
    made: dict[str, Any] = {
        "model": ek.lazy(eqx.nn.MLP)(INPUTS, OUTPUTS, WIDTH, 2),
        "inputs": {"x": "batch.x"},
        "losses": {"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label")},
        "optimizer": ek.lazy(optax.sgd)(0.1),
        "train_data": ek.data.InMemory(data, batch_size=ROWS),
        "num_steps": 1,
        "writers": (),
    }
    return ek.Trainer(**made | fields)


def test_the_products_of_an_mlp_are_those_counted_by_hand():
    assert products_of(prepare(plain())) == {"float32": BY_HAND}


def test_the_account_of_xla_is_near_them():
    found = ek.inspect.costs(plain())
    assert found.flops == pytest.approx(BY_HAND, rel=0.05)
    assert found.flops > BY_HAND  # additions, activations, the loss and the update
    parameters = 4 * (INPUTS * WIDTH + WIDTH * WIDTH + WIDTH * OUTPUTS)
    assert 3 * parameters < found.bytes_accessed < 30 * parameters
    assert found.intensity == found.flops / found.bytes_accessed


def test_each_micro_batch_counts():
    """XLA's account has the body of the loop once."""
    whole, parted = ek.inspect.costs(plain()), ek.inspect.costs(plain(accumulate=4))
    assert parted.products == whole.products
    assert parted.flops == pytest.approx(whole.flops / 4, rel=0.1)


def test_what_is_computed_again_to_save_memory_is_no_more_work():
    assert products_of(prepare(plain(remat="nothing_saveable"))) == {"float32": BY_HAND}


@pytest.mark.parametrize("guard", [None, ek.train.SkipNonFinite()])
def test_nor_is_what_the_guard_sums(guard):
    assert products_of(prepare(plain(guard=guard))) == {"float32": BY_HAND}


def test_products_are_told_by_the_format_they_multiply_in():
    halves = products_of(prepare(plain(precision=ek.optim.Precision())))
    assert halves == {"bfloat16": BY_HAND}
    full = products_of(prepare(plain(precision=ek.optim.Precision(compute="float32", matmul="highest"))))
    assert full == {"float32 highest": BY_HAND}


def test_on_several_devices_the_account_is_of_one_and_the_products_are_of_all():
    found = ek.inspect.costs(plain(mesh=ek.sharding.data_parallel(4)))
    assert found.products == {"float32": BY_HAND}
    assert found.flops == pytest.approx(BY_HAND / 4, rel=0.1)
    assert (found.devices, found.device) == (4, "cpu")


class Deep(eqx.Module):
    """Layers that are stacked and scanned over."""

    layers: eqx.nn.Linear

    def __init__(self, depth: int, *, key: jax.Array) -> None:
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(jax.random.split(key, depth))

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda x, one: (jnp.tanh(eqx.combine(one, static)(x)), None), x, arrays)[0]


def test_each_layer_of_a_scan_counts():
    x = np.ones((ROWS, WIDTH), np.float32)
    fields: dict[str, Any] = {
        "losses": {"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        "train_data": ek.data.InMemory({"x": x}, batch_size=ROWS),
    }
    of = lambda depth: products_of(prepare(plain(model=ek.lazy(Deep)(depth), **fields)))["float32"]
    assert of(6) - of(5) == of(5) - of(4) == 3 * 2 * ROWS * WIDTH * WIDTH


@pytest.mark.slow
def test_a_live_model_has_the_same_costs():
    trainer = plain()
    live = dataclasses.replace(trainer, model=None)
    assert ek.inspect.costs(live, model=trainer.init().model).products == {"float32": BY_HAND}


@pytest.mark.slow
def test_the_step_that_is_looked_at_is_the_one_that_runs(compilations):
    trainer = small(train_data=plain().train_data, model=plain().model, metrics={}, num_steps=1)
    ek.inspect.costs(trainer)
    stepper = ek.train.Stepper(trainer, trainer.init())
    stepper.step(next(trainer.batches(stepper.state)))
    assert compilations.names.count("jit(flat_step)") == 1


def test_the_table(snapshot):
    found = dataclasses.replace(ek.inspect.costs(plain()), flops=1.45e7, bytes_accessed=2.5e6)
    snapshot("table_cpu", str(found))
    known = dataclasses.replace(found, device="NVIDIA A100-SXM4-80GB", devices=8, products={"bfloat16": 3e12})
    snapshot("table_known", str(known))
    snapshot("table_no_account", str(dataclasses.replace(found, flops=None, bytes_accessed=None)))
    assert known.seconds_at_peak == pytest.approx(3e12 / 312e12 / 8)


@pytest.mark.parametrize("answer", [None, [], {}, {"flops": -1.0}, NotImplementedError()])
def test_a_backend_may_give_no_account(answer):
    class Compiled:
        def cost_analysis(self) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    assert _account(Compiled()) == {}


def test_no_account_is_none(monkeypatch):
    monkeypatch.setattr("equikd.train._costs._account", lambda compiled: {})
    setup = prepare(plain())
    found = costs_of(program_for(setup.config, setup.state, setup.spec), setup)
    assert (found.flops, found.bytes_accessed, found.intensity) == (None, None, None)


def counted(function: Any, *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> dict[str, float]:
    return products_in(jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]))


def test_products_by_kind():
    assert counted(jnp.matmul, (3, 5), (5, 7)) == {"float32": 2 * 3 * 5 * 7}
    assert counted(jax.vmap(jnp.matmul), (2, 3, 5), (2, 5, 7)) == {"float32": 2 * 2 * 3 * 5 * 7}
    assert counted(jnp.matmul, (3, 5), (5, 7), dtype=jnp.int32) == {}
    assert counted(jnp.add, (3, 5), (3, 5)) == {}
    high = lambda a, b: jnp.matmul(a, b, precision="high")
    assert counted(high, (3, 5), (5, 7)) == {"float32 high": 2 * 3 * 5 * 7}
    assert counted(high, (3, 5), (5, 7), dtype=jnp.bfloat16) == {"bfloat16": 2 * 3 * 5 * 7}
    ragged = lambda a, b: jax.lax.ragged_dot(a, b, jnp.array([1, 2], jnp.int32))
    assert counted(ragged, (3, 5), (2, 5, 7)) == {"float32": 2 * 3 * 5 * 7}
    both = jax.grad(lambda a, b: (ragged(a, b) ** 2).sum(), argnums=(0, 1))
    assert counted(both, (3, 5), (2, 5, 7)) == {"float32": 3 * 2 * 3 * 5 * 7}


def test_convolutions_and_their_gradients():
    layer = eqx.nn.Conv2d(3, 8, 4, stride=2, key=jax.random.key(0))
    forward = 2 * 8 * 15 * 15 * 3 * 4 * 4
    assert counted(layer, (3, 32, 32)) == {"float32": forward}
    both = jax.grad(lambda x, w: eqx.tree_at(lambda one: one.weight, layer, w)(x).sum(), argnums=(0, 1))
    found = counted(both, (3, 32, 32), layer.weight.shape)["float32"]
    assert found == pytest.approx(3 * forward, rel=0.15)  # padding counts, so a little more
    grouped = eqx.nn.Conv1d(8, 8, 3, groups=8, key=jax.random.key(0))
    assert counted(grouped, (8, 12)) == {"float32": 2 * 8 * 10 * 3}


def test_branches_loops_and_calls():
    once = 2 * 4 * 4 * 4
    branch = lambda x: jax.lax.cond(x.sum() > 0, lambda: x @ x @ x, lambda: x @ x)
    assert counted(branch, (4, 4)) == {"float32": 2 * once}
    unknown = lambda x: jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ x, x)
    assert counted(unknown, (4, 4)) == {"float32": once}
    assert counted(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: x @ x, x), (4, 4)) == {"float32": 5 * once}
    dot = jax.checkpoint(jax.jit(jnp.dot))
    nested = jax.jit(lambda x: jax.lax.scan(lambda x, _: (dot(x, x), None), x, length=3)[0])
    assert counted(nested, (4, 4)) == {"float32": 3 * once}
    own = jax.custom_vjp(lambda x: x @ x)
    own.defvjp(lambda x: (x @ x, x), lambda x, g: (x @ g @ x,))
    assert counted(own, (4, 4)) == {"float32": once}
    assert counted(jax.grad(lambda x: own(x).sum()), (4, 4)) == {"float32": 3 * once}


def test_shared_work_counts_for_each_device():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"))
    assert counted(spread, (8, 4), (4, 4)) == {"float32": 2 * 8 * 4 * 4}


KINDS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA A10": 125e12,
    "Tesla V100-SXM2-16GB": None,
    "Tesla T4": None,
}


@pytest.mark.parametrize("name", KINDS)
def test_peaks_by_device(name):
    peak = peak_of(name)
    assert peak is not None
    assert peak.bfloat16 == KINDS[name]
    assert (peak.float16 is None) == name.startswith("TPU")
    fastest = peak.bfloat16 or peak.float16
    assert fastest >= peak.tensorfloat32 >= peak.float32 > 0
    assert peak.of("float32") == peak.tensorfloat32
    assert peak.of("float64") is None


@pytest.mark.parametrize("name", ["cpu", "", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H20", "A1000"])
def test_other_devices_have_no_peak(name):
    assert peak_of(name) is None
    assert seconds_at_peak({"bfloat16": 1e12}, name) is None


def test_seconds_at_peak():
    tpu = "TPU v4"
    assert seconds_at_peak({"bfloat16": 275e12, "float32": 275e12}, tpu) == pytest.approx(2.0)
    assert seconds_at_peak({"float32 high": 275e12}, tpu) == pytest.approx(3.0)
    assert seconds_at_peak({"float32 highest": 275e12}, tpu, devices=2) == pytest.approx(3.0)
    assert seconds_at_peak({"bfloat16": 1e12, "float64": 1.0}, tpu) is None  # of a part one cannot tell the whole
    assert seconds_at_peak({}, tpu) is None


def test_amounts_that_are_small_or_round():
    assert [scaled(x, "s") for x in (1.0, 999.4, 1e-3, 2.5e-7, 1e-10)] == ["1 s", "999 s", "1 ms", "250 ns", "0.1 ns"]
