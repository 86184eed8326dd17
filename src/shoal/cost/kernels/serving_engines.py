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
        eager_s: seconds of the host for a layer of a step with prompts, whose kernels are launched
            one by one where no recorded graph has so many tokens; what is computed hides them.
        recorded: most tokens of a step with prompts for which graphs are recorded.
        groups: groups of devices can have separate attention and share the experts.
        graphs: kernels are launched by recorded graphs, not one by one.
        first_prompt: seconds of a prompt's own kernels that the first token takes, as a share.
        first_steps: steps from a request's arrival until it is computed, and until its first token
            is out: engines look for requests, and send tokens, every so many steps.
        balance_steps: steps more in which replicas with common experts wait for each other's
            prompts.
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
    eager_s: float = 0.0
    recorded: int = 0
    groups: bool = False
    graphs: bool = True
    first_prompt: float = 1.0
    first_steps: float = 1.0
    balance_steps: float = 0.0
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
        kernels=1.02,
        wire=1.51,
        eager_s=0.00078,
        first_prompt=1.49,
        first_steps=2.05,
        balance_steps=1.14,
        queue_s=0.000616,
        # Piecewise graphs of up to 512 tokens (cudagraph_capture_sizes); others record tokens only.
        recorded=512,
    ),
    # Without its option for mixed chunks, prompts come before tokens, in steps of their own.
    "sglang": ServingEngine(
        "SGLang",
        groups=True,
        wire=1.02,
        sequence_s=3.05e-05,
        eager_s=0.000533,
        first_steps=25.1,
        queue_s=0.00102,
        hand_over_s=0.0589,
        mixed=False,
    ),
    "trtllm": ServingEngine(
        "TensorRT-LLM",
        groups=True,
        kernels=0.999,
        wire=0.941,
        sequence_s=3.93e-06,
        eager_s=0.000727,
        first_prompt=1.07,
        first_steps=13.2,
        balance_steps=28.2,
        hand_over_s=0.139,
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
