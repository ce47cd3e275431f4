"""The real compiler takes every kernel, in the dtype the interpreter cannot do, and nothing spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = 227 * 1024  # what a program may have on Hopper
OVERLAPPING = ("_decode_kernel", "_packed_kernel", "_prefill_kernel", "_product_kernel", "_shared_prefix_kernel")
SMALL_SHARED_BYTES = 99 * 1024  # and on GPUs for inference, where weights of four bits are wanted most

ALL = [pytest.param(dim, [], marks=pytest.mark.slow) for dim in (64, 80, 96, 128, 256)]


def compiled(cache: Path, *options: str) -> list[dict[str, Any]]:
    """What each kernel needs."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.ops.triton.compile_kernels", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(900)  # a minute and a half of one core; beside other work more
@pytest.mark.parametrize(("head_dim", "options"), [(128, ["--quick"]), *ALL])
def test_every_kernel_compiles_for_hopper_and_fits(head_dim: int, options: list[str], tmp_path: Path) -> None:
    kernels = compiled(tmp_path, "--head-dim", str(head_dim), *options)
    assert {"_decode_kernel", "_merge_kernel", "_prefill_kernel", "_shared_prefix_kernel"} <= {
        k["kernel"] for k in kernels
    }
    for name in ("_prefill_kernel", "_shared_prefix_kernel"):
        assert {k["group"] for k in kernels if k["kernel"] == name} == {4, 5}  # with rows of a tile left over, and none
    experts = [k for k in kernels if k["kernel"] == "_grouped_linear_kernel"]
    assert {k["block_m"] for k in experts} == {16, 64, 128}
    assert all(k["wgmma"] for k in experts if k["block_m"] >= 64)
    products = [k for k in kernels if k["kernel"] == "_product_kernel"]
    assert {k["block_m"] for k in products} == {16, 32, 64, 128}
    for product in products:
        assert product["wgmma"] and product["shared"] <= SMALL_SHARED_BYTES, product
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_BYTES, kernel
        assert not kernel["overwritten"], kernel  # else sums are wrong now and then
        # less than a wait per tile
        may_spill = 8 if head_dim == 256 and kernel["kernel"] in ("_prefill_kernel", "_shared_prefix_kernel") else 0
        assert kernel["stack"] <= may_spill, kernel
        if kernel["kernel"] in ("_linear_kernel", "_packed_kernel", "_prefill_kernel", "_shared_prefix_kernel"):
            assert kernel["wgmma"] > 0, kernel  # tiles are large enough for the wide matrix instructions
        if kernel["kernel"] != "_grouped_linear_kernel":  # which waits for sums of few bits
            assert kernel["serial"] <= 0, kernel  # else each wide matrix instruction waits for the one before
        if kernel["kernel"] in OVERLAPPING:
            assert kernel["waits"] and min(kernel["waits"]) > 0, kernel  # the next tile is on its way during this one


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dtype", "capability", "shared_bytes"),
    [("bfloat16", 90, SHARED_BYTES), ("bfloat16", 89, SMALL_SHARED_BYTES), ("float32", 90, SHARED_BYTES)],
)
def test_attention_of_512_dimensions_fits(dtype: str, capability: int, shared_bytes: int, tmp_path: Path) -> None:
    """Gemma 4's layers of full attention. Its sums fill the registers: some of them spill."""
    kernels = compiled(tmp_path, "--head-dim", "512", "--dtype", dtype, "--capability", str(capability))
    assert {"_decode_kernel", "_prefill_kernel", "_shared_prefix_kernel"} <= {kernel["kernel"] for kernel in kernels}
    for kernel in kernels:
        assert kernel["shared"] <= shared_bytes and not kernel["overwritten"], kernel
        assert dtype == "float32" or kernel["stack"] <= 512, kernel


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("head_dim", "capability", "shared_bytes", "options"),
    [
        (256, 90, SHARED_BYTES, ["--quick", "--shared"]),  # half the time of one that is assembled too
        pytest.param(64, 89, SMALL_SHARED_BYTES, [], marks=pytest.mark.slow),
        pytest.param(128, 90, SHARED_BYTES, [], marks=pytest.mark.slow),
        pytest.param(128, 89, SMALL_SHARED_BYTES, [], marks=pytest.mark.slow),
        pytest.param(256, 90, SHARED_BYTES, [], marks=pytest.mark.slow),
        pytest.param(256, 89, SMALL_SHARED_BYTES, [], marks=pytest.mark.slow),
    ],
)
def test_attention_in_float32_fits(
    head_dim: int, capability: int, shared_bytes: int, options: list[str], tmp_path: Path
) -> None:
    """An encoder's is compared with transformers' so, and many small ones are stored so."""
    asked = ["--attention", "--dtype", "float32", "--head-dim", head_dim, "--capability", capability, *options]
    kernels = compiled(tmp_path, *map(str, asked))
    assert {*OVERLAPPING} - {"_product_kernel"} <= {kernel["kernel"] for kernel in kernels}
    for kernel in kernels:
        assert kernel["shared"] <= shared_bytes, kernel


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dims", "groups", "capability", "shared_bytes", "dtype"),
    [
        ((576, 512), (16, 20, 128), 90, SHARED_BYTES, "bfloat16"),
        ((320, 256), (32, 40), 90, SHARED_BYTES, "bfloat16"),
        ((320, 256), (40,), 90, SHARED_BYTES, "float32"),
        ((576, 512), (20,), 89, SMALL_SHARED_BYTES, "bfloat16"),
    ],
)
def test_latent_attention_fits(
    dims: tuple[int, int], groups: tuple[int, ...], capability: int, shared_bytes: int, dtype: str, tmp_path: Path
) -> None:
    """Values within keys, of DeepSeek's dimensions and MiniCPM 3's. Sums of 512 fill the registers: some spill."""
    options = ["--head-dim", dims[0], "--value-dim", dims[1], "--capability", capability, "--dtype", dtype]
    kernels = compiled(tmp_path, *map(str, [*options, "--groups", *groups]))
    assert {"_decode_kernel", "_prefill_kernel", "_shared_prefix_kernel"} <= {kernel["kernel"] for kernel in kernels}
    for kernel in kernels:
        assert kernel["shared"] <= shared_bytes and not kernel["overwritten"], kernel
        if dtype == "float32":
            continue
        assert kernel["stack"] <= (640 if dims[1] == 512 else 128), kernel
        if capability == 90:
            assert kernel["serial"] <= 0, kernel
            if kernel["kernel"] in ("_prefill_kernel", "_shared_prefix_kernel"):
                assert kernel["wgmma"] > 0, kernel
            if kernel["kernel"] in OVERLAPPING:
                assert kernel["waits"] and min(kernel["waits"]) > 0, kernel
