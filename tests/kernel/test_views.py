"""Attention over blocks with positions of their own: one softmax over all of them, exactly."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import KernelError  # noqa: E402
from shoal.core.random import generator  # noqa: E402
from shoal.kernel.paged.partial import attend_part  # noqa: E402
from shoal.kernel.paged.views import merged, turned, view_attention  # noqa: E402

SLOTS, LONGEST, BLOCKS, PLACES = 700, 300, 9, 400


class Case:
    """Blocks of many lengths, and rows that see some of them in an order of their own."""

    def __init__(self, heads, kv_heads, d, dtype, rows=37, seed=0):
        self.source = generator(seed, purpose="test views")
        self.dtype = dtype
        self.q, self.keys, self.values = (
            torch.from_numpy(self.source.normal(size=(n, h, d))).to(dtype)
            for n, h in ((rows, heads), (SLOTS, kv_heads), (SLOTS, kv_heads))
        )
        slots = self.source.integers(0, SLOTS, (BLOCKS, LONGEST))
        self.slots = torch.from_numpy(slots).int()
        angle = torch.arange(PLACES)[:, None] * 0.3 ** torch.arange(d // 2)
        self.tables = angle.cos(), angle.sin()
        # Four workers of one prompt, tokens of a prompt of which each sees one more, and whatever.
        pairs, parts = [], []
        for row in range(rows):
            if row < 4:
                seen = [(0, 260), (1, 3), (2 + row, 1 + row), (6, 70)]
            elif row < 20:
                seen = [(7, row)]
            else:
                blocks = self.source.permutation(BLOCKS)[: self.source.integers(1, BLOCKS)]
                seen = [(int(b), int(self.source.integers(1, LONGEST))) for b in blocks]
            parts.append(list(range(len(pairs), len(pairs) + len(seen))))
            pairs += [(row, b, n, int(self.source.integers(0, PLACES)) // 2 * 2) for b, n in seen]
        most = max(map(len, parts))
        self.parts = torch.tensor([one + [-1] * (most - len(one)) for one in parts])
        self.pairs = torch.tensor(pairs).t().contiguous()
        self.run = view_attention(heads, kv_heads, d, self.q, self.tables)

    def answer(self):
        if self.run is None:
            pytest.skip("no kernel for this type on this machine")
        return self.run(self.q, self.keys, self.values, self.slots, self.pairs, self.parts)

    def expected(self):
        """Block by block, in fp64; queries are rounded after they are turned, as they are kept."""
        wide = torch.float64 if self.dtype == torch.float32 else self.dtype
        tables = self.tables
        if wide != self.dtype:
            tables = tables[0].double(), tables[1].double()
        q = turned(self.q.to(wide), self.pairs[0], self.pairs[3], tables)
        records = []
        for place, (_, block, seen, _) in enumerate(self.pairs.t().tolist()):
            slots = self.slots[block, :seen].long()
            records.append(
                attend_part(
                    q[place : place + 1].double(),
                    self.keys[slots].double(),
                    self.values[slots].double(),
                )
            )
        return merged(torch.cat(records), self.parts, torch.float64)


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(8, 8, 64), (4, 2, 16), (8, 1, 40)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_one_softmax_over_all_blocks(heads, kv_heads, d, dtype, error):
    case = Case(heads, kv_heads, d, dtype)
    got = case.answer()
    torch.testing.assert_close(got.double(), case.expected(), rtol=0, atol=error)
    case.keys.index_fill_(0, case.slots[1, :3].long(), 9.0)  # of a block of three tokens
    assert not torch.equal(case.answer()[:4], got[:4])


def test_rows_do_not_depend_on_others():
    case = Case(4, 2, 32, torch.float32)
    whole = case.answer()
    for row in (0, 3, 12, 25, 36):
        mine = case.parts[row][case.parts[row] >= 0]
        pairs = case.pairs[:, mine].contiguous()
        parts = torch.arange(len(mine))[None]
        alone = case.run(case.q[row : row + 1], case.keys, case.values, case.slots, pairs, parts)
        torch.testing.assert_close(alone[0], whole[row], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda case: case.pairs[1].fill_(BLOCKS), r"block\[0\] = 9: expected 0 to 8"),
        (lambda case: case.pairs[2, 3:4].fill_(0), r"seen\[3\] = 0: expected 1 to 300"),
        (lambda case: case.pairs[3, 2:3].fill_(-1), r"places\[2\] = -1: expected 0 to 399"),
        (lambda case: case.parts[5].fill_(-1), r"parts\[5\]: expected pairs"),
        (lambda case: case.parts[5].fill_(9999), r"parts\[5\]: expected pairs"),
        (lambda case: case.slots[0, 7:8].fill_(SLOTS), r"slots\[0, 7\] = 700: expected 0 to 699"),
    ],
)
def test_pairs_that_there_cannot_be(change, told):
    case = Case(2, 2, 16, torch.float32)
    case.answer()
    change(case)
    with pytest.raises(KernelError, match=told):
        case.answer()


def test_types_without_a_kernel():
    case = Case(2, 2, 16, torch.float64, rows=5)
    assert case.run is None
