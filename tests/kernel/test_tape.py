"""Calls of kernels that are written down once and played again."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.native import cpu_flags  # noqa: E402
from shoal.kernel.calls import LinearCall, PagedAttentionCall, PointwiseCall  # noqa: E402
from shoal.kernel.dispatch import kernels_of  # noqa: E402
from shoal.kernel.native import function, recorded_by  # noqa: E402
from shoal.kernel.tape import Tape, record  # noqa: E402

pytestmark = pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="kernels want AVX-512")


@pytest.fixture
def layers():
    """Eight layers of norm and product, by compiled kernels."""
    source = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(8):
        weight = torch.randn(48, 48, generator=source) / 7
        linear = kernels_of("linear")["cpp"].prepare(LinearCall(1, 48, 48, "fp32"), weight)
        norm = kernels_of("rms_norm")["cpp"].prepare(
            PointwiseCall("rms_norm", 1, 48, 48, "fp32"), torch.ones(48), 1e-5
        )
        layers.append((norm, linear))
    return layers


def through(layers, x):
    for norm, linear in layers:
        x = linear(norm(x))
    return x


def test_played_with_other_numbers(layers):
    source = torch.Generator().manual_seed(1)
    x = torch.randn(3, 48, generator=source)
    with torch.inference_mode():
        result, tape = record(lambda: through(layers, x))
        assert isinstance(tape, Tape)
        assert len(tape) == 16
        assert result is tape.result
        for _ in range(3):
            other = torch.randn(3, 48, generator=source)
            expected = through(layers, other.clone())
            assert not torch.equal(tape.result, expected)
            x.copy_(other)
            assert tape.play()
            assert torch.equal(tape.result, expected)


def test_memory_serves_the_next_layer_and_nobody_else(layers):
    x = torch.ones(3, 48)
    with torch.inference_mode():
        result, tape = record(lambda: through(layers, x))
        expected = result.clone()
        # What is allocated now must not lie where the tape writes, nor change what it gives.
        others = [torch.full((3, 48), 9.0) for _ in range(50)]
        assert tape.play()
        assert torch.equal(tape.result, expected)
        assert all(bool((other == 9).all()) for other in others)
    blocks = [kept for kept in tape._kept[0] if isinstance(kept, torch.Tensor)]
    assert len(blocks) <= 3


def test_results_that_are_looked_at_stay(layers):
    x = torch.ones(3, 48)
    norm, linear = layers[0]
    with torch.inference_mode():
        first = []

        def compute():
            first.append(linear(norm(x)))  # held by a view alone
            first[0] = first[0][1:]
            return through(layers, x)

        _, tape = record(compute)
        expected = linear(norm(x))[1:]
        tape.play()
    assert torch.equal(first[0], expected)


@pytest.mark.parametrize(
    ("compute", "named"),
    [
        (lambda x: x + 1, "aten::add"),
        (lambda x: x.t().contiguous(), "aten::contiguous"),
        (lambda x: x.index_select(0, torch.tensor([0])), "aten::"),
        (lambda x: torch.nn.functional.pad(x, (0, 1)), "pad"),
    ],
)
def test_what_pytorch_computes_is_not_recorded(compute, named):
    x = torch.ones(3, 48)
    with torch.inference_mode():
        result, reason = record(lambda: compute(x))
    assert isinstance(reason, str)
    assert named in reason
    assert torch.equal(result, compute(x))


def test_views_are_no_reason(layers):
    x = torch.ones(3, 48)
    norm, linear = layers[0]
    with torch.inference_mode():
        result, tape = record(lambda: linear(norm(x)).view(3, 4, 12)[:, 1:].unbind(1)[0])
    assert isinstance(tape, Tape)
    assert result.shape == (3, 12)


def test_a_call_that_refuses_ends_the_tape():
    call = PagedAttentionCall(1, 16, 2, 1, 16, 4, "fp32")
    attention = kernels_of("paged_attention")["cpp"].prepare(call)
    q, keys, values = torch.ones(1, 2, 16), torch.ones(16, 1, 16), torch.ones(16, 1, 16)
    blocks, lengths = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([5])
    with torch.inference_mode():
        _, tape = record(lambda: attention(q, keys, values, blocks, lengths))
    assert isinstance(tape, Tape)
    assert tape.play()
    blocks[0, 1] = 99
    assert not tape.play()
    blocks[0, 1] = 3
    assert tape.play()


def test_calls_of_other_kinds_are_not_recorded():
    seen = []
    with recorded_by(lambda *call: seen.append(call)):
        assert function("tape", "tape_play", "pl", "l")(0, 0) == -1
    assert [call[1:] for call in seen] == [("pl", "l", (0, 0))]
    assert function("tape", "tape_play", "pl", "l")(0, 0) == -1
    assert len(seen) == 1
