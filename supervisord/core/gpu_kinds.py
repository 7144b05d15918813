"""What sort of GPU one is, from what NVML says of it: profiles and the persistence policy go by that.

Sources: NVML_DEVICE_ARCH_* and NVML_BRAND_* of nvml.h, and NVIDIA's table of compute capabilities.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

UNKNOWN: Final = "unknown"

GENERATIONS: Final = (
    *("kepler", "maxwell", "pascal", "volta", "turing"),
    *("ampere", "ada", "hopper", "blackwell", "rubin"),
)
"""Oldest first."""
CLASSES: Final = ("geforce", "professional", "datacenter", "superchip", "integrated")
"""`superchip`: coherent with a Grace CPU (GH200, GB200). `integrated`: shares the machine's memory (GB10, Jetson)."""

_ARCHITECTURES: Final = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}
_FIRST_COMPUTE: Final = (
    ((13, 0), UNKNOWN),
    ((10, 0), "blackwell"),
    ((9, 0), "hopper"),
    ((8, 9), "ada"),
    ((8, 0), "ampere"),
    ((7, 5), "turing"),
    ((7, 0), "volta"),
    ((6, 0), "pascal"),
    ((5, 0), "maxwell"),
    ((3, 0), "kepler"),
)
"""The compute capability that each generation begins with, newest first."""

_TESLA, _NVIDIA = 2, 14
_GEFORCE: Final = frozenset({5, 6, 15, 16})
"""GeForce and Titan, with and without RTX."""
_PROFESSIONAL: Final = frozenset({1, 3, 12, 13})
"""Quadro, NVS, Quadro RTX, NVIDIA RTX."""
_VIRTUAL: Final = frozenset({4, 7, 8, 9, 10, 11, 18})
"""Parts of a GPU that a hypervisor lends: nothing is concluded from the card behind them."""

_INTEGRATED_COMPUTE: Final = frozenset({(3, 2), (5, 3), (6, 2), (7, 2), (8, 7), (11, 0), (12, 1)})
"""Jetsons from TK1 to Thor, and GB10: no card has these."""
_INTEGRATED_NAME: Final = re.compile(r"\b(GB10|Tegra|Jetson|Xavier|Orin|Thor)\b", re.IGNORECASE)
_SUPERCHIP_NAME: Final = re.compile(r"\b(GH200|GB200|GB300|Grace)\b", re.IGNORECASE)
_GEFORCE_NAME: Final = re.compile(r"\b(GeForce|TITAN)\b", re.IGNORECASE)
_PROFESSIONAL_NAME: Final = re.compile(r"\b(Quadro|RTX)\b", re.IGNORECASE)
_DATACENTER_NAME: Final = re.compile(r"\b(Tesla|[ABHLPTV]\d{1,3}[SX]?)\b")


class GpuKind(NamedTuple):
    """A generation and a class, each `unknown` when NVML does not say enough."""

    generation: str = UNKNOWN
    gpu_class: str = UNKNOWN


def kind_of(name: str, architecture: int | None, compute: tuple[int, int] | None, brand: int | None) -> GpuKind:
    """The kind of a GPU. The architecture counts first, then the compute capability; a name alone tells the class."""
    return GpuKind(_generation(architecture, compute), _class(name, compute, brand))


def _generation(architecture: int | None, compute: tuple[int, int] | None) -> str:
    if architecture in _ARCHITECTURES:
        return _ARCHITECTURES[architecture]
    if compute is None:
        return UNKNOWN
    return next((generation for first, generation in _FIRST_COMPUTE if compute >= first), UNKNOWN)


def _class(name: str, compute: tuple[int, int] | None, brand: int | None) -> str:
    if compute in _INTEGRATED_COMPUTE or _INTEGRATED_NAME.search(name):
        return "integrated"
    if brand in _VIRTUAL:
        return UNKNOWN
    if _SUPERCHIP_NAME.search(name):
        return "superchip"
    if brand in _GEFORCE or _GEFORCE_NAME.search(name):
        return "geforce"
    if brand in _PROFESSIONAL or _PROFESSIONAL_NAME.search(name):
        return "professional"
    if brand in {_TESLA, _NVIDIA} or _DATACENTER_NAME.search(name):
        return "datacenter"
    return UNKNOWN
