"""From a model directory to one with weights of few bits, and what that cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.config import Value
from shoal.core.errors import KernelError, ModelError, require
from shoal.core.parts import Choice
from shoal.corpora.tokens import TokenSplit, prepare
from shoal.kernel.formats import weight_format
from shoal.model import QUANTIZERS, huggingface
from shoal.model.quantize.blocks import quantize
from shoal.model.transformer import Transformer
from shoal.train.qat import finetune
from shoal.train.quality import Quality, compare, decode_times

_MAX_LENGTH = 512
# Tokens decoded in one round of timing.
_STEPS = 8


class QuantizationResult(Value):
    """What quantizing a directory gave.

    Args:
        method: how codes were chosen.
        matrix_bits: stored bits of a weight of the matrices that are packed.
        bytes_before: of all weights as they were read.
        bytes_after: of all weights as they were written.
        quality: on held-out text; None if not requested.
        decode_s: seconds of a token of one sequence, as it was and as it is now.
        speedup: median of their interleaved paired ratios, with its 90 % interval.
    """

    format: str
    method: str
    matrix_bits: float
    bytes_before: int
    bytes_after: int
    quality: Quality | None = None
    decode_s: tuple[float, float] | None = None
    speedup: tuple[float, float, float] | None = None


def calibration(text: TokenSplit, *, samples: int, length: int, vocab_size: int) -> Tensor:
    """Calibration text int64 [samples, length]: windows spread evenly, always the same.

    Raises:
        ModelError: the text is shorter than one window.
    """
    room = len(text) - length
    if room < 0:
        raise ModelError(
            f"calibration text: {len(text)} tokens: expected at least {length}, those of one "
            "sample; give more text"
        )
    rows = np.empty((samples, length), dtype=np.int64)
    for index, row in enumerate(rows):
        text.read(room * index // max(1, samples - 1) if samples > 1 else 0, row)
    tokens = torch.from_numpy(rows)
    if int(tokens.max()) >= vocab_size:
        raise ModelError(
            f"calibration text: has the token {int(tokens.max())} and the model knows "
            f"{vocab_size}; give the tokenizer that belongs to the model"
        )
    return tokens


def _bytes(model: Transformer) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def quantize_directory(
    directory: Path,
    out: Path,
    format_text: str,
    *,
    method: Choice | str | Mapping[str, Any] = "gptq",
    data: Choice | str | Mapping[str, Any] = "stdlib",
    samples: int = 64,
    length: int = 256,
    eval_tokens: int = 16384,
    time_it: bool = True,
    finetune_s: float = 0.0,
    progress: Callable[[float, float, str], None] | None = None,
) -> QuantizationResult:
    """Quantize the matrices of a model's blocks, write the model, read it back and compare.

    Args:
        directory: a model directory, or a GGUF file, with its tokenizer.json beside.
        out: directory to make.
        format_text: weight format.
        method: part of kind ``quantizer``.
        data: corpus for calibration (its training split) and comparison (what it holds out).
        samples: sequences of calibration text.
        length: tokens of each.
        eval_tokens: about how many held-out tokens; 0 for no comparison.
        time_it: decode with both and compare.
        finetune_s: seconds of training in which the matrices compute as if rounded, before codes
            are chosen; 0 for none.
        progress: called with what is done, all, and what it is.

    Raises:
        ModelError: the directory cannot be read, ``out`` exists, or there is no tokenizer.
        KernelError: the format does not exist, or refuses a matrix.
    """
    say = progress or (lambda _done, _all, _text: None)
    fmt = weight_format(format_text)
    quantizer = QUANTIZERS.build(method, where="quantizer")
    spelled = str(QUANTIZERS.spell(quantizer))
    require(samples >= 1, "samples", samples, expected="1 or more")
    require(length >= 2, "length", length, expected="2 or more")
    if out.exists():
        raise ModelError(f"{out}: exists already; choose another name or remove it first")
    home = directory.parent if huggingface.is_gguf(directory) else directory
    tokenizer = home / "tokenizer.json"
    require(finetune_s >= 0, "finetune", finetune_s, expected="0 or more seconds")
    reads = quantizer.calibrated or eval_tokens > 0 or finetune_s > 0
    if reads and not tokenizer.is_file():
        raise ModelError(
            f"{tokenizer}: not found; copy the model's tokenizer there, or take method rtn and "
            "compare on 0 tokens"
        )
    original = huggingface.read(directory, packed=False).eval()
    config = original.config
    for name, parameter in original.named_parameters():
        # Before minutes of work, not after.
        if parameter.dim() >= 2 and name.startswith("blocks.") and "router" not in name:
            try:
                fmt.group_of(parameter.shape[-1])
            except KernelError as cause:
                raise KernelError(f"{name}: {cause}") from None
    tokens = None
    text = None
    if reads:
        text = prepare(data, str(tokenizer), config.vocab_size, progress=say)
    if quantizer.calibrated and text is not None:
        longest = min(length, config.max_position, _MAX_LENGTH)
        tokens = calibration(
            text.train, samples=samples, length=longest, vocab_size=config.vocab_size
        )
    require(
        not (finetune_s and config.num_experts),
        "finetune",
        finetune_s,
        expected=f"0 for a model with experts, such as {config.name}",
        hint="rounding in training knows dense layers alone; leave it out",
        error=ModelError,
    )
    before = _bytes(original)
    changed = huggingface.read(directory, packed=False).eval()
    if finetune_s and text is not None:
        dtype = changed.embed.weight.dtype
        trained_with = min(length, config.max_position - 1)
        finetune(
            changed.float(), format_text, "", text.train, seconds=finetune_s, seq_len=trained_with,
            progress=lambda what, share: say(share, 1, what),
        )  # fmt: skip
        changed = changed.to(dtype).eval()
    made = quantize(
        changed, fmt, quantizer, tokens, done=lambda done, total: say(done, total, "blocks")
    )
    state = {name: p.detach() for name, p in made.model.named_parameters()}
    stored = sum(packed.nbytes for packed in made.packed.values())
    plain = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in state.items()
        if name not in made.packed
    )
    weights = sum(packed.shape[0] * packed.shape[1] for packed in made.packed.values())
    huggingface.write_state(
        out,
        config,
        state,
        home if tokenizer.is_file() else None,
        packed=made.packed,
        method=spelled,
    )
    outcome = QuantizationResult(
        format=str(fmt),
        method=spelled,
        matrix_bits=8 * stored / weights,
        bytes_before=before,
        bytes_after=stored + plain,
    )
    again = huggingface.read(out).eval()
    if text is not None and eval_tokens:
        say(0, 0, "comparing on held-out text")
        quality = compare(again, original, text.heldout, max_tokens=eval_tokens)
        outcome = outcome.model_copy(update={"quality": quality})
    if time_it:
        say(0, 0, "timing")
        paired = decode_times({"before": original, "after": again}, steps=_STEPS)
        ratio = paired.ratio("before", "after")
        outcome = outcome.model_copy(
            update={
                "decode_s": tuple(
                    paired.median(name).value / _STEPS for name in ("before", "after")
                ),
                "speedup": (ratio.value, ratio.low, ratio.high),
            }
        )
    return outcome
