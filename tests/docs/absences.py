"""What the documentation says that Shoal does not do, each with a check that it is still so.

A row is a page, a text of it (whitespace does not matter), and a function that returns whether the
text is true. ``test_absences.py`` compares both with the pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from docs_pages import ROOT

from shoal.core.errors import ShoalError


class Absence(NamedTuple):
    """Something that is absent.

    Args:
        page: its path below the root.
        text: what the page says.
        holds: whether it is true.
    """

    page: str
    text: str
    holds: Callable[[], bool]


def refused(**job: Any) -> bool:
    """Whether a training job is an error before it starts."""
    from shoal.cost.shapes import shape_of
    from shoal.ir import TrainJob
    from shoal.parallel.legal import check_split

    try:
        parsed = TrainJob.model_validate({"model": "shoal-4m", "steps": 1, **job})
        check_split(parsed, shape_of(parsed))
    except ShoalError:
        return True
    return False


def only_refused(plain: dict[str, Any], *cases: dict[str, Any]) -> bool:
    """Whether ``plain`` is a job, and none of the cases beside it."""
    return not refused(**plain) and all(refused(**{**plain, **case}) for case in cases)


def ladder() -> bool:
    architecture = {"residual": "ladder"}
    return only_refused(
        {"architecture": architecture, "parallel": {"dp": 2, "tp": 2}},
        {"parallel": {"pp": 2}},
        {"parallel": {"cp": 2}},
        {"parallel": {"tp": 2, "sp": True}},
        {"shard": "zero3"},
        {"offload": "zero_infinity"},
        {"compile": True},
    )


def one_architecture() -> bool:
    from shoal.ir.architecture import Architecture

    both = ({"residual": "ladder", "streams": 2}, {"residual": "ladder", "ffn": "duo"})
    Architecture.model_validate({"residual": "ladder"}).check(2)
    for raw in both:
        try:
            Architecture.model_validate(raw).check(2)
        except ShoalError:
            continue
        return False
    return True


def fine_tuned() -> bool:
    return only_refused(
        {"finetune": "lora", "parallel": {"dp": 2}},
        {"parallel": {"tp": 2}},
        {"parallel": {"pp": 2}},
        {"parallel": {"cp": 2}},
        {"offload": "zero_infinity"},
        {"checkpoint": {"dump": "deepspeed"}},
    )


def ragged() -> bool:
    plain = {
        "packing": "document",
        "batching": {"name": "bytescale", "capacity_tokens": 256},
        "parallel": {"dp": 2},
    }
    return only_refused(
        plain,
        {"parallel": {"dp": 2, "tp": 2}},
        {"parallel": {"dp": 2, "pp": 2}},
        {"parallel": {"dp": 2, "cp": 2}},
        {"shard": "zero2"},
        {"shard": "zero3"},
        {"finetune": "lora"},
        {"compile": True},
    )


def rounds() -> bool:
    shards = ("zero2", "zero3", "hybrid", "topo3")
    return only_refused(
        {"sync": "co2", "parallel": {"dp": 4}}, *({"shard": shard} for shard in shards)
    )


def served(**job: Any) -> bool:
    """Whether ranks can serve a job."""
    from shoal.ir import ServeJob
    from shoal.model.config import ModelConfig
    from shoal.serve.ranks.part import check_parts

    config = ModelConfig(
        name="model", vocab_size=64, hidden=32, num_layers=4, num_heads=4, num_kv_heads=4,
        head_dim=8, ffn_hidden=64, max_position=64,
    )  # fmt: skip
    try:
        check_parts(
            ServeJob.model_validate({"model": "model", "parallel": {"tp": 2}, **job}), config
        )
    except ShoalError:
        return False
    return True


def ranks() -> bool:
    apart = {"prefill": 1, "decode": 1}
    return served() and not served(disagg=apart) and not served(weights="int4-g128")


def one_process_of_a_phase() -> bool:
    from shoal.ir import ServeJob
    from shoal.serve.cluster.disagg import DisaggEngine

    def possible(tp: int) -> bool:
        phases = {"prefill": {"count": 1, "tp": tp}, "decode": 1}
        try:
            DisaggEngine._check(ServeJob.model_validate({"model": "model", "disagg": phases}), 0)
        except ShoalError:
            return False
        return True

    return possible(1) and not possible(2)


def one_process_of_a_lender() -> bool:
    from shoal.ir import ServeJob
    from shoal.serve.cluster.distkv import DistKVEngine

    def refused_by_name(name: str, **job: Any) -> bool:
        raw = {"model": "model", "kv": {"name": "distributed", "instances": 2}, **job}
        try:
            DistKVEngine(ServeJob.model_validate(raw))
        except ShoalError as error:
            return str(error).startswith(name)
        return False

    split = refused_by_name("kv.distributed", parallel={"tp": 2})
    return split and refused_by_name("preempt", preempt="swap", host_tokens=64)


def adapters_of_many_rows() -> bool:
    from types import SimpleNamespace

    from shoal.ir import ServeJob
    from shoal.ir.architecture import Architecture
    from shoal.serve.adapters.hook import adapters_of

    job = ServeJob.model_validate({"model": "model", "adapters": {"one": "missing"}})

    def error(architecture: dict[str, Any]) -> str:
        config = SimpleNamespace(architecture=Architecture.model_validate(architecture))
        built: Any = SimpleNamespace(job=job, model=SimpleNamespace(config=config))
        try:
            adapters_of(built)
        except ShoalError as cause:
            return str(cause)
        except (AttributeError, OSError):  # it goes on, and the stand-in is no model
            return ""
        return ""

    many = ({"streams": 2}, {"residual": "desync"})
    return "several rows" not in error({}) and all("several rows" in error(one) for one in many)


def under_torchrun() -> bool:
    from types import SimpleNamespace

    from shoal.train.torchrun import execute_under_torchrun

    job = SimpleNamespace(checkpoint=SimpleNamespace(memory="xor"))
    plan: Any = SimpleNamespace(job=job)
    try:
        execute_under_torchrun(plan, ROOT, resume=False)
    except ShoalError as error:
        return "torchrun" in str(error)
    return False


def tuned() -> bool:
    from shoal.api.measuring import TUNED_ENGINES
    from shoal.plan.tune.serving import KNOBS

    return (
        not any("tp" in name or "parallel" in name for name in KNOBS)
        and "vllm" not in TUNED_ENGINES
    )


def no_gpu() -> bool:
    """No file of results was written on a machine with a GPU."""

    def described(node: Any) -> bool:
        if isinstance(node, dict):
            return "gpu" in node or any(map(described, node.values()))
        return False

    files = list((ROOT / "results").rglob("*.json"))
    tops = (json.loads(path.read_text(encoding="utf-8")) for path in files)
    machines = (top.get("machine", top.get("fingerprint", {})) for top in tops)
    return len(files) > 50 and not any(map(described, machines))


def families() -> bool:
    from shoal.core.parts import table

    others = {"parallel", "mdlm"}  # of Shoal's own
    return set(table("family")) - others == {"llama", "qwen2", "qwen3", "mixtral"}


def no_flag_for_the_key() -> bool:
    import typer

    from shoal.app.commands.serve import serve

    single = typer.Typer()
    single.command()(serve)
    flags = {name for option in typer.main.get_command(single).params for name in option.opts}
    return "--api-key-file" in flags and "--api-key" not in flags


def never(word: str, *, among: str) -> Callable[[], bool]:
    """Whether no part of a kind is called so."""

    def check() -> bool:
        from shoal.core.parts import table

        return not any(word in name.replace("_", "") for name in table(among))

    return check


def without(word: str, *names: str) -> Callable[[], bool]:
    """Whether some files do not contain a word."""
    return lambda: all(word not in (ROOT / name).read_text(encoding="utf-8") for name in names)


def no_code_of_models() -> bool:
    import sources

    return not any("trust_remote_code=True" in sources.text(path) for path in sources.paths())


ABSENCES = (
    Absence("README.md", "Shoal's own runtime was measured on CPUs only", no_gpu),
    Absence("README.md", "no number above comes from a GPU of ours", no_gpu),
    Absence("README.md", "runs no code from a model directory", no_code_of_models),
    Absence("README.md", "any Hugging Face directory of Llama, Qwen2, Qwen3, Mixtral", families),
    Absence("SECURITY.md", "CI does not run it yet.", without("audit", ".ci/run")),
    Absence(
        "deploy/README.md", "None of it has been run", without("docker", ".ci/run", "Makefile")
    ),
    Absence(
        "docs/how-to/serve-a-model.md",
        "they have not been run in Docker, Kubernetes or Grafana",
        without("docker", ".ci/run", "Makefile"),
    ),
    Absence(
        "docs/how-to/serve-a-model.md", "There is no option for the key itself", no_flag_for_the_key
    ),
    Absence(
        "docs/how-to/serve-a-model.md",
        "Ranks are not supported together with `--disagg` or with packed weights",
        ranks,
    ),
    Absence(
        "docs/how-to/serve-a-model.md",
        "Instances have one process each",
        one_process_of_a_phase,
    ),
    Absence(
        "docs/how-to/serve-a-model.md",
        "Instances run on one host, on CPUs, without ranks, and preempt by recomputation.",
        one_process_of_a_lender,
    ),
    Absence(
        "docs/how-to/benchmarks.md",
        "Tensor parallelism is not tuned, and vLLM is not measured",
        tuned,
    ),
    Absence(
        "docs/how-to/resume.md",
        "`checkpoint.memory` is not supported under `torchrun`",
        under_torchrun,
    ),
    Absence(
        "docs/how-to/change-the-architecture.md",
        "Pipeline, context and sequence parallelism, sharded weights, offloading, compiled steps "
        "and packed weights are not supported with these options",
        ladder,
    ),
    Absence(
        "docs/how-to/change-the-architecture.md",
        "Only one of them can be used at a time",
        one_architecture,
    ),
    Absence(
        "docs/how-to/change-the-architecture.md",
        "Adapters are not supported with desync or streams",
        adapters_of_many_rows,
    ),
    Absence(
        "docs/how-to/fine-tune.md", "a fine-tuned model is not split in other ways", fine_tuned
    ),
    Absence(
        "docs/how-to/train-on-your-text.md",
        "Supported families: Llama (and Mistral without a sliding window), Qwen2, Qwen3 and "
        "Mixtral",
        families,
    ),
    Absence(
        "docs/how-to/train-experts.md",
        "is not implemented, on purpose",
        never("soft_moe", among="gate"),
    ),
    Absence("docs/how-to/train-on-ragged-lengths.md", "`tp`, `pp` and `cp` are 1", ragged),
    Absence(
        "docs/how-to/train-over-slow-networks.md", "`zero2`, `zero3`, `hybrid`, `topo3`", rounds
    ),
    Absence(
        "docs/how-to/choose-a-split.md",
        "Muon and LAMB need whole matrices",
        lambda: only_refused(
            {"optimizer": "muon", "parallel": {"dp": 2}},
            {"shard": "zero3"},
            {"parallel": {"tp": 2}},
        ),
    ),
)
