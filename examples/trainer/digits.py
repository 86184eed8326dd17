"""Handwritten digits. `python digits.py`, or `torchrun --nproc-per-node 2 digits.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import shoal

pixels, labels = load_digits(return_X_y=True)
examples = [(torch.tensor(x, dtype=torch.float32) / 16, int(y)) for x, y in zip(pixels, labels)]
train, test = examples[:1500], examples[1500:]


def collate(examples):
    images, digits = zip(*examples)
    return torch.stack(images), torch.tensor(digits)


def loss(model, batch, train):
    images, digits = batch
    return nn.functional.cross_entropy(model(images), digits)


def pred(model, batch):
    return model(batch[0]).argmax(-1)


def metrics(predictions, examples):
    truth = torch.tensor([digit for _, digit in examples])
    return {"accuracy": (predictions == truth).float().mean().item()}


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    trainer = shoal.Trainer(model, collate, loss, pred, metrics=metrics, lr=3e-3, batch=64)
    for row in trainer.fit(train, epochs=8, evaluate=test):
        print(row)
