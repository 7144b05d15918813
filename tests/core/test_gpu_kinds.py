"""Generation and class of GPUs, from what NVML says of real ones."""

from __future__ import annotations

import pytest

from supervisord.core.gpu_kinds import CLASSES, GENERATIONS, UNKNOWN, GpuKind, kind_of

ARCH_UNKNOWN = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("name", "architecture", "compute", "brand", "generation", "gpu_class"),
    [
        ("Tesla K80", 2, (3, 7), 2, "kepler", "datacenter"),
        ("Quadro M4000", 3, (5, 2), 1, "maxwell", "professional"),
        ("NVIDIA GeForce GTX 1080 Ti", 4, (6, 1), 5, "pascal", "geforce"),
        ("Tesla V100-SXM2-32GB", 5, (7, 0), 2, "volta", "datacenter"),
        ("NVIDIA TITAN V", 5, (7, 0), 6, "volta", "geforce"),
        ("Tesla T4", 6, (7, 5), 2, "turing", "datacenter"),
        ("Quadro RTX 8000", 6, (7, 5), 12, "turing", "professional"),
        ("NVIDIA GeForce RTX 3090", 7, (8, 6), 5, "ampere", "geforce"),
        ("NVIDIA RTX A6000", 7, (8, 6), 13, "ampere", "professional"),
        ("NVIDIA A100-SXM4-80GB", 7, (8, 0), 14, "ampere", "datacenter"),
        ("NVIDIA GeForce RTX 4090", 8, (8, 9), 5, "ada", "geforce"),
        ("NVIDIA L40S", 8, (8, 9), 14, "ada", "datacenter"),
        ("NVIDIA RTX 6000 Ada Generation", 8, (8, 9), 13, "ada", "professional"),
        ("NVIDIA H100 80GB HBM3", 9, (9, 0), 14, "hopper", "datacenter"),
        ("NVIDIA H200", 9, (9, 0), 14, "hopper", "datacenter"),
        ("NVIDIA GH200 480GB", 9, (9, 0), 14, "hopper", "superchip"),
        ("NVIDIA GeForce RTX 5090", 10, (12, 0), 5, "blackwell", "geforce"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 10, (12, 0), 13, "blackwell", "professional"),
        ("NVIDIA B200", 10, (10, 0), 14, "blackwell", "datacenter"),
        ("NVIDIA GB200", 10, (10, 0), 14, "blackwell", "superchip"),
        ("NVIDIA GB10", 10, (12, 1), 14, "blackwell", "integrated"),
        ("Orin (nvgpu)", 7, (8, 7), None, "ampere", "integrated"),
        ("NVIDIA Thor", None, (11, 0), None, "blackwell", "integrated"),
        ("NVIDIA R100", 13, (13, 0), 14, "rubin", "datacenter"),
    ],
)
def test_real_gpus(
    name: str, architecture: int, compute: tuple[int, int], brand: int, generation: str, gpu_class: str
) -> None:
    expected = GpuKind(generation, gpu_class)
    assert generation in GENERATIONS
    assert gpu_class in CLASSES
    assert kind_of(name, architecture, compute, brand) == expected
    if generation != "rubin":
        assert kind_of(name, ARCH_UNKNOWN, compute, brand) == expected
        assert kind_of(name, None, compute, None) == expected  # its name is enough for the class


@pytest.mark.parametrize(
    ("architecture", "compute", "generation"),
    [
        (None, None, UNKNOWN),
        (ARCH_UNKNOWN, None, UNKNOWN),
        (11, None, UNKNOWN),
        (None, (2, 0), UNKNOWN),
        (None, (13, 0), UNKNOWN),
        (None, (99, 0), UNKNOWN),
        (7, (8, 9), "ampere"),
        (None, (7, 2), "volta"),
    ],
)
def test_generations(architecture: int | None, compute: tuple[int, int] | None, generation: str) -> None:
    assert kind_of("", architecture, compute, None).generation == generation


@pytest.mark.parametrize(
    ("name", "brand", "gpu_class"),
    [
        ("", None, UNKNOWN),
        ("NVIDIA Graphics Device", 0, UNKNOWN),
        ("NVIDIA A100-40C", 9, UNKNOWN),
        ("GRID V100D-32Q", 10, UNKNOWN),
        ("something new", 14, "datacenter"),
        ("something new", 5, "geforce"),
        ("something new", 13, "professional"),
        ("NVIDIA GeForce RTX 6090", None, "geforce"),
    ],
)
def test_classes(name: str, brand: int | None, gpu_class: str) -> None:
    assert kind_of(name, None, None, brand).gpu_class == gpu_class
