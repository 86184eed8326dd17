"""Engines that serve: what one adds to the kernels of a step, and how long it takes to answer.

The constants are set by measured runs, whole models or whole devices left out where they are
judged (:mod:`shoal.cost.published.silicon`).
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.errors import nearest, require

__all__ = ["ENGINES", "PLAIN", "ServingEngine", "serving_engine"]


@dataclass(frozen=True)
class ServingEngine:
    """How a program runs a step of serving on accelerators.

    Args:
        name: of the program.
        kernels: its kernels' seconds over those of the fastest ones that were measured.
        wire: its collectives' seconds over those of the fastest ones that were measured.
        step_s: its own seconds of a step, which no kernel hides.
        sequence_s: its own seconds for a sequence of a step.
        prompts: share of a prompt's kernels that delays the tokens of others.
        shared_s: seconds of a layer whose experts other replicas share, beside the exchange.
        graphs: kernels are launched by recorded graphs, not one by one.
        first_s: seconds before a request is computed, and until its first token is out.
        first_prompt: seconds of a prompt's own kernels that the first token takes, as a share.
        queue: share of the prompts of all concurrent requests that a request waits for.
        queue_s: seconds that each concurrent request of the replica adds to a first token.
        hand_over_s: seconds to hand a prompt's cache to a device that decodes.
        kv_format: format of cached keys and values with weights of less than 16 bits.
    """

    name: str
    kernels: float = 1.0
    wire: float = 1.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    prompts: float = 1.0
    shared_s: float = 0.0
    graphs: bool = True
    first_s: float = 0.0
    first_prompt: float = 1.0
    queue: float = 0.05
    queue_s: float = 0.0
    hand_over_s: float = 0.0
    kv_format: str = "fp8"


PLAIN = ServingEngine("fastest kernels")
"""An engine that adds nothing to the fastest kernels."""

ENGINES = {
    # Not measured on a GPU: operators of PyTorch, launched one by one; the host's own work on a
    # core of 2023.
    "shoal": ServingEngine("Shoal", step_s=3e-4, sequence_s=3e-5, graphs=False, kv_format="bf16"),
    "vllm": ServingEngine(
        "vLLM",
        kernels=1.041,
        wire=1.0,
        step_s=1e-6,
        sequence_s=1.1e-5,
        prompts=0.838,
        shared_s=2.9e-5,
        first_s=0.0163,
        first_prompt=1.288,
        queue=0.0565,
        queue_s=7.4e-4,
    ),
    "sglang": ServingEngine(
        "SGLang",
        kernels=1.002,
        wire=1.0,
        step_s=9e-6,
        sequence_s=2.7e-5,
        prompts=0.657,
        first_s=0.226,
        first_prompt=0.128,
        queue=0.2148,
        queue_s=2.64e-3,
        hand_over_s=0.032,
    ),
    "trtllm": ServingEngine(
        "TensorRT-LLM",
        kernels=0.975,
        wire=0.986,
        step_s=5e-6,
        sequence_s=1e-5,
        prompts=0.909,
        first_s=0.0462,
        first_prompt=1.967,
        queue=0.0541,
        queue_s=1.39e-3,
        hand_over_s=0.078,
    ),
}
"""Engines by the names of their emitters; the constants are those of
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
