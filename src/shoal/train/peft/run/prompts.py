"""Tokens that are trained, before every sequence, as keys and values that attention sees.

In a causal model what stands before a sequence reaches it by keys and values alone. So a prompt is
computed once in a pass, and a prefix not at all, and every attention puts theirs before its own.
They stand before place 0: a key that a token at place m + p sees as it is, the token at place p
sees turned back by m.

In a model of another library the prefix goes where its cache goes, and the prompt before its
embeddings.

Shapes: m trained tokens, L layers, K key/value heads, d head_dim, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.model.attention import Attention, KVCache, attend
from shoal.model.rope import rotate, tables_at
from shoal.model.transformer import Transformer
from shoal.train.peft.run.low_rank import drawn

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle

Source = Callable[[int, torch.dtype], tuple[Tensor, Tensor]]
"""Layer and dtype -> keys, already turned, and values [m, K, d]."""


class PrefixTokens(nn.Module):
    """Keys and values of all layers, made by a perceptron while they are trained if so wanted.

    Args:
        projection: width of the perceptron, or 0.
    """

    def __init__(self, model: nn.Module, tokens: int, projection: int, seed: int) -> None:
        super().__init__()
        layers, heads, width, hidden = sizes(model)
        self.sizes = layers, heads, width
        every = layers * 2 * heads * width
        self.gate: nn.Parameter | None = None
        self.made: nn.Sequential | None = None
        if projection:
            self.inputs = nn.Parameter(drawn((tokens, hidden), 1.0, seed, "prefix inputs"))
            self.made = nn.Sequential(
                nn.Linear(hidden, projection), nn.Tanh(), nn.Linear(projection, every)
            )
            with torch.no_grad():
                for name, parameter in self.made.named_parameters():
                    std = 0.0 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
                    parameter.copy_(drawn(tuple(parameter.shape), std, seed, f"prefix {name}"))
        else:
            self.inputs = nn.Parameter(drawn((tokens, every), 0.5, seed, "prefix"))

    def embeddings(self) -> Tensor:
        """Keys and values [m, L * 2 * K * d], in the order of Hugging Face's file."""
        embeddings: Tensor = self.inputs if self.made is None else self.made(self.inputs)
        return embeddings

    def pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer [m, K, d]."""
        layers, heads, width = self.sizes
        every = self.embeddings().view(-1, layers, 2, heads, width)[:, layer]
        keys, values = every[:, 0], every[:, 1]
        if self.gate is not None:
            values = values * torch.sigmoid(self.gate[layer])
        return keys, values

    def files(self) -> dict[str, Tensor]:
        """The keys and values alone, however they were made."""
        if self.made is None:
            gate = {} if self.gate is None else {"gate": self.gate}
            return {"prompt_embeddings": self.inputs, **gate}
        return dict(self.named_parameters())


class PromptEmbeddings(nn.Module):
    """Embeddings.

    Args:
        seed: seed of the tokens whose embeddings are the initial values.
    """

    def __init__(self, model: nn.Module, tokens: int, seed: int) -> None:
        super().__init__()
        table = _embedding(model)
        which = generator(seed, purpose="prompt").integers(0, table.num_embeddings, tokens)
        self.embeddings = nn.Parameter(table.weight.detach()[torch.from_numpy(which)].clone())

    def files(self) -> dict[str, Tensor]:
        """As Hugging Face calls them."""
        return {"prompt_embeddings": self.embeddings}


def _embedding(model: nn.Module) -> nn.Embedding:
    if isinstance(model, Transformer):
        return model.embed
    get = getattr(model, "get_input_embeddings", None)
    result = None if get is None else get()
    if not isinstance(result, nn.Embedding):
        raise ConfigError(
            "finetune.prompt: the model does not say where its embedding is; give a Transformer, "
            "or a module with get_input_embeddings()"
        )
    return result


def sizes(model: nn.Module) -> tuple[int, int, int, int]:
    """Layers, key/value heads, head_dim and hidden."""
    config: Any = getattr(model, "config", None)
    if isinstance(model, Transformer):
        return config.num_layers, config.num_kv_heads, config.head_dim, config.hidden
    try:
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return config.num_hidden_layers, kv_heads, width, config.hidden_size
    except AttributeError:
        raise ConfigError(
            "finetune.prefix: the model does not say what its attention looks like; give a "
            "Transformer, or a model of the transformers library"
        ) from None


def _attention(
    self: Attention,
    source: Source,
    x_BTD: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None = None,
    cache: KVCache | None = None,
) -> Tensor:
    """Attention that also sees trained keys and values; arguments as of the attention's own."""
    batch, length, _ = x_BTD.shape
    q, k, v = self._project(x_BTD, cos, sin)
    if cache is not None:
        k, v = cache.append(self.layer, k, v)
    key, value = (t.expand(batch, *t.shape) for t in source(self.layer, k.dtype))
    if mask is None:
        seen = k.shape[1]
        mask = torch.full((length, seen), float("-inf"), dtype=q.dtype, device=q.device)
        mask = mask.triu_(1 + seen - length)
    out = attend(
        q.transpose(1, 2),
        torch.cat([key, k], 1).transpose(1, 2),
        torch.cat([value, v], 1).transpose(1, 2),
        F.pad(mask, (key.shape[1], 0)),
        causal=False,
    )
    mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
    return mixed


def _see(handle: ModelPeftHandle, model: Transformer, source: Source) -> None:
    """Let every attention of a model see what the source has."""
    for block in model.blocks:
        attention: Any = block.attention
        if "forward" in vars(attention):
            raise ConfigError(
                f"finetune.{handle.name}: a prefix or prompt is in the model already; remove it"
            )
        attention.forward = partial(_attention, attention, source)
        handle.later(partial(vars(attention).pop, "forward"))


def _turned(model: Transformer, keys: Tensor, by: int) -> Tensor:
    """Keys turned back by some places."""
    place = torch.full((len(keys),), -float(by), device=keys.device)
    frequencies, _ = model.unstretched  # the keys have whatever size they were trained to
    cos, sin = tables_at(place, frequencies, 1.0, keys.dtype)
    return rotate(keys.unsqueeze(0), cos, sin)[0]


def prefix(handle: ModelPeftHandle, module: PrefixTokens) -> None:
    """Let a model see the keys and values of a prefix."""
    model = handle.model
    if not isinstance(model, Transformer):
        _cached(handle, module)
        return

    def source(layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = module.pair(layer)
        return _turned(model, keys, len(keys)).to(dtype), values.to(dtype)

    _see(handle, model, source)


def prompt(handle: ModelPeftHandle, module: PromptEmbeddings) -> None:
    """Let a model see a prompt."""
    model = handle.model
    if not isinstance(model, Transformer):
        _embedded(handle, module)
        return
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def source(layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = kept[layer]
        return keys.to(dtype), values.to(dtype)

    own = model.hidden

    def hidden(tokens_BT: Tensor, **options: Any) -> Tensor:
        _compute(model, module.embeddings, kept)
        return own(tokens_BT, **options)

    _see(handle, model, source)
    model.hidden = hidden  # type: ignore[method-assign]
    handle.later(partial(vars(model).pop, "hidden"))


class _Keeping(KVCache):
    """A cache that keeps what it is given as it is, gradients and all."""

    def __init__(self, kept: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.length = 0
        self._kept = kept

    def append(
        self, layer: int, k_BTKd: Tensor, v_BTKd: Tensor, prefix_2PMKd: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keep keys and values of a layer; they are all there are."""
        assert prefix_2PMKd is None  # models with streams are refused
        self._kept[layer] = k_BTKd[0], v_BTKd[0]
        return k_BTKd, v_BTKd


def _compute(
    model: Transformer, embeddings: Tensor, kept: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Keys and values of a prompt, at the places before 0."""
    x = embeddings.unsqueeze(0)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    place = torch.arange(-len(embeddings), 0, dtype=torch.float32, device=x.device)
    cos, sin = tables_at(place, *model.unstretched, x.dtype)
    cache = _Keeping(kept)
    for block in model.blocks:
        attention: Any = block.attention
        patched = vars(attention).pop("forward")  # the prompt sees itself alone
        try:
            x = block(x, cos, sin, None, cache)
        finally:
            attention.forward = patched


def _cached(handle: ModelPeftHandle, module: PrefixTokens) -> None:
    """Give a prefix to a model of the transformers library, as what it has cached."""

    def before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from transformers import DynamicCache

        tokens = kwargs.get("input_ids", args[0] if args else None)
        if kwargs.get("past_key_values") is not None:
            return None
        batch = len(kwargs["inputs_embeds"] if tokens is None else tokens)
        cache = DynamicCache()
        for layer in range(module.sizes[0]):
            keys, values = (t.transpose(0, 1).expand(batch, -1, -1, -1) for t in module.pair(layer))
            cache.update(keys, values, layer)
        return args, {**kwargs, "past_key_values": cache, **_longer(kwargs, len(module.inputs))}

    handle.later(handle.model.register_forward_pre_hook(before, with_kwargs=True).remove)


def _longer(kwargs: dict[str, Any], by: int) -> dict[str, Any]:
    """An attention mask that sees so many more tokens, if one is given."""
    mask = kwargs.get("attention_mask")
    return {} if mask is None else {"attention_mask": F.pad(mask, (by, 0), value=1)}


def _embedded(handle: ModelPeftHandle, module: PromptEmbeddings) -> None:
    """Put a prompt before the embeddings of a model, and take its outputs away again."""
    count = len(module.embeddings)
    table = _embedding(handle.model)

    def before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        given = kwargs.get("inputs_embeds")
        embedded = table(tokens) if given is None else given
        prompt = module.embeddings.to(embedded.dtype).expand(len(embedded), -1, -1)
        rest = {name: value for name, value in kwargs.items() if name != "input_ids"}
        rest["inputs_embeds"] = torch.cat([prompt, embedded], 1)
        return args[1:], {**rest, **_longer(kwargs, count)}

    def after(model: Any, args: Any, kwargs: Any, out: Any) -> Any:
        out.logits = out.logits[:, count:]
        return out

    handle.later(handle.model.register_forward_pre_hook(before, with_kwargs=True).remove)
    handle.later(handle.model.register_forward_hook(after, with_kwargs=True).remove)
