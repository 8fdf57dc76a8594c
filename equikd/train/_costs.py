"""What a step costs: floating-point operations and bytes by XLA's account, and the work of its matrix products.

XLA's account (`Compiled.cost_analysis`) is of the program that runs, on one device. What was fused together reads and
writes nothing in between, so its bytes are about those that travel. It counts the body of each loop once, however often
it runs. The products are counted from the trace instead (`_products.py`), with each round of a scan; utilisation is
told by these.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax

from equikd.sharding import home, spread_of
from equikd.train._cache import Cache, structure_key
from equikd.train._custom import called
from equikd.train._peak import peak_of, seconds_at_peak
from equikd.train._products import products_in
from equikd.train._program import Program, step_of
from equikd.train._setup import Setup


@dataclasses.dataclass(frozen=True)
class Costs:
    """What one training step costs; printed as a table.

    Attributes:
        flops: floating-point operations of the compiled step on one device, by XLA's account; a loop's body counts
            once. None where the backend gives no account.
        bytes_accessed: bytes that its operations read and write on one device, by the same account.
        products: floating-point operations of all matrix products and convolutions of the step, on all devices
            together, by the format they multiply in; each round of a scan counts, and the recomputation that
            `Trainer(remat=...)` asks for does not.
        device: the kind of the devices.
        devices: how many.
    """

    flops: float | None
    bytes_accessed: float | None
    products: dict[str, float]
    device: str
    devices: int

    @property
    def intensity(self) -> float | None:
        """Floating-point operations for each byte, by XLA's account."""
        return self.flops / self.bytes_accessed if self.flops and self.bytes_accessed else None

    @property
    def seconds_at_peak(self) -> float | None:
        """Seconds that the products would take at the peak rate of the devices; None where that is not known."""
        return seconds_at_peak(self.products, self.device, self.devices)

    def __str__(self) -> str:
        return "\n".join(["Costs of a step", *aligned(cost_rows(self))])


def cost_rows(costs: Costs) -> list[tuple[str, str]]:
    """The rows of the table."""
    per = " on each device" if costs.devices > 1 else ""
    unknown = "no account by this backend"
    peak = peak_of(costs.device)
    rows = [
        ("device", costs.device if costs.devices == 1 else f"{costs.devices} x {costs.device}"),
        ("XLA's FLOPs", unknown if costs.flops is None else f"{scaled(costs.flops, 'FLOP')}{per}, loop bodies once"),
        ("bytes accessed", unknown if costs.bytes_accessed is None else scaled(costs.bytes_accessed, "B") + per),
    ]
    if costs.intensity is not None:
        rows.append(("intensity", f"{costs.intensity:.3g} FLOP/B"))
    rows += [(f"products, {form}", scaled(flops, "FLOP")) for form, flops in costs.products.items()]
    if peak is None:
        return [*rows, ("peak", "not known for this device, so there is no utilisation")]
    rates = {form: peak.of(form) for form in costs.products}
    rows += [(f"peak, {form}", scaled(rate, "FLOP/s") if rate else "not known") for form, rate in rates.items()]
    if costs.seconds_at_peak is not None:
        rows.append(("products at peak", f"{scaled(costs.seconds_at_peak, 's')} a step"))
    return rows


def aligned(rows: list[tuple[str, str]]) -> list[str]:
    """Names and values in two columns, indented."""
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (0.0, "n"))


def scaled(amount: float, unit: str) -> str:
    """An amount as a person reads it, with powers of 1000.

    Example:
        >>> scaled(2_481_665_536, "FLOP"), scaled(0.00123, "s"), scaled(17, "B"), scaled(0, "B")
        ('2.48 GFLOP', '1.23 ms', '17 B', '0 B')
    """
    if not amount:
        return f"0 {unit}"
    size, prefix = next(one for one in _UNITS if amount >= one[0])
    return f"{amount / (size or 1e-9):.3g} {prefix}{unit}"


def costs_of(program: Program, setup: Setup) -> Costs:
    """The costs of a step, which is compiled for them.

    Args:
        program: the step's program.
        setup: the experiment, for shapes.
    """
    account = _account(program.lowered().compile())
    device, devices = hardware(setup.config)
    return Costs(account.get("flops"), account.get("bytes accessed"), products_of(setup), device, devices)


def _account(compiled: Any) -> dict[str, float]:
    """XLA's account, without what it does not know."""
    try:
        found = compiled.cost_analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError):  # a backend that keeps none
        return {}
    found = found[0] if isinstance(found, list | tuple) and found else found
    return {name: float(value) for name, value in dict(found or {}).items() if value >= 0}  # -1: not known


_PRODUCTS: "Cache[dict[str, float]]" = Cache(most=128)


def products_of(setup: Setup) -> dict[str, float]:
    """Floating-point operations of the step's products by format; traced once for each structure, never compiled."""
    # What is computed twice to save memory is no more work; nor are the guard's sums of gradients.
    config = dataclasses.replace(setup.config, remat=None, guard=None)
    state = dataclasses.replace(setup.state, guard=None)
    key = structure_key(config, state, setup.spec)

    def count() -> dict[str, float]:
        step = lambda config, state, batch: called(step_of(config), config, state, batch)
        return products_in(eqx.filter_make_jaxpr(step)(config, state, setup.spec)[0])

    return dict(_PRODUCTS.get(key, count))


def hardware(config: Any) -> tuple[str, int]:
    """The kind of the devices that a trainer's step runs on, and their number."""
    spread = spread_of(config)
    if spread is not None:
        return spread.mesh.devices.flat[0].device_kind, spread.devices
    place = home(None)
    device = jax.devices()[0] if place is None else next(iter(place.device_set))
    return device.device_kind, 1
