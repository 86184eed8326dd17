"""The Triton recurrence, interpreted where there is no GPU: the same as the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rnn import gradients, inputs, worst

from shoal.core.errors import KernelError
from shoal.kernel.dispatch import dispatch
from shoal.kernel.rnn.call import Recurrence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(
    name: str, B: int, T: int, N: int, D: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    given_ = [
        one.detach().to(DEVICE).requires_grad_() for one in inputs(name, B, T, N, D, dtype, seed=T)
    ]
    kept = {key: value for key, value in options.items() if key != "recompute"}
    wanted = gradients(given_, name, "reference", **kept)
    result = gradients(given_, name, "triton", **options)
    assert worst(result, wanted) < (1e-4 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize(
    ("name", "B", "D", "options"),
    [
        ("lstm", 3, 16, {}),
        ("gru", 1, 20, {"clip": 0.1}),
        ("elman", 18, 5, {}),
        ("slstm", 2, 16, {"recompute": True}),
    ],
)
def test_it_is_the_loop(name: str, B: int, D: int, options: dict[str, Any]) -> None:
    check(name, B, 3, 2, D, options, torch.float32)


@pytest.mark.parametrize("name", ["lstm", "gru", "elman", "slstm"])
def test_bf16_is_fp32_rounded_at_the_end(name: str) -> None:
    check(name, 2, 2, 1, 16, {}, torch.bfloat16)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(["lstm", "gru", "elman", "slstm"]),
    B=st.integers(1, 20),
    T=st.integers(1, 5),
    N=st.integers(1, 3),
    D=st.sampled_from([1, 5, 16, 17, 33, 48, 64]),
    options=st.sampled_from([{}, {"recompute": True}, {"outputs": "hidden"}, {"clip": 0.05}]),
)
def test_any_shape_is_the_loop(
    name: str, B: int, T: int, N: int, D: int, options: dict[str, Any]
) -> None:
    check(name, B, T, N, D, options, torch.float32)


def test_refuses_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call = Recurrence("lstm", 1, 8, 1, 32)
    with pytest.raises(KernelError, match=r"needs Triton|runs on a GPU"):
        dispatch(call, wanted="triton")
    with pytest.raises(KernelError, match=r"takes fp32, bf16"):
        dispatch(Recurrence("lstm", 1, 8, 1, 32, "fp64"), wanted="triton")
