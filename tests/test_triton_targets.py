"""The Triton kernels compile for GPUs that people have, and their blocks fit there; no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")  # comes with torch's CUDA builds

from tests.launch_keys import launched

# Most shared memory of a block, KiB (docs.nvidia.com, CUDA C++ programming guide, technical specifications).
GPUS = {"T4": (75, 64), "A100": (80, 163), "3090": (86, 99), "4090, L4": (89, 99), "H100": (90, 227)}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_kernel_compiles_for_it(gpu, dtype, tmp_path):
    capability, kib = GPUS[gpu]
    if capability < 80 and dtype == "bfloat16":
        pytest.skip("no bf16 there")
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", str(capability), dtype],
        cwd=Path(__file__).parent.parent, env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: int(size) for name, size in (line.split() for line in done.stdout.splitlines())}
    assert found.keys() == launched().keys()
    assert max(found.values()) <= kib << 10
