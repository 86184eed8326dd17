"""What the ranks of test_torch_pipeline.py do: the same stages in our runtime and in torch's."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from shoal.claims.lab.same_as_one import SeededWeights, tokens
from shoal.ir import TrainJob
from shoal.model.config import ModelConfig
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.protocols import MicroBatch


class Wrapped(nn.Module):
    """A stage as torch wants it: tensors of one micro-batch in, one tensor out."""

    def __init__(self, stage: Any, first: bool) -> None:
        super().__init__()
        self.stage = stage
        self.first = first

    def forward(self, x: Tensor, *, ids: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        batch = MicroBatch(ids, targets, positions, None, 0, 0)
        return self.stage(None if self.first else x, batch, recompute=False)


def gradients(comm: Any, *, job: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Largest gradient, and largest difference between the two runtimes, by parameter."""
    named, model = TrainJob.model_validate(job), ModelConfig.model_validate(config)
    schedule = check_split(named, model.shape())
    weights = SeededWeights(model, named.seed, torch.float64)
    ours, theirs = (
        ParallelEngine(named, schedule, weights, comm, dtype=torch.float64) for _ in range(2)
    )
    rows = tokens(named, model.vocab_size, 0, documents=False)
    count = int((rows.targets != -100).sum())
    ours.backward(rows, 1, count)
    ours.finish()

    real = {"dtype": torch.float64, "requires_grad": True}
    hidden = torch.zeros(named.seq_len, model.hidden, **real)
    stages = []
    for number, stage in sorted(theirs.runtime.stages.items()):
        first, last = number == 0, number == schedule.stages - 1
        stages.append(
            PipelineStage(
                Wrapped(stage, first),
                number,
                schedule.stages,
                torch.device("cpu"),
                input_args=rows.inputs[:1] if first else hidden,
                output_args=torch.zeros((), **real) if last else hidden,
            )
        )
    pipeline = ScheduleInterleaved1F1B(
        stages,
        named.global_batch,
        loss_fn=lambda out, _target: out / count,
        scale_grads=False,
    )
    inputs = (rows.inputs,) if comm.rank == 0 else ()
    pipeline.step(
        *inputs, target=rows.targets, return_outputs=False, ids=rows.inputs, targets=rows.targets
    )
    other = dict(theirs.local.named_parameters())
    return {
        name: [float(p.grad.abs().max()), float((p.grad - other[name].grad).abs().max())]
        for name, p in ours.local.named_parameters()
    }
