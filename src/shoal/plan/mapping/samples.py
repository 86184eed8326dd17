"""Programs to map that need no model: blocked products by Strassen's scheme, and random ones."""

from __future__ import annotations

from shoal.core.errors import PlanError, require
from shoal.core.random import generator
from shoal.plan.mapping.program import Buffer, BufferAccess, MappingProgram, ProgramInstruction

# Strassen, Gaussian Elimination is not Optimal, 1969: the seven products as sums of quarters of A
# and of B, and the quarters of C as sums of products.
_LEFT = ("03", "23", "0", "3", "01", "20-", "13-")
_RIGHT = ("03", "0", "13-", "20-", "3", "01", "23")
_RESULT = ((0, 3, -4, 6), (2, 4), (1, 3), (0, -1, 2, 5))


class _Writer:
    """Grows a program, an instruction at a time."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.steps: list[ProgramInstruction] = []

    def buffer(self, name: str, nbytes: int, *, output: bool = False) -> str:
        self.buffers.append(Buffer(name=name, nbytes=nbytes, output=output))
        return name

    def step(self, out: str, reads: list[str], nbytes: int, seconds: float) -> str:
        self.buffer(out, nbytes)
        self.steps.append(
            ProgramInstruction(
                name=f"make_{out}",
                compute_s=seconds,
                reads=tuple(BufferAccess(buffer=name) for name in reads),
                writes=(BufferAccess(buffer=out),),
            )
        )
        return out


def strassen(
    *, block: int = 128, matmul_flops: float = 1e12, vector_flops: float = 1e11
) -> MappingProgram:
    """The product of two 4x4 matrices of blocks by two levels of Strassen's scheme, 49 products.

    Args:
        block: rows of a square block of fp32.
        matmul_flops: FLOP/s of products.
        vector_flops: elements/s of sums.
    """
    require(1 <= block <= 1 << 14, "block", block, expected="1 to 16384 rows", error=PlanError)
    out, nbytes = _Writer(), 4 * block * block
    sums, product = block * block / vector_flops, 2 * block**3 / matmul_flops
    a = [[out.buffer(f"a{i}{j}", nbytes) for j in range(4)] for i in range(4)]
    b = [[out.buffer(f"b{i}{j}", nbytes) for j in range(4)] for i in range(4)]
    count = 0

    def combine(names: list[str]) -> str:
        """Sum of blocks, two at a time; signs are no matter to memory."""
        nonlocal count
        at = names[0]
        for name in names[1:]:
            count += 1
            at = out.step(f"s{count}", [at, name], nbytes, sums)
        return at

    def quarter(of: list[list[str]], which: int) -> list[list[str]]:
        half = len(of) // 2
        row, col = divmod(which, 2)
        return [line[col * half :][:half] for line in of[row * half :][:half]]

    def add(quarters: list[list[list[str]]]) -> list[list[str]]:
        size = len(quarters[0])
        return [[combine([q[i][j] for q in quarters]) for j in range(size)] for i in range(size)]

    def multiply(left: list[list[str]], right: list[list[str]]) -> list[list[str]]:
        nonlocal count
        if len(left) == 1:
            count += 1
            return [[out.step(f"m{count}", [left[0][0], right[0][0]], nbytes, product)]]
        products = [
            multiply(
                add([quarter(left, int(i)) for i in one.strip("-")]),
                add([quarter(right, int(i)) for i in two.strip("-")]),
            )
            for one, two in zip(_LEFT, _RIGHT, strict=True)
        ]
        cells = [add([products[abs(i)] for i in terms]) for terms in _RESULT]
        return [
            [cell for part in cells[2 * row : 2 * row + 2] for cell in part[line]]
            for row in range(2)
            for line in range(len(cells[0]))
        ]

    results = {name for row in multiply(a, b) for name in row}
    buffers = [
        one.model_copy(update={"output": True}) if one.name in results else one
        for one in out.buffers
    ]
    return MappingProgram(name="strassen", buffers=tuple(buffers), instructions=tuple(out.steps))


def random_program(
    steps: int = 60, *, seed: int = 0, most_bytes: int = 1 << 20, seconds: float = 2e-5
) -> MappingProgram:
    """Instructions that read some of what is there, near and far, and write one buffer each.

    Args:
        steps: how many.
        seed: of everything.
        most_bytes: of a buffer.
        seconds: most that an instruction computes.
    """
    require(1 <= steps <= 10_000, "steps", steps, expected="1 to 10000", error=PlanError)
    random = generator(seed, purpose="mapping.program")
    out = _Writer()

    def nbytes() -> int:
        return int(most_bytes ** random.uniform(0.7, 1.0))

    names = [out.buffer(f"w{i}", nbytes()) for i in range(2 + steps // 6)]
    for i in range(steps):
        near, far = names[-4:], names
        count = int(random.integers(1, 4))
        reads = {str(random.choice(near if random.random() < 0.6 else far)) for _ in range(count)}
        names.append(
            out.step(f"x{i}", sorted(reads), nbytes(), float(seconds * random.random() ** 2))
        )
    used = {access.buffer for step in out.steps for access in step.reads}
    buffers = [
        one.model_copy(update={"output": one.name not in used and one.name.startswith("x")})
        for one in out.buffers
    ]
    return MappingProgram(
        name=f"random{seed}", buffers=tuple(buffers), instructions=tuple(out.steps)
    )
