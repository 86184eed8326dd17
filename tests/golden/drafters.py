"""Directories of a target and of all that guesses for it, random or nearly the target itself."""

from __future__ import annotations

from pathlib import Path

import torch
from served import VOCAB, model_of

from shoal.corpora.tokenizer import train
from shoal.model import huggingface
from shoal.model.drafters import files
from shoal.model.drafters.falcon import SemiAutoregressive
from shoal.model.drafters.fusion import FusionDrafter
from shoal.model.drafters.medusa import MedusaHeads
from shoal.model.drafters.ppd import PromptTokens

LEVELS = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.2, 0.1), (0.3, 0.2, 0.1))


def write_model(place: Path, model: torch.nn.Module) -> Path:
    """A directory with a tokenizer of one token a byte; 0 ends a text."""
    huggingface.write(place, model)
    train([""], VOCAB).save(str(place / "tokenizer.json"))
    return place


def _write(place, name, target, config, net, levels, **options):
    source = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        noise = torch.randn(parameter.shape, generator=source)
        parameter.data = parameter.data + 0.02 * noise if name == "medusa" else 0.2 * noise
    drafter = files.DrafterConfig(
        name=name,
        options=options,
        target=files.fingerprint(target),
        tokenizer=files.tokenizer_hash(target),
        vocab_size=config.vocab_size,
        hidden=config.hidden,
        calibration=LEVELS[:levels],
    )
    files.write(place, drafter, net.state_dict())


def write_all(home: Path) -> Path:
    """``target``, ``deep``, and the drafters ``draft``, ``medusa``, ``ppd``, ``falcon``, ..."""
    model = model_of(dtype=torch.float32)
    config = model.config
    target = write_model(home / "target", model)
    write_model(home / "deep", model_of(dtype=torch.float32, num_layers=6))
    noisy = model_of(dtype=torch.float32)
    source = torch.Generator().manual_seed(5)
    for parameter in noisy.parameters():
        parameter.add_(0.01 * torch.randn(parameter.shape, generator=source))
    draft = write_model(home / "draft", noisy)
    heads = MedusaHeads.of(model.output_weight, 3)
    _write(home / "medusa", "medusa", target, config, heads, 3)
    for place, of in (("ppd", target), ("draft_ppd", draft)):
        tokens = PromptTokens(3, 1, config.hidden)
        _write(home / place, "ppd", of, config, tokens, 3, prompts=3, ensemble=1)
    net = SemiAutoregressive(config, 2)
    _write(home / "falcon", "falcon", target, config, net, 4, k=2, forwards=2)
    _write(home / "dovetail", "dovetail", target, config, FusionDrafter(config, 2), 2, layers=2)
    return home
