"""Models of transformers by their configuration: tiny with random weights, or of any size on meta.

Source: Wolf et al., Transformers: State-of-the-Art Natural Language Processing, 2020.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import MissingExtraError, ModelError, require

_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
_GROUPED = {**_SMALL, "intermediate_size": 128, "num_key_value_heads": 2}
_GPT = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 32}
_STILL = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT, **_STILL},
    "gptj": {**_GPT, **_STILL, "rotary_dim": 8},
    "opt": {
        **_SMALL,
        "ffn_dim": 256,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 32,
        "dropout": 0.0,
    },
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "mistral": {**_GROUPED, "head_dim": 16},
    "t5": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 256,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "vocab_size": 512,
        "dropout_rate": 0.0,
    },
    "bert": {
        **_SMALL,
        "intermediate_size": 256,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
"""Family -> what makes its configuration tiny."""


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as cause:
        raise MissingExtraError("transformers", "bench", "a model by its configuration") from cause


def read_config(path: Path) -> dict[str, Any]:
    """A model's ``config.json``, or a directory that has one.

    Raises:
        ModelError: no such file, or it names no model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as cause:
        raise ModelError(f"{file}: no configuration can be read ({cause})") from cause
    require(
        isinstance(raw, dict) and isinstance(raw.get("model_type"), str),
        f"{file}",
        raw.get("model_type") if isinstance(raw, dict) else type(raw).__name__,
        expected="a mapping with the key model_type",
        error=ModelError,
    )
    config: dict[str, Any] = raw
    return config


def from_config(options: dict[str, Any], *, device: str = "meta", seed: int = 0) -> nn.Module:
    """A model of transformers with random weights; its caches are off.

    Args:
        options: of its configuration, with ``model_type``.
        device: with meta no weights are allocated.
        seed: of the weights.

    Raises:
        ModelError: transformers does not know the family, or refuses the configuration.
        MissingExtraError: transformers is not installed.
    """
    library = _transformers()
    given = dict(options)
    family = str(given.pop("model_type"))
    try:
        config = library.AutoConfig.for_model(family, **given)
    except (ValueError, TypeError, KeyError) as cause:
        raise ModelError(f"model_type = {family!r}: {str(cause).splitlines()[0]}") from cause
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False):
        loader = library.AutoModelForSeq2SeqLM
    elif any(str(name).endswith("ForCausalLM") for name in given.get("architectures", ())):
        loader = library.AutoModelForCausalLM
    else:
        masked = type(config) in library.AutoModelForMaskedLM._model_mapping
        causal = type(config) in library.AutoModelForCausalLM._model_mapping
        encoder = masked and not getattr(config, "is_decoder", False) and family == "bert"
        require(
            masked or causal,
            "model_type",
            family,
            expected="a family with a language-model head",
            error=ModelError,
        )
        loader = (
            library.AutoModelForMaskedLM
            if encoder or not causal
            else (library.AutoModelForCausalLM)
        )
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model: nn.Module = loader.from_config(config)
    return model


def example(model: Any, *, batch: int = 2, length: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """Token ids as a language model takes them."""
    device = next(model.parameters()).device
    vocab = int(model.config.vocab_size)

    def ids(columns: int, salt: int) -> Tensor:
        if device.type == "meta":
            return torch.empty(batch, columns, dtype=torch.long, device="meta")
        generator = torch.Generator().manual_seed(seed + salt)
        return torch.randint(3, vocab, (batch, columns), generator=generator)

    out = {"input_ids": ids(length, 0)}
    if getattr(model.config, "is_encoder_decoder", False):
        out["decoder_input_ids"] = ids(max(2, length - 2), 1)
    return out
