"""One rank of test_sharding.py: trains a small stack and writes what it has in the end."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from shoal.core.meter import Meter
from shoal.core.parts import table
from shoal.parallel.comm.collectives import TorchComm
from shoal.parallel.protocols import Comm


class Stack(nn.Module):
    """Blocks with matrices, vectors, a tied embedding and a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.unused = nn.Parameter(torch.zeros(5))

    def loss_sum(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = x @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def train(
    shard: str | dict[str, object],
    optimizer: str,
    comm: Comm,
    steps: int = 3,
    overlap: bool = True,
) -> dict[str, torch.Tensor]:
    model = Stack().double()
    source = torch.Generator().manual_seed(0)  # its own: ranks may be threads
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "unused":
                parameter.normal_(0.0, 0.4, generator=source)
    rule = table("optimizer").build({"name": optimizer, "lr": 0.05})
    part = table("shard").build(shard)
    sharded = part.apply(model, comm, whole_matrices=rule.whole_matrices)
    sharded.overlap = overlap
    updater = rule.build(sharded.owned())
    generator = torch.Generator().manual_seed(1)
    rows = 4 // comm.world
    norms = []
    for _ in range(steps):
        data = torch.randint(0, 11, (4, 9), generator=generator)
        mine = data[comm.rank * rows : (comm.rank + 1) * rows]
        for index in range(rows):  # one row a micro-batch
            row = mine[index : index + 1]
            with sharded.accumulate(last=index == rows - 1):
                (model.loss_sum(row[:, :-1], row[:, 1:]) / 32).backward()
        sharded.finish()
        norm = sharded.squared_norm(lambda _: True).sqrt()
        sharded.scale_gradients((0.5 / norm).clamp(max=1.0))
        norms.append(float(norm))
        updater.step(1.0)
        sharded.publish()
    result = {"norms": torch.tensor(norms, dtype=torch.float64)}
    for name, (tensor, offset, shape) in sharded.held().items():
        result[name] = tensor.clone()
        result[f"{name}@"] = torch.tensor([*offset, *shape])
        result[f"{name}!"] = torch.tensor(int(sharded.writes(name)))
    return result


def main() -> None:
    torch.set_num_threads(1)
    out, shards = Path(sys.argv[1]), sys.argv[2].split(",")
    totals = {}
    comm = None
    for choice in shards:
        shard, _, optimizer = choice.partition("+")
        with Meter([]) as meter:
            comm = TorchComm.from_environment(meter, rendezvous=sys.argv[3])
            result = train(shard, optimizer, comm)
            totals[choice] = meter.totals()
            save_file(result, out / f"{choice}-{comm.rank}.safetensors")
    assert comm is not None
    (out / f"totals-{comm.rank}.json").write_text(json.dumps(totals))
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main()
