"""What a drafter does beside its products, as operators of PyTorch have it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.kernel.fused.guess import best, gate, native  # noqa: E402

CPU = torch.device("cpu")
TYPES = [one for one in (torch.float32, torch.bfloat16) if native(one, CPU)]


def gate_reference(x_RX, table_VX, tokens_R, out_RD):
    (u, a), (v, b) = x_RX.float().chunk(2, -1), table_VX[tokens_R].float().chunk(2, -1)
    z = torch.sigmoid(a + b)
    out_RD.copy_(z * u + (1 - z) * v)


def best_reference(logits_RV, tokens_RK, values_RK):
    result = logits_RV.float().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    count = tokens_RK.shape[1]
    tokens_RK.copy_(result.indices[:, :count])
    values_RK.copy_(result.values[:, :count])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [16, 50, 512])
def test_the_gate_mixes_features_with_tokens(dtype, width):
    source = torch.Generator().manual_seed(width)
    x, table = (torch.randn(n, 2 * width, generator=source).to(dtype) for n in (3, 7))
    tokens = torch.tensor([6, 0, 6])
    out, wanted = (torch.empty(3, width, dtype=dtype) for _ in range(2))
    gate(x, table, tokens, out)
    gate_reference(x, table, tokens, wanted)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("vocab", "count"), [(5, 5), (97, 4), (2048, 16)])
def test_the_best_tokens_come_first_with_their_probabilities(dtype, vocab, count):
    source = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(4, vocab, generator=source)).to(dtype)
    logits[1] = 1.0  # of equals the first
    logits[2, vocab - 1] = 80.0
    results = [(torch.zeros(4, count, dtype=torch.int64), torch.zeros(4, count)) for _ in range(2)]
    best(logits, *results[0])
    best_reference(logits, *results[1])
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=1e-5)


def test_other_types_and_devices_are_not_computed_so():
    assert not native(torch.float64, CPU)
    assert not native(torch.bfloat16, torch.device("meta"))
