"""Rotary position embedding and its scalings.

Shapes: B batch, T positions, N heads, C = head_dim / 2 pairs.

Source: Su et al., RoFormer, 2021. Scalings: Chen et al., Position Interpolation,
2023 (linear); NTK-aware interpolation, 2023 (dynamic); Peng et al., YaRN, 2023;
Dubey et al., The Llama 3 Herd of Models, 2024 (llama3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.kernel.fused.torch_training import rotate, rotate_split
from shoal.model.config import ModelConfig, RopeScaling

__all__ = ["frequencies", "rotate", "rotate_split", "tables", "tables_at"]


def frequencies(config: ModelConfig, length: int) -> tuple[Tensor, float]:
    """Angle per position of every pair of dimensions.

    Args:
        config: the model.
        length: tokens in the context so far, which dynamic scaling looks at.

    Returns:
        Frequencies [C] in fp32 on the CPU, and the factor on cosine and sine.
    """
    dim, base, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        longest = max(length, config.max_position)
        stretch = scaling.factor * longest / config.max_position - (scaling.factor - 1)
        base = base * stretch ** (dim / (dim - 2))
    wave = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    freq_C = 1.0 / wave
    if scaling is None or scaling.rope_type == "dynamic":
        return freq_C, 1.0
    if scaling.rope_type == "linear":
        return freq_C / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(freq_C, scaling), 1.0
    return _yarn(freq_C, wave, config, scaling)


def _llama3(freq_C: Tensor, scaling: RopeScaling) -> Tensor:
    original = scaling.original_max_position_embeddings or 0
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    length_C = 2 * math.pi / freq_C
    blend = (original / length_C - low) / (high - low)
    mixed = (1 - blend) * freq_C / scaling.factor + blend * freq_C
    slow = torch.where(length_C > original / low, freq_C / scaling.factor, freq_C)
    middle = (length_C >= original / high) & (length_C <= original / low)
    return torch.where(middle, mixed, slow)


def _yarn(
    freq_C: Tensor, wave_C: Tensor, config: ModelConfig, scaling: RopeScaling
) -> tuple[Tensor, float]:
    dim, base, factor = config.head_dim, config.rope_theta, scaling.factor
    original = scaling.original_max_position_embeddings or config.max_position

    def border(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = border(scaling.beta_fast), border(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(
        0, 1
    )
    mixed = 1.0 / (factor * wave_C) * ramp + freq_C * (1 - ramp)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = scaling.attention_factor
    if scale is None:
        if scaling.mscale and scaling.mscale_all_dim:
            scale = mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
        else:
            scale = mscale(1.0)
    return mixed, scale


def tables(
    config: ModelConfig, start: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, 1, C] of positions ``start .. start + length``.

    They are recomputed in every pass, in fp32 or better: this takes microseconds, needs no buffers
    to save or move between devices, and is correct under every dtype.
    """
    position_T = torch.arange(start, start + length, dtype=torch.float32, device=device)
    return tables_at(position_T, *frequencies(config, start + length), dtype)


def tables_at(
    position_T: Tensor, freq_C: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, 1, C] of any positions, by what :func:`frequencies` gave.

    Angles are in fp32, and in fp64 for fp64: there a rotation by two angles, one after the
    other, is that by their sum.
    """
    wide = torch.promote_types(torch.promote_types(dtype, torch.float32), position_T.dtype)
    angle_TC = torch.outer(position_T.to(wide), freq_C.to(position_T.device, wide))
    cos, sin = angle_TC.cos() * scale, angle_TC.sin() * scale
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)
