"""A fine-tuning job that makes some steps, tells its losses, and stays until its input ends.

``python shared_base_job.py DIRECTORY BASE SEED``
"""

import json
import sys

import torch

from shoal.ir import TrainJob
from shoal.train.build import weights_of
from shoal.train.peft.job import FineTuned


def main() -> None:
    directory, base, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    job = TrainJob.model_validate(
        {"model": directory, "base": base, "seed": seed, "finetune": {"name": "lora", "r": 4}}
    )
    tuned = FineTuned(weights_of(job), job)
    model = tuned.model()
    optimizer = torch.optim.AdamW(list(tuned.handle.trainable().values()), lr=1e-2)
    rows = torch.randint(0, model.config.vocab_size, (2, 17))
    rows = rows.random_(generator=torch.Generator().manual_seed(seed)).remainder_(
        model.config.vocab_size
    )
    losses = []
    for _ in range(3):
        loss = model.loss_sum(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps(losses), flush=True)
    sys.stdin.read()


main()
