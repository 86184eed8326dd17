"""How packed matrices lie in a directory: ours, and what other programs write.

Ours: ``config.json`` has ``quantization_config: {quant_method: shoal, format: int4-g128, ...}``,
and where a plain directory has a tensor ``X.weight``, this one has the tensors of the
:class:`~shoal.kernel.protocols.PackedMatrix`: ``X.codes``, ``X.scales`` and so on.

GPTQ (as AutoGPTQ and GPTQModel write it): ``X.qweight`` int32 [K b / 32, N], whose words of one
column are a bit stream of its codes along K; ``X.qzeros`` int32 [G, N b / 32], zero points along N,
in ``checkpoint_format: gptq`` less one; ``X.scales`` [G, N]; ``X.g_idx`` [K], the group of each
input.

AWQ (as AutoAWQ writes it, version gemm): ``X.qweight`` int32 [K, N / 8] and ``X.qzeros`` int32
[G, N / 8], 4 bits each, outputs of a word in the order 0 2 4 6 1 3 5 7; ``X.scales`` [G, N].

Shapes: N outputs, K inputs, G groups of a row, b bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.errors import KernelError, ModelError, nearest
from shoal.kernel.formats import weight_format
from shoal.kernel.formats.base import BaseFormat
from shoal.kernel.formats.bits import pack, row_bytes, unpack
from shoal.kernel.protocols import PackedMatrix

Shape = tuple[int, ...]


class Scheme(Protocol):
    """How one program stores packed matrices.

    Attributes:
        marker: a matrix ``X`` is packed where there is a tensor ``X.marker``.
    """

    marker: str

    def tensors(self, n: int, k: int) -> dict[str, tuple[tuple[str, ...], Shape]]:
        """Leaf -> what types it may have, by safetensors' names, and its shape.

        Raises:
            KernelError: a matrix of that shape cannot be packed so.
        """

    def packed(self, n: int, k: int, tensors: Mapping[str, Tensor]) -> PackedMatrix | Tensor:
        """The matrix, or [N, K] in fp32 where no format here is the same.

        Raises:
            KernelError: the tensors cannot be.
        """


def stack(parts: Sequence[PackedMatrix]) -> PackedMatrix:
    """Matrices of one format below each other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return PackedMatrix(
        first.format,
        (sum(part.shape[0] for part in parts), first.shape[1]),
        {name: torch.cat([part.tensors[name] for part in parts]) for name in first.tensors},
    )


def rows_of(packed: PackedMatrix, start: int, stop: int) -> PackedMatrix:
    """Some rows of a matrix; a view."""
    return PackedMatrix(
        packed.format,
        (stop - start, packed.shape[1]),
        {name: tensor[start:stop] for name, tensor in packed.tensors.items()},
    )


def tensors_of(piece: str, packed: PackedMatrix) -> dict[str, Tensor]:
    """What is stored instead of the tensor ``piece``, which is called ``X.weight``."""
    base = piece.removesuffix(".weight")
    return {f"{base}.{name}": tensor for name, tensor in packed.tensors.items()}


class _Ours:
    marker = "codes"

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        text = config.get("format")
        if not isinstance(text, str):
            raise ModelError(f"{where}.format = {text!r}: expected a format such as int4-g128")
        try:
            self._format = weight_format(text)
        except KernelError as cause:
            raise ModelError(f"{where}: {cause}") from None

    def tensors(self, n: int, k: int) -> dict[str, tuple[tuple[str, ...], Shape]]:
        fmt, kinds = self._format, {"scales": "F16", "exponents": "I8"}
        groups = k // fmt.group_of(k)
        result: dict[str, tuple[tuple[str, ...], Shape]] = {
            name: ((kinds.get(name, "U8"),), (n, groups)) for name in fmt.grid_bits
        }
        if fmt.keeps_half:
            result["places"] = (("U8",), (n, row_bytes(k // 4, 4)))
        kept = k // 2 if fmt.keeps_half else k
        return {"codes": (("U8",), (n, row_bytes(kept, fmt.code_bits))), **result}

    def packed(self, n: int, k: int, tensors: Mapping[str, Tensor]) -> PackedMatrix:
        made = PackedMatrix(str(self._format), (n, k), dict(tensors))
        self._format.check(made)
        return made


class _Affine:
    """What GPTQ and AWQ have in common: codes, zero points and scales."""

    marker = "qweight"

    def __init__(self, bits: int, group: int | None) -> None:
        self.bits, self.group = bits, group
        shared = "channel" if group is None else f"g{group}"
        self._affine: BaseFormat = weight_format(f"uint{bits}-{shared}")
        self._symmetric: BaseFormat = weight_format(f"int{bits}-{shared}")

    def _made(self, stream: Tensor, zeros_NG: Tensor, scales_NG: Tensor, k: int) -> PackedMatrix:
        """Symmetric where every zero point is the middle code."""
        scales = scales_NG.contiguous().to(torch.float16)
        symmetric = bool((zeros_NG == 2 ** (self.bits - 1)).all())
        fmt = self._symmetric if symmetric else self._affine
        tensors = {"codes": stream, "scales": scales}
        if not symmetric:
            tensors["zeros"] = zeros_NG.contiguous()
        made = PackedMatrix(str(fmt), (len(stream), k), tensors)
        fmt.check(made)
        return made


class _GPTQ(_Affine):
    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        bits = _choice(config, "bits", (2, 3, 4, 8), where)
        super().__init__(bits, _group(config, "group_size", where))
        kind = config.get("checkpoint_format") or "gptq"
        if config.get("is_marlin_format"):
            kind = "marlin"
        if kind not in ("gptq", "gptq_v2"):
            raise ModelError(
                f"{where}.checkpoint_format = {kind!r}: expected gptq or gptq_v2; convert it with "
                "the program that wrote it"
            )
        for key in ("dynamic", "pack_dtype"):
            if config.get(key) not in (None, {}, "int32"):
                raise ModelError(f"{where}.{key} = {config[key]!r}: is not read here; leave it out")
        self._less = 1 if kind == "gptq" else 0
        self._said_symmetric = config.get("sym") is True

    def tensors(self, n: int, k: int) -> dict[str, tuple[tuple[str, ...], Shape]]:
        groups = k // self._affine.group_of(k)
        for count, of in ((k, "inputs"), (n, "outputs")):
            if count * self.bits % 32:
                raise KernelError(f"{of} = {count}: {self.bits} bits each are no whole words of 32")
        return {
            "qweight": (("I32",), (k * self.bits // 32, n)),
            "qzeros": (("I32",), (groups, n * self.bits // 32)),
            "scales": (("F16", "BF16", "F32"), (groups, n)),
            "g_idx": (("I32",), (k,)),
        }

    def packed(self, n: int, k: int, tensors: Mapping[str, Tensor]) -> PackedMatrix | Tensor:
        stream = tensors["qweight"].T.contiguous().view(torch.uint8)
        zeros = unpack(tensors["qzeros"].contiguous().view(torch.uint8), self.bits, n)
        middle = 2 ** (self.bits - 1)
        # Some writers say gptq and store as in gptq_v2; of a symmetric model that can be seen.
        whole = self._said_symmetric and bool((zeros == middle).all())
        # Stored less one, in as many bits: the largest stands for 0 - 1.
        zeros_NG = ((zeros + (0 if whole else self._less)) & (2**self.bits - 1)).T
        scales_NG = tensors["scales"].T
        place_K = tensors["g_idx"].long()
        groups = scales_NG.shape[1]
        if bool((place_K < 0).any()) or int(place_K.max()) >= groups:
            raise KernelError(f"g_idx: expected groups from 0 to {groups - 1}")
        if torch.equal(place_K, torch.arange(k) // self._affine.group_of(k)):
            return self._made(stream, zeros_NG, scales_NG, k)
        # Inputs of a group lie anywhere: no format has that, so the weights themselves.
        codes = unpack(stream, self.bits, k).float()
        if not bool(scales_NG.isfinite().all()):
            raise KernelError("scales: expected finite numbers")
        weight: Tensor = codes - zeros_NG[:, place_K].float()
        return weight * scales_NG[:, place_K].float()


# The output that stands at each place of a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class _AWQ(_Affine):
    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        key = "w_bit" if "w_bit" in config else "bits"
        group = "q_group_size" if "q_group_size" in config else "group_size"
        super().__init__(_choice(config, key, (4,), where), _group(config, group, where))
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise ModelError(
                f"{where}.version = {version!r}: expected gemm; convert it with the program that "
                "wrote it"
            )

    def tensors(self, n: int, k: int) -> dict[str, tuple[tuple[str, ...], Shape]]:
        groups = k // self._affine.group_of(k)
        if n % 8:
            raise KernelError(f"outputs = {n}: expected a multiple of 8, which share a word")
        return {
            "qweight": (("I32",), (k, n // 8)),
            "qzeros": (("I32",), (groups, n // 8)),
            "scales": (("F16", "BF16", "F32"), (groups, n)),
        }

    def packed(self, n: int, k: int, tensors: Mapping[str, Tensor]) -> PackedMatrix:
        stream = pack(_by_outputs(tensors["qweight"]), 4)
        return self._made(stream, _by_outputs(tensors["qzeros"]), tensors["scales"].T, k)


def _by_outputs(words: Tensor) -> Tensor:
    """int32 [R, N / 8] -> codes uint8 [N, R]."""
    codes = unpack(words.contiguous().view(torch.uint8), 4, words.shape[1] * 8)
    out = torch.empty_like(codes).view(*words.shape, 8)
    out[..., list(_AWQ_ORDER)] = codes.view(*words.shape, 8)
    return out.flatten(1).T.contiguous()


def _choice(config: Mapping[str, Any], key: str, known: tuple[int, ...], where: str) -> int:
    value = config.get(key)
    if type(value) is not int or value not in known:
        raise ModelError(
            f"{where}.{key} = {value!r}: expected {' or '.join(map(str, known))}; other widths "
            "are not read"
        )
    return value


def _group(config: Mapping[str, Any], key: str, where: str) -> int | None:
    value = config.get(key, 128)
    if type(value) is not int or value == 0 or value < -1:
        raise ModelError(f"{where}.{key} = {value!r}: expected a number of weights, or -1 for all")
    return None if value == -1 else value


METHODS: dict[str, Any] = {"shoal": _Ours, "gptq": _GPTQ, "awq": _AWQ}


def scheme_of(config: Mapping[str, Any] | None, where: str) -> Scheme | None:
    """The scheme that ``quantization_config`` of a ``config.json`` names; None without one.

    Raises:
        ModelError: a method or an option that is not read here.
    """
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(method, str) or method not in METHODS:
        hint = nearest(method, METHODS) if isinstance(method, str) else ""
        raise ModelError(
            f"{where}.quant_method = {method!r}: expected one of {', '.join(METHODS)}"
            + (f"; {hint}" if hint else "; use weights that are not quantised")
        )
    made: Scheme = METHODS[method](config, where)
    return made
