"""Recurrences: every kernel against the loop, PyTorch's modules and itself in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.claims.lab.rnn.autograd import rnn
from shoal.core.errors import KernelError
from shoal.kernel.dispatch import candidates, dispatch
from shoal.kernel.rnn.call import Recurrence
from shoal.kernel.rnn.functions import FUNCTIONS
from shoal.kernel.rnn.fused import tiles_of
from shoal.plan.constrint.tiles import Facts

FAST = ("fused", "alternating")
each_function = pytest.mark.parametrize("name", list(FUNCTIONS))
each_fast = pytest.mark.parametrize("backend", FAST)


def inputs(
    name: str, B: int, T: int, N: int, D: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.Tensor]:
    """wx, R, b and states, all of them wanting gradients."""
    what, random = FUNCTIONS[name], torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    states = normal(len(what.states), B, 1, N, D)
    if name == "slstm":
        states[2] = states[2].abs() + 0.1
    results = [
        normal(B, T, len(what.inputs), N, D),
        normal(what.products, N, D, D) / D**0.5,
        0.3 * normal(len(what.gates), N, D),
        states,
    ]
    return [one.to(dtype).requires_grad_() for one in results]


def gradients(
    given_: list[torch.Tensor], name: str, backend: str, **options: Any
) -> list[torch.Tensor]:
    """Outputs, and gradients of all inputs by a loss that every state is in."""
    result, last = rnn(*given_, function=name, backend=backend, **options)
    random = torch.Generator().manual_seed(7)
    weights = [
        torch.randn(one.shape, generator=random, dtype=torch.float64) for one in (result, last)
    ]
    loss = (result.double() * weights[0]).sum() + (last.double() * weights[1]).sum()
    return [result, last, *torch.autograd.grad(loss, given_)]


def worst(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(
        float(((x.double() - y.double()).abs().max() / (1 + y.double().abs().max())).detach())
        for x, y in zip(a, b, strict=True)
    )


@each_function
@each_fast
def test_outputs_and_gradients_are_those_of_the_loop_in_fp64(name: str, backend: str) -> None:
    given_ = inputs(name, 3, 7, 2, 13, torch.float64)
    result = gradients(given_, name, backend)
    assert worst(result, gradients(given_, name, "reference")) < 1e-10


@each_fast
@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(list(FUNCTIONS)),
    B=st.integers(1, 9),
    T=st.integers(1, 6),
    N=st.integers(1, 3),
    D=st.sampled_from([1, 5, 16, 17, 33, 48, 70]),
    strided=st.booleans(),
    options=st.sampled_from(
        [{}, {"recompute": True}, {"outputs": "hidden"}, {"clip": 0.05}, {"clip": 0.3}]
    ),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_loop_in_fp32(
    backend: str,
    name: str,
    B: int,
    T: int,
    N: int,
    D: int,
    strided: bool,
    options: dict[str, Any],
    seed: int,
) -> None:
    given_ = inputs(name, B, T, N, D, seed=seed)
    if strided:
        # Neither contiguous nor aligned.
        given_ = [torch.stack([one, one], -1).detach()[..., 1].requires_grad_() for one in given_]
    kept = {key: value for key, value in options.items() if key != "recompute"}
    wanted = gradients(given_, name, "reference", **kept)
    assert worst(gradients(given_, name, backend, **options), wanted) < 1e-4


@each_function
def test_bf16_is_fp32_rounded_at_the_end(name: str) -> None:
    given_ = inputs(name, 3, 9, 2, 32, torch.bfloat16)
    wanted = gradients(given_, name, "reference")
    for backend in FAST:
        result = gradients(given_, name, backend)
        assert {one.dtype for one in result} == {torch.bfloat16}
        assert worst(result, wanted) < 0.02


def torch_module(name: str, D: int, K: int) -> tuple[Any, list[torch.Tensor]]:
    """PyTorch's module in fp64, and R and b that say the same; the inputs' weights stay there."""
    torch.manual_seed(3)
    module: Any = getattr(torch.nn, name.upper())(K, D, batch_first=True).double()
    hh = module.weight_hh_l0.detach().view(-1, 1, D, D)
    ih, bh = (getattr(module, f"bias_{key}_l0").detach().view(-1, 1, D) for key in ("ih", "hh"))
    if name == "lstm":
        return module, [hh, ih + bh]
    r, z, n = hh
    return module, [
        torch.stack([n, r, z]),
        torch.stack([bh[2], ih[0] + bh[0], ih[1] + bh[1], ih[2]]),
    ]


@pytest.mark.parametrize("name", ["lstm", "gru"])
@each_fast
def test_lstm_and_gru_are_those_of_pytorch(name: str, backend: str) -> None:
    B, T, D, K = 3, 8, 24, 5
    module, (R, b) = torch_module(name, D, K)
    x = torch.randn(B, T, K, dtype=torch.float64)
    h0, c0 = torch.randn(2, 1, B, D, dtype=torch.float64)
    begin = (h0, c0) if name == "lstm" else h0
    wanted, _ = module(x, begin)
    wx = (x @ module.weight_ih_l0.T).view(B, T, -1, 1, D)
    states = torch.stack([h0, c0] if name == "lstm" else [h0])[:, 0, :, None, None]
    result, _ = rnn(wx, R, b, states, name, backend)
    assert torch.allclose(result[0, :, :, 0], wanted, atol=1e-12)


@each_function
@each_fast
def test_chunks_with_a_carried_state_are_one_pass(name: str, backend: str) -> None:
    wx, R, b, states = (one.detach() for one in inputs(name, 4, 20, 2, 19))
    whole, last = rnn(wx, R, b, states, name, backend)
    pieces = []
    for chunk in wx.split([3, 9, 1, 7], 1):
        result, states = rnn(chunk, R, b, states, name, backend)
        pieces.append(result)
    if backend == "fused":
        assert torch.equal(torch.cat(pieces, 2), whole)
        assert torch.equal(states, last)
    assert torch.allclose(torch.cat(pieces, 2), whole, atol=1e-5)


@each_function
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    wx, R, b, states = (one.detach() for one in inputs(name, 13, 5, 2, 40))
    whole, _ = rnn(wx, R, b, states, name, "fused")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (slice(0, 1), slice(4, 6), slice(2, 13)):
                alone, _ = rnn(wx[rows], R, b, states[:, rows], name, "fused")
                assert torch.equal(alone, whole[:, rows])
    finally:
        torch.set_num_threads(before)


@each_function
def test_a_head_that_threads_share_is_the_same(name: str) -> None:
    """One head, one row: the only thing to cut is the head."""
    given_ = inputs(name, 1, 11, 1, 150)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert tiles_of(Recurrence(name, 1, 11, 1, 150))["team"] > 1 or name == "elman"
        result = gradients(given_, name, "fused")
        torch.set_num_threads(1)
        assert worst(result[:2], gradients(given_, name, "fused")[:2]) == 0
    finally:
        torch.set_num_threads(before)
    assert worst(result, gradients(given_, name, "reference")) < 1e-4


@each_fast
def test_slstm_survives_large_gates(backend: str) -> None:
    """Without the running maximum exp(100) overflows."""
    for i, f in ((100.0, -3.0), (-100.0, -100.0), (60.0, 80.0)):
        wx, R, b, _ = inputs("slstm", 2, 30, 1, 16)
        with torch.no_grad():
            wx[:, :, 0] += i
            wx[:, :, 1] += f
        results = [*rnn(wx, R, b, function="slstm", backend=backend)]
        results += torch.autograd.grad(results[0][0].sum(), (wx, R, b))
        wanted = [*rnn(wx, R, b, function="slstm", backend="reference")]
        wanted += torch.autograd.grad(wanted[0][0].sum(), (wx, R, b))
        assert all(bool(torch.isfinite(one).all()) for one in results)
        assert worst(results, wanted) < 1e-4


def test_nan_and_infinity_travel() -> None:
    wx, R, b, states = (one.detach() for one in inputs("lstm", 2, 4, 1, 16))
    wx[0, 1, 2, 0, 3] = torch.nan
    result, _ = rnn(wx, R, b, states, "lstm", "fused")
    assert bool(torch.isnan(result[0, 0, 1, 0, 3]))
    assert bool(torch.isnan(result[0, 0, 2:]).all())
    assert bool(torch.isfinite(result[:, 1]).all())


def test_prepared_kernel_steps_through_time() -> None:
    wx, R, b, states = (one.detach() for one in inputs("gru", 2, 6, 2, 16))
    call = Recurrence("gru", 2, 6, 2, 16)
    wanted, _ = rnn(wx, R, b, states, "gru", "reference")
    for backend in ("reference", *FAST):
        ready = dispatch(call, wanted=backend).prepare(call, R, b)
        now, pieces = states, []
        for t in range(6):
            result, now = ready(wx[:, t : t + 1], now)
            pieces.append(result)
        assert torch.allclose(torch.cat(pieces, 2), wanted, atol=1e-5)


def test_only_what_wants_gradients_gets_them() -> None:
    wx, R, b, _ = inputs("lstm", 2, 4, 1, 16)
    result, last = rnn(wx, R.detach(), b.detach(), outputs="hidden", backend="fused")
    assert result.shape == (2, 4, 1, 16)
    assert last.shape == (2, 2, 1, 1, 16)
    (result[:, -1].sum() + last[1].sum()).backward()
    assert wx.grad is not None
    assert R.grad is None
    with torch.no_grad():
        assert not rnn(wx, R, b, backend="fused")[0].requires_grad


def test_a_changed_output_is_noticed() -> None:
    wx, R, b, _ = inputs("lstm", 2, 4, 1, 16)
    result, _ = rnn(wx, R, b, backend="fused", outputs="hidden")
    loss = result.sum()
    result.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("outputs", ["states", "hidden"])
def test_an_output_may_be_changed_in_place(outputs: Any) -> None:
    # As any other tensor: a view that a function of one's own has made may not.
    given_ = inputs("lstm", 2, 4, 1, 16)
    wanted = rnn(*given_, backend="fused", outputs=outputs)[0] + 1
    result = rnn(*given_, backend="fused", outputs=outputs)[0].add_(1)
    assert torch.equal(result, wanted) and result.is_contiguous()


def test_dispatch_takes_the_fused_kernel_and_the_other_where_heads_are_large() -> None:
    assert candidates(Recurrence("lstm", 1, 1024, 12, 64))[0][0] == "fused"
    assert candidates(Recurrence("lstm", 1, 64, 1, 2048))[0][0] == "alternating"
    assert dispatch(Recurrence("slstm", 4, 8, 2, 32), exact=True).backend == "fused"
    with pytest.raises(KernelError, match=r"2048 units in the L2 .*in_L2.*alternating"):
        dispatch(Recurrence("lstm", 1, 64, 1, 2048), wanted="fused")


def test_tiles_follow_the_machine() -> None:
    call = Recurrence("lstm", 16, 8, 12, 64)
    wide = Facts(cores=2, vector_bytes=64, registers=32, l1_bytes=49152, l2_bytes=2097152)
    assert tiles_of(call, wide)["rows"] == 6
    assert tiles_of(call, wide.model_copy(update={"registers": 16}))["rows"] == 2
    alone = Recurrence("lstm", 1, 8, 1, 256)
    assert tiles_of(alone, wide)["team"] == 2
    assert tiles_of(alone, wide.model_copy(update={"cores": 1}))["team"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wx": (2, 4, 3, 1, 16)}, r"rnn.wx = .*expected 4 gates in dimension 2: lstm has i, f"),
        ({"R": (3, 1, 16, 16)}, r"rnn.R = \[3, 1, 16, 16\]: expected \[4, 1, 16, 16\] for wx"),
        ({"b": (4, 16)}, r"rnn.b = \[4, 16\]: expected \[4, 1, 16\]"),
        ({"states": (2, 2, 1, 16)}, r"rnn.states = .*expected \[2, 2, 1, 1, 16\].* h, c"),
        ({"wx": (2, 0, 4, 1, 16)}, r"none of them 0"),
    ],
)
def test_wrong_shapes_are_refused(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {
        "wx": (2, 4, 4, 1, 16),
        "R": (4, 1, 16, 16),
        "b": (4, 1, 16),
        "states": (2, 2, 1, 1, 16),
    }
    with pytest.raises(KernelError, match=message):
        rnn(**{key: torch.zeros(shape) for key, shape in (shapes | change).items()})


def test_wrong_words_are_refused() -> None:
    wx, R, b, states = (one.detach() for one in inputs("lstm", 1, 2, 1, 4))
    with pytest.raises(KernelError, match=r"rnn.function = 'lstn'.*did you mean 'lstm'"):
        rnn(wx, R, b, states, "lstn")
    with pytest.raises(KernelError, match=r"kernel.recurrence = 'fusd'.*did you mean 'fused'"):
        rnn(wx, R, b, states, "lstm", "fusd")
    with pytest.raises(
        KernelError, match=r"rnn.R = 'torch.float64 on cpu': expected torch.float32"
    ):
        rnn(wx, R.double(), b, states)
    with pytest.raises(KernelError, match=r"rnn.clip = 0"):
        rnn(wx, R, b, states, clip=0)
    with pytest.raises(KernelError, match=r"rnn.outputs = 'all'"):
        rnn(wx, R, b, states, outputs="all")  # type: ignore[arg-type]
