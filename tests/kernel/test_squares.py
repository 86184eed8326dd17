"""The gradient norm is that of the numbers, however they are cut."""

import pytest
import torch

from shoal.kernel.squares import sum_of_squares


@pytest.mark.parametrize("size", [0, 1, 100, 2**14, 2**14 + 3, 2**22 + 5])
def test_equals_the_sum_in_float64(size):
    source = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=source) * torch.rand(size, generator=source) ** 4
    result = sum_of_squares(x)
    assert result.dtype == torch.float64
    assert float(result) == pytest.approx(float(x.double().square().sum()), rel=1e-6)


def test_does_not_depend_on_the_cut():
    x = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 1e-3
    whole = float(sum_of_squares(x))
    for parts in (2, 3, 17):
        cut = sum(float(sum_of_squares(part)) for part in x.chunk(parts))
        assert cut == pytest.approx(whole, rel=1e-6)
    assert float(sum_of_squares(x.view(2048, 2048).T)) == pytest.approx(whole, rel=1e-6)
