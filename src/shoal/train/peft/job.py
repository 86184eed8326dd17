"""Fine-tuning in a training job: a shared base, the model with its method, and the export."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import PlanError
from shoal.core.parts import table
from shoal.core.traits import traits

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer
    from shoal.parallel.protocols import Comm
    from shoal.parallel.tensor.rows import WeightSource
    from shoal.train.layout import RunDir
    from shoal.train.peft.protocols import PeftMethod
    from shoal.train.peft.run.handle import ModelPeftHandle


# Path in a block -> the key of a configuration that says that there is a bias.
_BIASES = {
    "attention.qkv_proj": "attention_bias",
    "attention.o_proj": "output_bias",
    "mlp.gate_up_proj": "ffn_bias",
    "mlp.down_proj": "ffn_bias",
}
# Family -> keys that are true together in its directories.
_HELD = {
    "llama": (("attention_bias", "output_bias"), ("ffn_bias",)),
    "parallel": (("attention_bias", "output_bias"), ("ffn_bias",)),
    "qwen3": (("attention_bias", "output_bias"),),
}


def check_base(job: TrainJob) -> None:
    """Refuse a base that jobs share and that is not the same in all of them.

    Raises:
        PlanError: names the key and what is possible.
    """
    from shoal.train.build import is_directory

    if job.base != "shared":
        return
    if not is_directory(job.model):
        raise PlanError(
            f"base = shared with model = {job.model}: weights that are drawn by each job are not "
            "the same; give a model directory"
        )


class FineTuned:
    """The model of a job with its fine-tuning method in it.

    Args:
        comm: the ranks that train the model, whose base then lies as the job says; without them
            it is whole and as it was read.
    """

    def __init__(self, weights: WeightSource, job: TrainJob, comm: Comm | None = None) -> None:
        self.config: ModelConfig = weights.config
        self._weights, self._job, self._comm = weights, job, comm
        self.handle: ModelPeftHandle | None = None
        self.base = ""

    def model(self) -> Transformer:
        """The whole model, ready to train."""
        from shoal.train.peft.run.frozen import narrow

        job, low = self._job, self._job.precision == "bf16"
        assert job.finetune is not None
        if self._comm is not None and job.base == "divided":
            model = self._divided(self._comm, low=low)
        else:
            model = self._weights.model()
            self.base = fingerprint(model)
        method: PeftMethod = table("peft").build(job.finetune, where="finetune")
        self.handle = method.inject(model, seed=job.seed)
        self.handle.stay()
        # Jobs that share a base map its pages, and would each copy them.
        if self._comm is not None and low and job.base != "shared":
            narrow(self.handle, exact="reads_base" in traits("peft", job.finetune))
        return model

    def _divided(self, comm: Comm, *, low: bool) -> Transformer:
        """The model with its base divided; read from a directory, it is never here whole."""
        from shoal.train.build import StoredWeights
        from shoal.train.peft.run.frozen import divide

        order: list[str] = []
        seen: dict[str, bytes] = {}

        def done(model: Transformer, name: str) -> None:
            order[:] = order or [name for name, _ in model.named_parameters()]
            seen[name] = _some(name, model.get_parameter(name))
            divide(model, name, comm, low=low)

        if isinstance(self._weights, StoredWeights) and not self._job.architecture.says:
            model = self._weights.model(done)
        else:
            model = self._weights.model()
            for name, _ in list(model.named_parameters()):
                done(model, name)
        self.base = _joined(seen[name] for name in order)
        return model

    def whole(self, name: str) -> Tensor:
        """A parameter of the base."""
        return self._weights.whole(name)


def fingerprint(model: nn.Module) -> str:
    """What identifies a base: names, shapes and some values of every parameter."""
    return _joined(_some(name, parameter) for name, parameter in model.named_parameters())


def _some(name: str, parameter: Tensor) -> bytes:
    """Name, shape and some values of a parameter."""
    some = parameter.detach().reshape(-1)[:256].float().cpu().numpy()
    return f"{name}{tuple(parameter.shape)}".encode() + bytes(some.tobytes())


def _joined(pieces: Iterable[bytes]) -> str:
    result = hashlib.sha256()
    for piece in pieces:
        result.update(piece)
    return result.hexdigest()[:16]


def export(job: TrainJob, directory: RunDir, tokenizer: Path) -> None:
    """Write the newest checkpoint as an adapter directory, and merged where that is possible.

    It is not where the method can neither be merged nor makes a model of its own, or leaves biases
    that directories of the model's family have no room for.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    import torch

    from shoal.checkpoint.levels import newest
    from shoal.checkpoint.store import Store
    from shoal.corpora.tokens import open_tokens
    from shoal.model import huggingface
    from shoal.model.transformer import Transformer
    from shoal.train.build import is_directory, weights_of, with_ends
    from shoal.train.nodes import tokens_of
    from shoal.train.peft import files
    from shoal.train.peft.run.handle import ModelPeftHandle

    saved = newest([Store(place) for place in directory.levels_of(job)])
    weights = FineTuned(weights_of(job), job)
    model = weights.model()
    model.config = with_ends(model.config, open_tokens(tokens_of(directory)))
    handle = weights.handle
    assert isinstance(handle, ModelPeftHandle)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(saved.tensor(f"model.{name}"))
        handle.restore(lambda name: saved.tensor(f"finetune.{name}"))
    shutil.rmtree(directory.adapter, ignore_errors=True)
    base = str(Path(job.model).absolute()) if is_directory(job.model) else job.model
    files.write(directory.adapter, handle, base=base)
    if handle.mergeable:
        merged = handle.keep_merged()
        assert isinstance(merged, Transformer)
        whole = with_biases(merged)
        if whole is not None:
            huggingface.write(directory.export, whole, tokenizer)
    elif getattr(handle.method, "whole", False):
        huggingface.write(directory.export, model, tokenizer)


def with_biases(model: Transformer) -> Transformer | None:
    """A model some of whose layers have got a bias, with a configuration that says so.

    Returns:
        The model; None where directories of its family have no room for such biases.
    """
    import torch
    from torch import nn

    config = model.config
    layers = [
        (module, key)
        for block in model.blocks
        for name, module in block.named_modules()
        for path, key in _BIASES.items()
        if name == path and isinstance(module, nn.Linear)
    ]
    odd = {key for layer, key in layers if (layer.bias is not None) != getattr(config, key)}
    if not odd:
        return model
    # Llama computes what Qwen2 does, and its directories hold every bias.
    family = "llama" if config.family == "qwen2" else config.family
    held = [keys for keys in _HELD.get(family, ()) if odd & set(keys)]
    given = {key for keys in held for key in keys}
    if odd - given:
        return None
    if family != config.family:
        given |= {"attention_bias", "output_bias"}
    for layer, key in layers:
        if key in given and getattr(layer, "bias", None) is None:
            zeros = torch.zeros(layer.out_features, dtype=layer.weight.dtype)
            layer.register_parameter("bias", nn.Parameter(zeros, requires_grad=False))
    update = {"family": family, **dict.fromkeys(given, True)}
    model.config = config.model_copy(update=update)
    return model
