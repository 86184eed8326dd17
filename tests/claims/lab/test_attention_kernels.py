"""Every attention kernel computes what its mask says, forward and backward, or says why not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.claims.lab.attention_kernels.blocks import block_table
from shoal.claims.lab.attention_kernels.protocols import AttentionKernelPart
from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.ir.mask import Mask

LENGTH = 96
MASKS = {
    "full": Mask.full(LENGTH),
    "causal": Mask.causal(LENGTH),
    "rectangle": Mask.full(LENGTH, 32),
    "documents": Mask.document(np.repeat([0, 1, -1, 2], [30, 1, 25, 40])),
    "sliding": Mask.sliding(LENGTH, 20),
    "prefix": Mask.prefix(LENGTH, 17),
    "sparse": Mask.random_blocks(LENGTH, 8, 0.05, 0),
}
KERNELS = [name for name in table("attention_kernel") if name != "flex"]


def _kernel(name: str) -> AttentionKernelPart:
    options = {"tiled": {"block": 32}, "chunked": {"chunk": 40}}.get(name, {})
    part: AttentionKernelPart = table("attention_kernel").build({"name": name, **options})
    return part


def _oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Row by row, by the definition."""
    cells = torch.from_numpy(mask.dense())
    heads = [torch.zeros(q.shape[2], q.shape[3], dtype=q.dtype) for _ in range(q.shape[1])]
    rows = []
    for head, _ in enumerate(heads):
        group = head * k.shape[1] // q.shape[1]
        for row in range(q.shape[2]):
            keys = cells[row].nonzero().flatten()
            score = (k[0, group, keys] @ q[0, head, row]) / math.sqrt(q.shape[3])
            rows.append(torch.softmax(score, 0) @ v[0, group, keys])
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_definition(name: str, mask: str) -> None:
    kernel, seen = _kernel(name), MASKS[mask]
    if kernel.refuses(seen, dtype="fp64") is not None:
        with pytest.raises(ConfigError, match=f"attention_kernel.{name}.*documents"):
            kernel.prepare(seen, dtype="fp64")
        return
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, LENGTH), (1, seen.num_keys), (1, seen.num_keys)]
    q, k, v = (
        torch.randn(1, heads, rows, 4, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads, rows in shapes
    )
    grad = torch.randn(q.shape, dtype=torch.float64, generator=generator)
    wanted = _oracle(q, k, v, seen)
    wanted_grads = torch.autograd.grad(wanted, (q, k, v), grad)
    out = kernel.prepare(seen, dtype="fp64")(q, k, v)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    for result, expected in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", KERNELS)
def test_computes_at_least_what_is_seen(name: str, mask: str) -> None:
    kernel, seen = _kernel(name), MASKS[mask]
    if kernel.refuses(seen) is None:
        assert seen.area() <= kernel.cells(seen) <= seen.num_queries * seen.num_keys


@pytest.mark.parametrize("mask", MASKS)
def test_blocks_are_those_of_the_mask(mask: str) -> None:
    seen, block = MASKS[mask], 40
    result = block_table(seen, block)
    for i, row in enumerate(result):
        for j, cell in enumerate(row):
            queries = np.arange(i * block, min((i + 1) * block, seen.num_queries))
            keys = np.arange(j * block, min((j + 1) * block, seen.num_keys))
            assert ("nothing", "mixed", "everything")[cell] == seen.kind(queries, keys)


def test_flex_says_what_it_cannot_do() -> None:
    flex = table("attention_kernel").build("flex")
    assert "no gradient" in str(flex.refuses(Mask.full(128)))
    assert "multiples of its block of 128" in str(flex.refuses(Mask.full(100), backward=False))
    assert "computes in fp32" in str(flex.refuses(Mask.full(128), dtype="fp64", backward=False))
    assert flex.cells(Mask.causal(256)) == 3 * 128**2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flex_equals_naive() -> None:
    mask = Mask.document(np.repeat([0, 1, -1, 2], [100, 28, 64, 64]))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 256, 16, generator=generator) for heads in (2, 1, 1))
    result, wanted = (_kernel(name).prepare(mask)(q, k, v) for name in ("flex", "naive"))
    torch.testing.assert_close(result, wanted)


def test_refuses_what_does_not_exist() -> None:
    naive = table("attention_kernel").build("naive")
    with pytest.raises(ConfigError, match="expected one of fp64, fp32"):
        naive.prepare(Mask.full(8), dtype="int8")
    flash = table("attention_kernel").build("flash_cpu")
    with pytest.raises(ConfigError, match="runs on cpu only; choose another kernel"):
        flash.prepare(Mask.full(8), device="cuda")
    for choice in ({"name": "tiled", "block": 0}, {"name": "flex", "block": 100}):
        with pytest.raises(ConfigError, match=r"attention_kernel\.\w+\.block"):
            table("attention_kernel").build(choice)
    with pytest.raises(ConfigError, match=r"attention_kernel\.chunked\.chunk"):
        table("attention_kernel").build({"name": "chunked", "chunk": 0})
