"""Hugging Face model directories, read and written.

Only JSON and safetensors are opened; code in a directory is never run. What is written
opens in ``transformers`` and what ``transformers`` writes opens here. Directories with
weights of few bits (:mod:`shoal.model.quantize.stored`) give models whose matrices stay
packed; a GGUF file (:mod:`shoal.model.gguf`) is read where a directory is asked for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import KernelError, ModelError, nearest, suggestion
from shoal.core.files import write_dir_atomic
from shoal.core.folder import BESIDE_TOKENIZER
from shoal.core.safetensors_header import StoredTensor, read_header
from shoal.ir.architecture import Architecture
from shoal.kernel.formats import weight_format
from shoal.kernel.protocols import PackedMatrix
from shoal.model import FAMILIES
from shoal.model.config import ModelConfig
from shoal.model.families.common import Names, ParameterPiece
from shoal.model.finite import check_finite
from shoal.model.initialise import empty
from shoal.model.quantize.stored import Scheme, rows_of, scheme_of, stack, tensors_of
from shoal.model.transformer import Transformer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_JSON_BYTES = 64 * 2**20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

# model_type of config.json -> our family.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mixtral": "mixtral",
    "shoal_parallel": "parallel",
    "shoal_mdlm": "mdlm",
}

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# Tensors that some writers store and that follow from the configuration.
_IGNORED = ("rotary_emb.inv_freq",)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(
                f"{path}: larger than {_MAX_JSON_BYTES >> 20} MiB, too large for an index"
            )
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: missing; give a Hugging Face model directory, which has one"
        ) from None
    except OSError as cause:
        raise ModelError(f"{path}: cannot be read ({cause.strerror})") from cause
    except (ValueError, RecursionError) as cause:
        raise ModelError(f"{path}: not JSON ({cause}); fetch the file again") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object; fetch the file again")
    return raw


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file and no directory."""
    return path.suffix == ".gguf" and not path.is_dir()


def quantization(directory: Path) -> Scheme | None:
    """How the matrices of a model directory are packed; None where they are plain.

    Raises:
        ModelError: in a way that is not read here.
    """
    path = directory / "config.json"
    return scheme_of(_read_json(path).get("quantization_config"), f"{path}: quantization_config")


def read_config(directory: Path) -> ModelConfig:
    """The configuration of a model directory, or of a GGUF file.

    Raises:
        ModelError: no directory, an unknown architecture, code of its own, or a wrong value.
    """
    if is_gguf(directory):
        from shoal.model import gguf

        return gguf.read_config(directory)
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory; give a Hugging Face model directory")
    path = directory / "config.json"
    raw = _read_json(path)
    if raw.get("auto_map"):
        raise ModelError(
            f"{path}: auto_map names code of the model, which is never executed; if the "
            f"weights are those of a plain {', '.join(ARCHITECTURES)} model, remove the key"
        )
    architecture, raw = Architecture.from_huggingface(raw, str(path))
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        hint = nearest(kind, ARCHITECTURES) if isinstance(kind, str) else ""
        raise ModelError(
            f"{path}: model_type = {kind!r}: expected one of {', '.join(ARCHITECTURES)}"
            + (f"; {hint}" if hint else "; models of other architectures cannot be loaded")
        )
    family = FAMILIES.build(ARCHITECTURES[kind])
    # How matrices are packed is no matter of the family.
    scheme_of(raw.pop("quantization_config", None), f"{path}: quantization_config")
    if kind == "mistral":  # where a key is absent, its own defaults hold
        raw = {"num_key_value_heads": 8, "sliding_window": 4096, **raw}
    config: ModelConfig = family.from_huggingface(raw, str(path))
    return ModelConfig(
        **{**dict(config), "name": directory.resolve().name, "architecture": architecture}
    )


def find_weights(directory: Path) -> dict[str, Path]:
    """Stored tensor -> its file, with every file there.

    Raises:
        ModelError: no weights, only pickles, or a missing shard.
    """
    index = directory / INDEX
    if index.is_file():
        raw = _read_json(index).get("weight_map")
        if not isinstance(raw, dict) or not all(isinstance(file, str) for file in raw.values()):
            raise ModelError(f"{index}: weight_map must map tensor names to file names")
        files = sorted(set(raw.values()))
        for file in files:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ModelError(
                    f"{index}: weight_map names {file!r}; expected the name of a .safetensors "
                    "file in this directory"
                )
            if not (directory / file).is_file():
                there = sum((directory / other).is_file() for other in files)
                raise ModelError(
                    f"{directory / file}: missing; {INDEX} names {len(files)} files and {there} "
                    "are there; fetch this one again"
                )
        return {name: directory / file for name, file in raw.items()}
    single = directory / WEIGHTS
    if single.is_file():
        return dict.fromkeys(read_header(single, error=ModelError).tensors, single)
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        raise ModelError(
            f"{directory / pickles[0]}: a pickle, which can run code when it is loaded, so it is "
            f"never opened; convert it with transformers' save_pretrained, or fetch the "
            "safetensors files of the model"
        )
    raise ModelError(f"{directory}: neither {WEIGHTS} nor {INDEX}; fetch the weights of the model")


def check_tensors(
    names: Names,
    files: Mapping[str, Path],
    directory: Path,
    *,
    tied: bool,
    scheme: Scheme | None = None,
) -> tuple[dict[str, StoredTensor], dict[str, tuple[str, ...]]]:
    """Every tensor that the configuration needs is there and has its shape; none is left over.

    Returns:
        Every stored tensor, and of every packed matrix, by its plain name, the stored ones.
    """
    stored_tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(files.values())):
        stored_tensors.update(read_header(file, error=ModelError).tensors)
    pieces = {piece.name: piece for parts in names.values() for piece in parts}
    spare = {"lm_head.weight"} if tied else set()
    packed: dict[str, tuple[str, ...]] = {}
    for name, piece in pieces.items():
        base = name.removesuffix(".weight")
        if (
            scheme is not None
            and name not in stored_tensors
            and f"{base}.{scheme.marker}" in stored_tensors
        ):
            try:
                wanted = scheme.tensors(*piece.shape)
            except KernelError as cause:
                raise ModelError(f"{directory}: {base} {list(piece.shape)}: {cause}") from None
            packed[name] = tuple(f"{base}.{leaf}" for leaf in wanted)
            for leaf, (dtypes, shape) in wanted.items():
                _stored(f"{base}.{leaf}", dtypes, shape, stored_tensors, files, directory)
            # Some writers store a bias where the model has none; it must be 0.
            spare |= {*packed[name], f"{base}.bias"}
        else:
            _stored(name, tuple(DTYPES), piece.shape, stored_tensors, files, directory)
    for name in stored_tensors:
        if name not in pieces and name not in spare and not name.endswith(_IGNORED):
            raise ModelError(
                f"{files.get(name, directory)}: the tensor {name} is not part of the model that "
                f"config.json describes" + suggestion(name, pieces)
            )
    return stored_tensors, packed


def _stored(
    name: str,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
    found: Mapping[str, StoredTensor],
    files: Mapping[str, Path],
    directory: Path,
) -> None:
    stored = found.get(name)
    if stored is None or name not in files:
        raise ModelError(
            f"{directory}: the tensor {name} is missing, which config.json asks for; the "
            "weights are not whole, or config.json is of another model"
        )
    if stored.shape != shape:
        raise ModelError(
            f"{files[name]}: tensor {name} has the shape {list(stored.shape)}, and "
            f"config.json asks for {list(shape)}; one of them is of another model"
        )
    if stored.dtype not in dtypes:
        hint = "; use weights that are not quantised" if len(dtypes) == len(DTYPES) else ""
        raise ModelError(
            f"{files[name]}: tensor {name} is of dtype {stored.dtype}: expected one of "
            f"{', '.join(dtypes)}{hint}"
        )


def read(
    directory: Path,
    dtype: torch.dtype | None = None,
    *,
    packed: bool = True,
    room: Mapping[str, Tensor] | None = None,
    done: Callable[[Transformer, str], None] | None = None,
) -> Transformer:
    """A model from its directory; nothing is allocated before every file was checked.

    Args:
        directory: config.json and safetensors; or a GGUF file.
        dtype: of the weights; as the embedding is stored, if not given.
        packed: matrices that are stored in few bits stay so; else they become plain weights.
        room: name of a weight -> tensor that it is written to; memory of its own without.
        done: called with the model and the name of each weight that has been read, whose module it
            may replace; the model is then never in memory whole.

    Raises:
        ModelError: anything is missing, malformed or not supported.
    """
    from safetensors import SafetensorError, safe_open

    if is_gguf(directory):
        from shoal.model import gguf

        return gguf.read(directory, dtype)
    config = read_config(directory)
    names: Names = FAMILIES.build(config.family).names(config)
    files = find_weights(directory)
    scheme = quantization(directory)
    result, few = check_tensors(names, files, directory, tied=config.tied, scheme=scheme)
    if dtype is None:
        stored = result.get(names["embed.weight"][0].name)
        dtype = torch.float32 if stored is None else DTYPES[stored.dtype]
    model = empty(config)
    handles: dict[Path, Any] = {}

    def get(name: str) -> Tensor:
        file = files[name]
        if file not in handles:
            handles[file] = safe_open(file, framework="pt")
        tensor: Tensor = handles[file].get_tensor(name)
        return tensor

    kept: dict[str, PackedMatrix] = {}
    plain = {piece.name for pieces in names.values() for piece in pieces}
    try:
        for base in (name.removesuffix(".weight") for name in few):
            bias = f"{base}.bias"
            if bias in result and bias not in plain and bool(get(bias).any()):
                raise ModelError(
                    f"{files[bias]}: the tensor {bias} is not 0, and the model that config.json "
                    "describes has no bias there; one of them is of another model"
                )
        for name, pieces in names.items():
            matrices = {
                piece.name: _matrix(scheme, piece, few[piece.name], get)
                for piece in pieces
                if scheme is not None and piece.name in few
            }
            whole = [matrix for matrix in matrices.values() if isinstance(matrix, PackedMatrix)]
            formats = {matrix.format for matrix in whole}
            stays = packed and name.startswith("blocks.") and len(whole) == len(pieces)
            if stays and len(formats) == 1:
                kept[name] = stack(whole)
                for kind, tensor in kept[name].tensors.items():
                    check_finite(tensor, f"{directory}: {kind} of {name}")
                continue
            owner_name, _, leaf = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            shape = getattr(owner, leaf).shape
            value = torch.empty(shape, dtype=dtype) if room is None else room[name]
            parts = torch.split(value.view(-1), [piece.numel for piece in pieces])
            for part, piece in zip(parts, pieces, strict=True):
                matrix = matrices.get(piece.name)
                if isinstance(matrix, PackedMatrix):
                    matrix = weight_format(matrix.format).dequantize(matrix)
                part.view(piece.shape).copy_(get(piece.name) if matrix is None else matrix)
            check_finite(value, f"{directory}: {name}")
            setattr(owner, leaf, torch.nn.Parameter(value))
            if done is not None:
                done(model, name)
    except (SafetensorError, OSError) as cause:
        raise ModelError(f"{directory}: cannot be read ({cause}); fetch the files again") from cause
    except KernelError as cause:
        raise ModelError(f"{directory}: {cause}") from None
    if kept:
        from shoal.model.quantize.layers import replace

        replace(model, kept)
    return model


def _matrix(
    scheme: Scheme, piece: ParameterPiece, stored: tuple[str, ...], get: Callable[[str], Tensor]
) -> PackedMatrix | Tensor:
    """One packed matrix, or its weights where no format here is the same.

    Raises:
        KernelError: its tensors cannot be; names the matrix.
    """
    base = piece.name.removesuffix(".weight")
    rows, columns = piece.shape
    try:
        return scheme.packed(
            rows,
            columns,
            # Copies: what stays packed outlives the file that is mapped here.
            {name.removeprefix(f"{base}."): get(name).clone() for name in stored},
        )
    except KernelError as cause:
        raise KernelError(f"{base}: {cause}") from None


def write(
    directory: Path,
    model: Transformer,
    tokenizer: Path | None = None,
    *,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a model directory, whole or not at all; packed matrices stay packed.

    See :func:`write_state`.
    """
    from shoal.model.ksort import SortedAttention
    from shoal.model.quantize.layers import packed_of

    if any(isinstance(module, SortedAttention) for module in model.modules()):
        raise ModelError(
            f"{directory}: the channels of the model's keys are sorted, and no directory can say "
            "so; write the model as it was read, and sort it when it is loaded"
        )
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_state(
        directory,
        model.config,
        state,
        tokenizer,
        shard_bytes=shard_bytes,
        packed=packed_of(model),
    )


def write_state(
    directory: Path,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    tokenizer: Path | None = None,
    *,
    shard_bytes: int = 5 * 10**9,
    packed: Mapping[str, PackedMatrix] | None = None,
    method: str = "",
) -> None:
    """Write a model directory from plain tensors.

    Args:
        directory: must not exist yet.
        config: the model.
        state: our parameter names -> whole tensors.
        tokenizer: a tokenizer.json, or a directory with one, to go with it.
        shard_bytes: a file of weights is not larger, unless a single tensor is.
        packed: parameter names -> matrices in one weight format, stored instead of those of
            the state; experts lie below each other.
        method: how their codes were chosen, for the record.

    Raises:
        ModelError: the directory exists, cannot be written, or a tensor is missing.
    """
    names: Names = FAMILIES.build(config.family).names(config)
    packed = packed or {}
    for name, pieces in names.items():
        numel = sum(piece.numel for piece in pieces)
        given = -1
        if name in packed:
            given = packed[name].shape[0] * packed[name].shape[1]
        elif name in state:
            given = state[name].numel()
        if given != numel:
            raise ModelError(f"{directory}: the parameter {name} of {numel} elements is missing")
    dtype = state["embed.weight"].dtype
    raw: dict[str, Any] = FAMILIES.build(config.family).to_huggingface(config)
    raw = config.architecture.to_huggingface(raw)
    raw["torch_dtype"] = _NAMES.get(dtype, str(dtype).removeprefix("torch."))
    formats = sorted({matrix.format for matrix in packed.values()})
    if len(formats) > 1:
        raise ModelError(f"{directory}: matrices in {' and '.join(formats)}; expected one format")
    if formats:
        raw["quantization_config"] = {"quant_method": "shoal", "format": formats[0]}
        if method:
            raw["quantization_config"]["method"] = method
    with write_dir_atomic(directory, error=ModelError) as place:
        _dump(place / "config.json", raw)
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        generation = {key: raw[key] for key in special if raw[key] is not None}
        _dump(place / "generation_config.json", {"do_sample": False, **generation})
        if tokenizer is not None:
            _copy_tokenizer(place, config, tokenizer)
        _write_weights(place, _items(names, state, packed), shard_bytes)


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _items(
    names: Names, state: Mapping[str, Tensor], packed: Mapping[str, PackedMatrix]
) -> Iterator[tuple[str, Tensor]]:
    """What is stored, by its names, in order."""
    for name, pieces in names.items():
        if name in packed:
            start = 0
            for piece in pieces:
                stop = start + piece.shape[0]
                yield from tensors_of(piece.name, rows_of(packed[name], start, stop)).items()
                start = stop
        else:
            parts = torch.split(state[name].reshape(-1), [piece.numel for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                yield piece.name, part.view(piece.shape)


def _write_weights(place: Path, items: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    """One file, or several and an index, as transformers names them."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in items:
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
        total += size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: tensor.contiguous().to("cpu", copy=True) for name, tensor in shard.items()}
        try:
            save_file(tensors, place / file, metadata={"format": "pt"})
        except SafetensorError as cause:
            raise OSError(f"{file}: {cause}") from cause
        weight_map.update(dict.fromkeys(tensors, file))
    if len(shards) > 1:
        _dump(
            place / INDEX,
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        )


def _copy_tokenizer(place: Path, config: ModelConfig, tokenizer: Path) -> None:
    """Copy a tokenizer with what lies beside it, and say to transformers how to open it.

    Raises:
        ModelError: it is missing, not JSON, or has more tokens than the model.
    """
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    content = _read_json(file)
    vocabulary = (content.get("model") or {}).get("vocab")
    highest = max(vocabulary.values(), default=0) if isinstance(vocabulary, dict) else 0
    if highest >= config.vocab_size:
        raise ModelError(
            f"{file}: has tokens up to {highest}, and the model knows {config.vocab_size}; "
            "give the tokenizer that belongs to the model"
        )
    shutil.copyfile(file, place / "tokenizer.json")
    for name in BESIDE_TOKENIZER:
        if file.with_name(name).is_file():
            shutil.copyfile(file.with_name(name), place / name)
    if (place / "tokenizer_config.json").is_file():
        return
    added = {
        token.get("id"): token.get("content")
        for token in content.get("added_tokens") or []
        if isinstance(token, dict)
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position,
        "clean_up_tokenization_spaces": False,
    }
    chosen = {
        "bos_token": config.bos_token_id,
        "eos_token": config.eos_ids[0] if config.eos_ids else None,
        "pad_token": config.pad_token_id,
    }
    for key, number in chosen.items():
        if number in added:
            settings[key] = added[number]
    _dump(place / "tokenizer_config.json", settings)
