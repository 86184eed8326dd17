"""Recurrent blocks: chunks, state, gradients, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from shoal.claims.lab.rnn.blocks import RecurrentBlock, RecurrentModel
from shoal.core.errors import KernelError, ModelError

FUNCTIONS = ("lstm", "gru", "elman", "slstm")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tokens_one_by_one_are_the_whole_sequence(function: str) -> None:
    torch.manual_seed(0)
    model = RecurrentModel(11, 24, 2, 3, function, feed_forward=32)
    tokens = torch.randint(0, 11, (2, 9))
    with torch.no_grad():
        whole, last = model(tokens)
        states, pieces = None, []
        for piece in tokens.split([1, 1, 5, 2], 1):
            logits, states = model(piece, states)
            pieces.append(logits)
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(states or [], last, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_kernels_give_the_block_the_same_gradients(function: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 20)
    results = []
    for backend, recompute in (("reference", False), ("fused", False), ("alternating", True)):
        torch.manual_seed(1)
        block = RecurrentBlock(20, 2, function, backend=backend, recompute=recompute, clip=0.5)
        out, _ = block(x)
        out.square().sum().backward()
        results.append([one.grad for one in block.parameters()])
    for others in results[1:]:
        for a, b in zip(results[0], others, strict=True):
            assert a is not None
            assert b is not None
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def test_state_has_one_size() -> None:
    block = RecurrentBlock(24, 3, "slstm")
    assert block.state_bytes(1) == block.state_bytes(10**6) == 4 * 24 * 4
    _, state = block(torch.zeros(1, 5, 24))
    assert state.numel() * 4 == block.state_bytes()


def test_wrong_heads_and_states_are_refused() -> None:
    with pytest.raises(ModelError, match=r"rnn.heads = 5: expected a divisor of hidden = 24"):
        RecurrentBlock(24, 5)
    with pytest.raises(KernelError, match=r"rnn.function = 'slst'.*did you mean 'slstm'"):
        RecurrentBlock(24, 2, "slst")
    model = RecurrentModel(5, 8)
    with pytest.raises(ModelError, match=r"rnn.states = 0: expected 1, one a block"):
        model(torch.zeros(1, 2, dtype=torch.int64), [])


@pytest.mark.slow
def test_parity_beyond_the_length_of_training() -> None:
    from shoal.claims.bench.rnn import learn_parity

    result = learn_parity("lstm", steps=250, seed=0, hidden=32, longest=12, length=48, tested=64)
    assert sum(result.right) / len(result.right) > 0.9
