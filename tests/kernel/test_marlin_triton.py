"""The Triton twin, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.formats import weight_format
from shoal.kernel.lowbit.marlin_triton import MarlinTriton, split_of


def test_splits_give_every_program_a_group() -> None:
    assert split_of(1, 4096, 32, 256) == 4
    assert split_of(1, 64, 3, 256) == 3
    assert split_of(4096, 4096, 32, 256) == 1


def test_refuses_a_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = MarlinTriton().refuses(LowbitLinearCall(1, 64, 256, "int4-g128", 4.125)) or ""
    assert "TRITON_INTERPRET=1" in reason or "pip install triton" in reason


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (5, 70, 384), (20, 33, 256)])
def test_equals_the_format(m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    stored = weight_format("int4-g128")
    packed = stored.quantize(torch.randn(n, k))
    x, bias = torch.randn(m, k), torch.randn(n)
    call = LowbitLinearCall(m, n, k, "int4-g128", 4.125, "fp32")
    result = MarlinTriton().prepare(call, packed, bias)(x)
    wanted = x @ stored.dequantize(packed).T + bias
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
