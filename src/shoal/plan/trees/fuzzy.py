"""Which layers of a draft read the same input: search, and what it would take on many devices.

Layers of a group compute their attention from what enters the group, side by side. The guesses
are a little worse, and sooner there. Torch-free.

Source: Wu et al., EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU
Utilization, 2025, sections 3.1 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.core.errors import ConfigError, require

Groups = tuple[int, ...]
"""Layers of each group, from the first layer on; a layer alone is a group of 1."""


def spans(groups: Groups, num_layers: int, where: str = "group") -> list[range]:
    """The layers of each group.

    Raises:
        ConfigError: the groups are not all layers, or the first or last layer is not alone.
    """
    if any(size < 1 for size in groups) or sum(groups) != num_layers:
        raise ConfigError(
            f"{where} = {list(groups)}: expected sizes of 1 or more that add up to the "
            f"{num_layers} layers of the draft"
        )
    if max(groups) > 1 and (groups[0] != 1 or groups[-1] != 1):
        raise ConfigError(
            f"{where} = {list(groups)}: the first and the last layer must stand alone, "
            "their input changes most; begin and end with 1"
        )
    spans, first = [], 0
    for size in groups:
        spans.append(range(first, first + size))
        first += size
    return spans


def even_groups(size: int, num_layers: int, where: str = "group") -> Groups:
    """Groups of one size between the first layer and the last; the rest is the last group.

    Raises:
        ConfigError: no such group fits.
    """
    require(size >= 1, where, size, expected="1 or more")
    require(
        size == 1 or size <= num_layers - 2,
        where,
        size,
        expected=f"at most {max(1, num_layers - 2)}: a draft of {num_layers} layers, of which the "
        "first and the last stand alone",
        hint="take a deeper draft, or group: 1, which is plain drafting",
    )
    if size == 1:
        return (1,) * num_layers
    inner = num_layers - 2
    rest = (inner % size,) if inner % size else ()
    return (1, *((size,) * (inner // size)), *rest, 1)


def search(num_layers: int, seconds_a_token: Callable[[Groups], float]) -> Groups:
    """Enlarge groups one after the other while a guessed token gets cheaper.

    Args:
        num_layers: of the draft.
        seconds_a_token: what drafting with these groups costs for each token that is accepted:
            time of a draft step and how many rounds are needed, together.
    """
    best: Groups = (1,) * num_layers
    value = seconds_a_token(best)
    place = 1
    while place < len(best) - 1:
        # Take the layer behind a group into it; where that does not pay, go on behind it.
        while place + 1 < len(best) - 1:
            tried = (*best[:place], best[place] + 1, *best[place + 2 :])
            cost = seconds_a_token(tried)
            if cost >= value:
                break
            best, value = tried, cost
        place += 1
    return best


def draft_step_s(
    groups: Groups,
    *,
    attention_s: Sequence[float],
    mlp_s: Sequence[float],
    gather_s: float,
    devices: int,
    exchange_s: float = 0.0,
) -> float:
    """Seconds of a draft step on several devices: attention by layers, MLPs by width.

    Args:
        groups: of the draft.
        attention_s: of each layer on one device.
        mlp_s: the same for feed-forward layers.
        gather_s: of the exchange of what a group's attention gives.
        devices: at most so many layers of a group at a time, and shares of an MLP.
        exchange_s: of the sum after an MLP that is shared.
    """
    require(devices >= 1, "devices", devices, expected="1 or more")
    total = 0.0
    for layers in spans(groups, len(attention_s)):
        waves = [layers[at : at + devices] for at in range(0, len(layers), devices)]
        if len(layers) == 1:  # one layer alone is shared by width, as the others' MLPs are
            total += attention_s[layers[0]] / devices + (exchange_s if devices > 1 else 0.0)
        else:
            total += sum(max(attention_s[layer] for layer in wave) for wave in waves)
            total += gather_s if devices > 1 else 0.0
        total += sum(mlp_s[layer] for layer in layers) / devices
        total += len(layers) * (exchange_s if devices > 1 else 0.0)
    return total
