"""Steps of an LSTM by products and one call each, beside PyTorch's, forward and backward."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.kernel.rnn.cell import lstm_cell, native, reference, side_by_side  # noqa: E402
from shoal.kernel.rnn.steps import lstm_steps  # noqa: E402
from shoal.kernel.tape import record  # noqa: E402
from shoal.model.linear import DispatchedLinear  # noqa: E402

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(
    not native(torch.float32, CPU), reason="the step in C++ needs AVX-512"
)


@needs_native
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("width", [40, 16])
def test_gradients_of_all_steps_are_those_of_pytorch(dtype, close, width):
    torch.manual_seed(width)
    net = torch.nn.LSTM(2 * width, width, 1, batch_first=True)
    x = torch.randn(3, 7, 2 * width, requires_grad=True)
    wanted, _ = net(x)
    back = torch.randn_like(wanted)
    into, onto, one, other = (
        side_by_side(getattr(net, f"{name}_l0").to(dtype))
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    gates = torch.nn.functional.linear(x.to(dtype), into, one + other)
    result = lstm_steps(gates, onto, DispatchedLinear)
    torch.testing.assert_close(result.float(), wanted, rtol=0, atol=close)
    given = (x, *net.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(result, given, back.to(dtype)),
        torch.autograd.grad(wanted, given, back),
        strict=True,
    ):
        assert (mine - theirs).norm() <= close * theirs.norm()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_step_of_rows_that_lie_apart_and_its_tape(dtype):
    """Beside the step by operators, rows and numbers around it untouched; and played again."""
    torch.manual_seed(0)
    rows, width = 3, 24
    gates = torch.randn(5, 2, 4 * width).to(dtype)
    onto = torch.randn(rows, 4 * width).to(dtype)
    before = torch.randn(rows, width)
    out = torch.zeros(5, 2, width, dtype=dtype)
    h, after = torch.zeros(rows, width, dtype=dtype), torch.zeros(rows, width)

    def step():
        lstm_cell(dtype, CPU)(gates[:rows, 1], onto, before, after, h, out[:rows, 1])
        return h

    _, tape = record(step)
    wanted = [torch.empty_like(one) for one in (after, h, h)]
    reference(gates[:rows, 1], onto, before, *wanted)
    close = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 0.01}
    torch.testing.assert_close(after, wanted[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(h, wanted[1], **close)
    assert torch.equal(out[:rows, 1], h)
    assert not out[rows:].any() and not out[:, 0].any()
    first = h.clone()
    before.zero_()
    assert tape.play()
    assert not torch.equal(h, first)


def test_another_type_takes_the_operators():
    assert lstm_cell(torch.float64, CPU) is reference
