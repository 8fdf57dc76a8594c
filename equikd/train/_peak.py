"""Peak rates of accelerators: how many floating-point operations a second a device could do at most, by its vendor.

These are the figures for dense matrices at the highest clock, of one JAX device, and no program reaches them; what part
of them a program reaches is its utilisation. Of a device that is not in the table nothing is told: a utilisation of an
invented peak would be worse than none.

What a product of float32 takes depends on the device. TPUs multiply in passes of bfloat16: one by default, three with
precision "high", six with "highest". GPUs of NVIDIA since Ampere multiply in tensorfloat32 unless the precision is
"highest"; older ones in float32 always.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Peak(NamedTuple):
    """FLOP/s of one device; None: its hardware has no such product.

    Attributes:
        bfloat16: products of bfloat16.
        float16: products of float16.
        tensorfloat32: of float32 at the default precision, and at "high".
        float32: of float32 in full, which is "highest".
        passes: passes that "high" takes, for each of the default precision.
    """

    bfloat16: float | None
    float16: float | None
    tensorfloat32: float
    float32: float
    passes: int = 1

    def of(self, form: str) -> float | None:
        """FLOP/s of products in a format of `_products.py`; None: not known.

        Example:
            >>> peak_of("TPU v4").of("float32 highest") * 6 == peak_of("TPU v4").of("bfloat16")
            True
        """
        known = {
            "bfloat16": self.bfloat16,
            "float16": self.float16,
            "float32": self.tensorfloat32,
            "float32 high": self.tensorfloat32 / self.passes,
            "float32 highest": self.float32,
        }
        return known.get(form)


_TERA = 1e12


def _nvidia(half: float, tensorfloat32: float, float32: float) -> Peak:
    return Peak(half * _TERA, half * _TERA, tensorfloat32 * _TERA, float32 * _TERA)


def _older(half: float, float32: float) -> Peak:
    """Before Ampere: tensor cores for float16 alone."""
    return Peak(None, half * _TERA, float32 * _TERA, float32 * _TERA)


def _tpu(bfloat16: float) -> Peak:
    return Peak(bfloat16 * _TERA, None, bfloat16 * _TERA, bfloat16 * _TERA / 6, passes=3)


# By the device kind of JAX, lower case: the first entry whose words all stand in it, as words. Where a data sheet gives
# a figure with sparsity (a star at it), half of that is the dense one.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    # Google Cloud documentation, "TPU v2" ... "TPU v6e": peak compute per chip, bf16. A JAX device of v2 and v3 is one
    # of the two cores of a chip, which has 45 and 123; since v4 it is a chip.
    ("tpu v2", _tpu(45 / 2)),
    ("tpu v3", _tpu(123 / 2)),
    ("tpu v4 lite", _tpu(138)),  # TPUv4i in Google's "Ten Lessons From Three Generations", Jouppi et al. 2021
    ("tpu v4", _tpu(275)),
    ("tpu v5 lite", _tpu(197)),
    ("tpu v5e", _tpu(197)),
    ("tpu v5p", _tpu(459)),
    ("tpu v5", _tpu(459)),
    ("tpu v6 lite", _tpu(918)),
    ("tpu v6e", _tpu(918)),
    # NVIDIA GB200 NVL72 data sheet, per GPU (a 72nd): FP16/BF16 5 PFLOPS*, TF32 2.5 PFLOPS*, FP32 80 TFLOPS.
    ("nvidia gb200", _nvidia(2500, 1250, 80)),
    # NVIDIA HGX B200 data sheet, per GPU (an eighth): FP16/BF16 4.5 PFLOPS*, TF32 2.2 PFLOPS*, FP32 75 TFLOPS.
    ("nvidia b200", _nvidia(2250, 1100, 75)),
    # NVIDIA H200 data sheet: SXM as the H100 SXM; NVL 1,671*, 835*, 60.
    ("nvidia h200 nvl", _nvidia(1671 / 2, 835 / 2, 60)),
    ("nvidia h200", _nvidia(1979 / 2, 989 / 2, 67)),
    # NVIDIA GH200 data sheet: 990 dense BF16, 494 dense TF32, 67 FP32.
    ("nvidia gh200", _nvidia(1979 / 2, 989 / 2, 67)),
    # NVIDIA H100 data sheet: SXM 1,979*, 989*, 67; NVL 1,671*, 835*, 60; PCIe (sheet of 2022) 1,513*, 756*, 51.
    ("nvidia h100 pcie", _nvidia(1513 / 2, 756 / 2, 51)),
    ("nvidia h100 nvl", _nvidia(1671 / 2, 835 / 2, 60)),
    ("nvidia h100", _nvidia(1979 / 2, 989 / 2, 67)),
    # NVIDIA A100 data sheet, SXM and PCIe alike: 312, 156, 19.5.
    ("a100", _nvidia(312, 156, 19.5)),
    # NVIDIA A30 data sheet: 165, 82, 10.3.
    ("a30", _nvidia(165, 82, 10.3)),
    # NVIDIA A40 data sheet: 149.7, 74.8, 37.4.
    ("a40", _nvidia(149.7, 74.8, 37.4)),
    # NVIDIA A10 data sheet: 125, 62.5, 31.2. The A10G of clouds is another one, without a data sheet of NVIDIA.
    ("a10", _nvidia(125, 62.5, 31.2)),
    # NVIDIA L40S data sheet: 362.05, 183, 91.6; L40: 181.05, 90.5, 90.5; L4: 242*, 120*, 30.3.
    ("l40s", _nvidia(362.05, 183, 91.6)),
    ("l40", _nvidia(181.05, 90.5, 90.5)),
    ("l4", _nvidia(242 / 2, 120 / 2, 30.3)),
    # NVIDIA RTX A6000 data sheet and "Ampere GA102 GPU Architecture" white paper: 154.8, 77.4, 38.7.
    ("rtx a6000", _nvidia(154.8, 77.4, 38.7)),
    # NVIDIA V100 data sheet: SXM2 125 and 15.7, PCIe 112 and 14, V100S 130 and 16.4.
    ("v100 pcie", _older(112, 14)),
    ("v100s", _older(130, 16.4)),
    ("v100", _older(125, 15.7)),
    # NVIDIA T4 data sheet: 65 mixed precision, 8.1 single precision.
    ("t4", _older(65, 8.1)),
)


def peak_of(device_kind: str) -> Peak | None:
    """The peak rates of a kind of device, or None where they are not known, as of CPUs.

    Args:
        device_kind: as `jax.devices()[0].device_kind` has it.

    Example:
        >>> peak_of("NVIDIA A100-SXM4-80GB").bfloat16, peak_of("cpu")
        (312000000000000.0, None)
    """
    words = device_kind.lower().replace("-", " ").split()
    # V100-SXM2 and V100S-PCIE-32GB, but neither the A10G nor "H100 MIG 1g.10gb", which is a seventh of a device.
    if "mig" in words:
        return None
    return next((peak for name, peak in _PEAKS if set(name.split()) <= set(words)), None)


def seconds_at_peak(products: Mapping[str, float], device_kind: str, devices: int = 1) -> float | None:
    """Seconds that products would take if every device ran at its peak.

    Args:
        products: floating-point operations by format.
        device_kind: of all devices.
        devices: how many share the work.

    Returns:
        None where the peak of the device, or of one of the formats, is not known, or there are no products.

    Example:
        >>> seconds_at_peak({"bfloat16": 624e12}, "NVIDIA A100-SXM4-80GB", devices=2)
        1.0
    """
    peak = peak_of(device_kind)
    rates = {form: None if peak is None else peak.of(form) for form in products}
    seconds = [flops / rate for form, flops in products.items() if (rate := rates[form])]
    return sum(seconds) / devices if seconds and len(seconds) == len(products) else None
