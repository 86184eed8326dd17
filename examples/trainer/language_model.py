"""A byte-level language model on this file's library, split over ranks by its trace alone.

`torchrun --nproc-per-node 2 language_model.py` splits the model by tensor parallelism.
"""

import inspect
import os
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shoal

text = inspect.getsource(random).encode()
length = 64
examples = [text[i : i + length + 1] for i in range(0, len(text) - length, length)]


def collate(examples):
    tokens = torch.tensor([list(example) for example in examples])
    return tokens[:, :-1], tokens[:, 1:]


def loss(model, batch, train):
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = shoal.Trainer(
        LlamaForCausalLM(config), collate, loss, parallel={"tp": world}, lr=3e-3, batch=16
    )
    for row in trainer.fit(examples, steps=60, epochs=2):
        print(row)
    trainer.save("language_model.safetensors")
