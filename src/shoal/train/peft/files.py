"""Adapter directories, as Hugging Face's ``peft`` reads and writes them.

``adapter_config.json`` says what the method is and ``adapter_model.safetensors`` holds what was
learned. Methods that the library has are written so that it reads them; the others use the same
two files with a ``peft_type`` that it does not know. Nothing in a directory is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ModelError, require
from shoal.core.files import write_atomic, write_dir_atomic, write_json
from shoal.core.parts import Choice, table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.train.peft.protocols import PeftMethod
    from shoal.train.peft.run.handle import ModelPeftHandle

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_OWN = "SHOAL"
_MAX_CONFIG = 2**24

Names = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter directory.

    Args:
        method: the part and its options.
        state: trained tensors, by the names of a handle.
        base: the model that it was made for, as its maker called it.
    """

    method: Choice
    state: dict[str, Tensor]
    base: str


@dataclass(frozen=True)
class _Form:
    """How one of our methods looks in the library's files.

    Args:
        kind: its ``peft_type``.
        write: our options -> keys of the configuration.
        read: keys of the configuration -> our options.
        state: what is written of what was learned.
        more: keys that depend on what is written.
    """

    kind: str
    write: Callable[[Mapping[str, Any]], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    state: Callable[[ModelPeftHandle], dict[str, Tensor]] = lambda handle: handle.state()
    more: Callable[[ModelPeftHandle, Names], dict[str, Any]] = lambda handle, state: {}


def _lora_keys(o: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "r": o["r"],
        "lora_alpha": o["alpha"],
        "lora_dropout": o.get("dropout", 0.0),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        **more,
    }


def _lora_options(c: Mapping[str, Any]) -> dict[str, Any]:
    return {"r": c["r"], "alpha": float(c["lora_alpha"]), "dropout": c.get("lora_dropout") or 0.0}


def _adalora_keys(o: Mapping[str, Any]) -> dict[str, Any]:
    return _lora_keys(
        o,
        init_r=o["r"],
        target_r=o["target"],
        total_step=1,
        orth_reg_weight=o["orthogonal"],
        beta1=o["beta1"],
        beta2=o["beta2"],
        deltaT=o["every"],
    )


def _adalora_options(c: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "r": c["init_r"],
        "target": min(c["target_r"], c["init_r"]),
        "alpha": float(c["lora_alpha"]),
        "orthogonal": c["orth_reg_weight"],
    }


def _vera_keys(o: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "r": o["r"],
        "d_initial": o["initial"],
        "vera_dropout": o["dropout"],
        "save_projection": True,
        "projection_prng_key": 0,
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _vera_options(c: Mapping[str, Any]) -> dict[str, Any]:
    return {"r": c["r"], "initial": c.get("d_initial", 0.1), "dropout": c.get("vera_dropout", 0.0)}


def _prompt_options(c: Mapping[str, Any]) -> dict[str, Any]:
    return {"tokens": c["num_virtual_tokens"]}


def _prompt_keys(o: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_virtual_tokens": o["tokens"], "num_transformer_submodules": 1}


def _ia3_more(handle: ModelPeftHandle, state: Names) -> dict[str, Any]:
    return {
        "feedforward_modules": [
            name for name in _targets(state) if state[f"{name}.ia3_l"].shape[0] == 1
        ]
    }


def _prompt_more(handle: ModelPeftHandle, state: Names) -> dict[str, Any]:
    from shoal.train.peft.run.prompts import sizes

    layers, heads, _, _ = sizes(handle.model)
    return {
        "num_layers": layers,
        "num_attention_heads": heads,
        "token_dim": state["prompt_embeddings"].shape[1],
    }


def _prefix_state(handle: ModelPeftHandle) -> dict[str, Tensor]:
    """Without the perceptron that made them."""
    from shoal.train.peft.run.prompts import PrefixTokens

    prefix = handle.modules[""]
    assert isinstance(prefix, PrefixTokens)
    return {"prompt_embeddings": prefix.embeddings().detach()}


def _prefix_more(handle: ModelPeftHandle, state: Names) -> dict[str, Any]:
    from shoal.train.peft.run.prompts import sizes

    layers, heads, width, _ = sizes(handle.model)
    return {
        "num_layers": layers,
        "num_attention_heads": heads,
        "token_dim": heads * width,
        "encoder_hidden_size": heads * width,
        "prefix_projection": False,
    }


FORMS: dict[str, _Form] = {
    "lora": _Form("LORA", lambda o: _lora_keys(o), _lora_options),
    "rslora": _Form("LORA", lambda o: _lora_keys(o, use_rslora=True), _lora_options),
    "dora": _Form("LORA", lambda o: _lora_keys(o, use_dora=True), _lora_options),
    "lora_fa": _Form("LORA", lambda o: _lora_keys(o), _lora_options),
    "dylora": _Form("LORA", lambda o: _lora_keys(o), _lora_options),
    "qlora": _Form("LORA", lambda o: _lora_keys(o), _lora_options),
    "adalora": _Form("ADALORA", _adalora_keys, _adalora_options),
    "vera": _Form("VERA", _vera_keys, _vera_options),
    "ia3": _Form("IA3", lambda o: {"fan_in_fan_out": False}, lambda c: {}, more=_ia3_more),
    "prefix": _Form("PREFIX_TUNING", _prompt_keys, _prompt_options, _prefix_state, _prefix_more),
    "prompt": _Form("PROMPT_TUNING", _prompt_keys, _prompt_options, more=_prompt_more),
}

# Values of the library's keys that mean something which is not built.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None, []),
    "lora_bias": (None, False),
    "target_parameters": (None, []),
}


def _name_of(config: Mapping[str, Any]) -> str:
    """Our name of the library's method."""
    kind = config.get("peft_type")
    if kind == "LORA":
        if config.get("use_dora"):
            return "dora"
        return "rslora" if config.get("use_rslora") else "lora"
    return next((name for name, form in FORMS.items() if form.kind == kind), "")


def write(directory: Path, handle: ModelPeftHandle, *, base: str = "") -> None:
    """Write an adapter directory, whole or not at all.

    Args:
        directory: made here; an adapter that lies there is replaced.
        handle: the method with what it has learned.
        base: what the model it belongs to is called.
    """
    from safetensors.torch import save

    form = FORMS.get(handle.name)
    state = handle.state() if form is None else form.state(handle)
    if form is None:
        config: dict[str, Any] = {
            "peft_type": _OWN,
            "shoal": {"name": handle.name, **_plain(handle.options)},
        }
    else:
        config = {"peft_type": form.kind, **form.write(handle.options)}
        targets = _targets(state)
        if targets:
            config["target_modules"] = targets
        config |= form.more(handle, state)
    config |= {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    tensors = {_key(name): value.contiguous().cpu() for name, value in state.items()}
    with write_dir_atomic(directory) as folder:
        write_json(folder / CONFIG, config)
        write_atomic(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(options)))  # type: ignore[no-any-return]


# Stored beside the layers and not in one of them.
_TOP = ("vera_A", "vera_B")
_BARE = ("prompt_embeddings",)


def _key(name: str) -> str:
    if name in _BARE:
        return name
    return f"base_model.{name}" if name in _TOP else f"{_PREFIX}{name}"


def _unkey(key: str) -> str:
    bare = key.removeprefix(_PREFIX)
    if bare != key:
        return bare
    return key.removeprefix("base_model.")


_LEAVES = (
    ".lora_A.weight",
    ".lora_B.weight",
    ".lora_magnitude_vector",
    ".lora_A",
    ".lora_B",
    ".lora_E",
    ".vera_lambda_d",
    ".vera_lambda_b",
    ".ia3_l",
)


def _site(name: str) -> str:
    """The site of a stored name; empty for what belongs to none."""
    return next((name.removesuffix(leaf) for leaf in _LEAVES if name.endswith(leaf)), "")


def _targets(state: Names) -> list[str]:
    return sorted({site for site in map(_site, state) if site})


def read(directory: Path) -> StoredAdapter:
    """An adapter directory.

    Raises:
        ModelError: it is none, it is damaged, a tensor is NaN or infinite, or its method is not
            built here.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as unpack

    from shoal.model.finite import check_finite

    path = directory / CONFIG
    try:
        if path.stat().st_size > _MAX_CONFIG:
            raise ModelError(
                f"{path}: larger than {_MAX_CONFIG >> 20} MiB, too large for a configuration"
            )
        config = json.loads(path.read_text(encoding="utf-8"))
        tensors = unpack((directory / WEIGHTS).read_bytes())
    except FileNotFoundError as cause:
        raise ModelError(
            f"{cause.filename}: missing; give an adapter directory, with {CONFIG} and {WEIGHTS}"
        ) from None
    except (OSError, ValueError, SafetensorError) as cause:
        raise ModelError(f"{directory}: cannot be read ({cause}); fetch it again") from cause
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a JSON object; fetch it again")
    for name, tensor in tensors.items():
        check_finite(tensor, f"{directory}: {name}")
    state = {_unkey(name): tensor for name, tensor in tensors.items()}
    base = str(config.get("base_model_name_or_path") or "")
    own = config.get("shoal")
    if config.get("peft_type") == _OWN and isinstance(own, dict):
        method = Choice.model_validate(own)
        table("peft").build(method, where=str(path))
        return StoredAdapter(method, state, base)
    name = _name_of(config)
    if name == "prefix" and config.get("prefix_projection"):
        raise ModelError(f"{path}: prefix_projection: save the prefix without its perceptron")
    require(
        name in FORMS,
        f"{path}: peft_type",
        config.get("peft_type"),
        expected=f"one of {', '.join(sorted({form.kind for form in FORMS.values()}))}",
        error=ModelError,
    )
    for key, allowed in _PLAIN.items():
        if config.get(key) not in allowed:
            raise ModelError(f"{path}: {key} = {config[key]!r}: adapters that use it are not read")
    try:
        options = FORMS[name].read(config)
    except (KeyError, TypeError, ValueError) as cause:
        raise ModelError(f"{path}: {cause} is missing or wrong; fetch it again") from None
    targets = _targets(state)
    if name == "ia3":
        inputs = [t for t in targets if state[f"{t}.ia3_l"].shape[0] == 1]
        options["inputs"] = "|".join(inputs)
    if targets:
        options["targets"] = "|".join(targets)
    method = Choice(name=name, options=options)
    table("peft").build(method, where=str(path))
    return StoredAdapter(method, state, base)


def load(model: nn.Module, directory: Path) -> ModelPeftHandle:
    """Put the adapter of a directory into a model.

    Raises:
        ModelError: it cannot be read.
        CheckpointError: it is of another model.
        ConfigError: the model has no such layers.
    """
    stored = read(directory)
    method: PeftMethod = table("peft").build(stored.method, where=str(directory))
    handle = method.inject(model)
    handle.load(stored.state)
    return handle
