"""Engines that serve: what one adds to the kernels of a step, and how long it takes to answer.

The constants are set by measured runs, whole models or whole devices left out where they are
judged (:mod:`shoal.cost.published.silicon`).
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.errors import nearest, require


@dataclass(frozen=True)
class ServingEngine:
    """How an engine runs a serving step on accelerators.

    Args:
        kernels: its kernels' seconds over those of the fastest ones that were measured.
        wire: its collectives' seconds over those of the fastest ones that were measured.
        step_s: its own seconds of a step, which no kernel hides.
        sequence_s: its own seconds for a sequence of a step.
        prompts: share of a prompt's kernels that delays the tokens of others.
        shared_s: seconds of a layer whose experts other replicas share, beside the exchange.
        groups: groups of devices can have separate attention and share the experts.
        graphs: kernels are launched by recorded graphs, not one by one.
        first_s: seconds before a request is computed, and until its first token is out.
        first_prompt: seconds of a prompt's own kernels that the first token takes, as a share.
        queue: share of the prompts of all concurrent requests that a request waits for.
        queue_s: seconds that each concurrent request of the replica adds to a first token.
        hand_over_s: seconds to hand a prompt's cache to a device that decodes.
        kv_format: format of cached keys and values with weights of less than 16 bits.
        fused: weights of few bits are unpacked inside products, and attention and chains of
            elementwise operators are single kernels.
        overlap: a step consists of two halves; compute-bound operators of one overlap with memory-
            and link-bound operators of the other.
        mixed: prompts and decodes share a step; otherwise prompts have separate steps.
        layer_s: seconds of a layer's kernels beyond those of an engine that fuses them.
        chunk: most tokens of a prompt in a step.
        reserves: a request enters when its whole answer fits into the cache.
        calls: on a CPU, seconds of an operator's launch over those of the framework's.
        products: on a CPU, rate of products over that of the fastest ones.
        packed: on a CPU, type of products with weights of few bits; that of others if empty.
    """

    name: str
    kernels: float = 1.0
    wire: float = 1.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    prompts: float = 1.0
    shared_s: float = 0.0
    groups: bool = False
    graphs: bool = True
    first_s: float = 0.0
    first_prompt: float = 1.0
    queue: float = 0.05
    queue_s: float = 0.0
    hand_over_s: float = 0.0
    kv_format: str = "fp8"
    fused: bool = True
    overlap: bool = False
    mixed: bool = True
    layer_s: float = 0.0
    chunk: int = 8192
    most: int = 256
    reserves: bool = False
    calls: float = 2.5
    products: float = 1.0
    packed: str = ""


PLAIN = ServingEngine("fastest kernels")
"""An engine that adds nothing to the fastest kernels."""

ENGINES = {
    # Not measured on a GPU: operators of PyTorch, launched one by one; the host's own work on a
    # core of 2023.
    "shoal": ServingEngine("Shoal", step_s=3e-4, sequence_s=3e-5, graphs=False, kv_format="bf16"),
    "vllm": ServingEngine(
        "vLLM",
        groups=True,
        kernels=1.043,
        wire=1.004,
        step_s=6e-6,
        sequence_s=1.4e-5,
        prompts=0.986,
        shared_s=2.9e-5,
        first_s=0.0168,
        first_prompt=1.402,
        queue=0.0663,
        queue_s=7.3e-4,
    ),
    "sglang": ServingEngine(
        "SGLang",
        groups=True,
        kernels=1.003,
        wire=0.999,
        step_s=1.4e-5,
        sequence_s=2.9e-5,
        prompts=0.827,
        first_s=0.2247,
        first_prompt=0.177,
        queue=0.2527,
        queue_s=2.91e-3,
        hand_over_s=0.0325,
    ),
    "trtllm": ServingEngine(
        "TensorRT-LLM",
        groups=True,
        kernels=0.984,
        wire=0.999,
        step_s=1.9e-5,
        sequence_s=1.24e-5,
        prompts=0.999,
        first_s=0.0452,
        first_prompt=2.36,
        queue=0.053,
        queue_s=1.54e-3,
        hand_over_s=0.0894,
        # Settings of trtllm-bench and the default policy of its scheduler, guaranteed_no_evict.
        most=2048,
        reserves=True,
    ),
    # Settings of llama-bench; kernels of a layer counted in its graph for CUDA: 23 beside products
    # and attention, where others have five, 2.2 us each. On a CPU, C++ launches and rows unpacked
    # to eight bits as they are read; no measured run sets these.
    "llamacpp": ServingEngine(
        "llama.cpp",
        fused=False,
        layer_s=3.7e-5,
        chunk=512,
        calls=0.5,
        products=0.4,
        packed="int8",
        kv_format="bf16",
    ),
}
"""Engines by the names of their emitters; constants of vLLM, SGLang and TensorRT-LLM are those of
:func:`shoal.cost.published.silicon_calibration.fitted`."""


def serving_engine(name: str) -> ServingEngine:
    """An engine by its name.

    Raises:
        ConfigError: there is none of this name.
    """
    require(
        name in ENGINES,
        "engine",
        name,
        expected=f"one of {', '.join(ENGINES)}; {nearest(name, ENGINES)}",
    )
    return ENGINES[name]
