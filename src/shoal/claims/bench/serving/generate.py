"""Hugging Face ``generate``, measured under its two knobs: size of a batch, and how it is padded.

Requests are taken in batches, each padded on the left to its longest prompt and run to its longest
answer: ``longest`` in the order in which they came, ``sorted`` by their length, ``full`` in the
order in which they came with every batch as wide as the longest prompt of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ServeError, UnknownKeyError, nearest
from shoal.core.extras import import_extra
from shoal.cost.serving.simulator import ServedRequest
from shoal.ir import Arrival, ServeJob
from shoal.model import huggingface
from shoal.plan.tune.protocols import Axis, Config, SearchSpace, Setting
from shoal.plan.tune.serving import ServingSample
from shoal.serve.bench.tune import MeasureProcess, Start, failure, sample_of, workload_of

PADDINGS = ("longest", "sorted", "full")


def generate_space(
    batches: Sequence[Setting] = (1, 2, 4, 8, 16, 32), paddings: Sequence[Setting] = PADDINGS
) -> SearchSpace:
    """The knobs of :class:`GenerateRunner`."""
    return SearchSpace(
        axes=(
            Axis(name="batch", values=tuple(batches)),
            Axis(name="padding", values=tuple(paddings)),
        )
    )


@dataclass(eq=False, kw_only=True)
class GenerateRunner:
    """Serves in this process.

    Args:
        model: what :meth:`load` gives.
        threads: that compute; as many as there are if 0.
    """

    model: Any
    threads: int = 0

    @classmethod
    def load(cls, directory: str, *, threads: int = 0) -> GenerateRunner:
        """The model of a directory.

        Raises:
            MissingExtraError: transformers is not installed.
        """
        transformers: Any = import_extra(
            "transformers", extra="bench", purpose="measuring Hugging Face generate"
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="sdpa"
        ).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return cls(model=model, threads=threads)

    def measure(self, config: Config, workload: Sequence[Arrival], seconds: float) -> ServingSample:
        """See :class:`~shoal.plan.tune.serving.Measure`.

        All tokens of a batch are there when it ends, so the time to the first one is not reported.
        """
        if self.threads:
            torch.set_num_threads(self.threads)
        batch, padding = int(config["batch"]), str(config["padding"])
        places = list(range(len(workload)))
        if padding == "sorted":
            places.sort(key=lambda n: len(workload[n].prompt))
        widest = max(len(one.prompt) for one in workload) if padding == "full" else 0
        served: list[ServedRequest] = []
        cache_bytes = 0
        began = time.perf_counter()
        for first in range(0, len(places), batch):
            some = [workload[n] for n in places[first : first + batch]]
            time.sleep(max(0.0, max(one.at for one in some) - (time.perf_counter() - began)))
            left = seconds - (time.perf_counter() - began)
            most = max(one.output_tokens for one in some)
            made = 0
            if left > 0:
                try:
                    made, size = self._generate(some, widest, most, left)
                except (MemoryError, RuntimeError) as cause:
                    return ServingSample(seconds=time.perf_counter() - began, failed=failure(cause))
                cache_bytes = max(cache_bytes, size)
            now = time.perf_counter() - began
            if made < most:
                said = f"out of time: not served within {seconds:.3g} s"
                return ServingSample(seconds=now, failed=said)
            for n, one in zip(places[first : first + batch], some, strict=True):
                done = ServedRequest(str(n), one.at, len(one.prompt), n_output=one.output_tokens)
                done.finish = now
                served.append(done)
        weights = sum(p.nbytes for p in self.model.parameters())
        return sample_of(served, memory_bytes=float(weights + cache_bytes))

    def _generate(
        self, some: Sequence[Arrival], widest: int, most: int, seconds: float
    ) -> tuple[int, int]:
        """New tokens of a row, and bytes of the cache."""
        width = max(widest, *(len(one.prompt) for one in some))
        ids = torch.zeros((len(some), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(some):
            ids[row, width - len(one.prompt) :] = torch.tensor(one.prompt)
            mask[row, width - len(one.prompt) :] = 1
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=most,
                min_new_tokens=most,
                max_time=None if math.isinf(seconds) else seconds,
            )
        shape = self.model.config
        head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head
        size = len(some) * out.shape[1] * token * next(self.model.parameters()).element_size()
        return out.shape[1] - width, size


def transformers_engine(
    job: ServeJob, given: Mapping[str, Sequence[Setting]]
) -> tuple[SearchSpace, Start]:
    """The knobs of ``generate``, and what loads it and its workload.

    Args:
        job: model and workload.
        given: values of knobs.

    Raises:
        ConfigError: a knob that there is not.
    """
    known = ("batch", "padding")
    for name in given:
        if name not in known:
            raise UnknownKeyError(
                f"tune.{name}: not an option of transformers; expected one of {', '.join(known)}; "
                + nearest(name, known)
            )
    values = {"paddings": given.get("padding", PADDINGS)}
    if "batch" in given:
        values["batches"] = given["batch"]

    def start(requests: int | None) -> tuple[MeasureProcess, Sequence[Arrival]]:
        if not Path(job.model, "config.json").is_file():
            raise ServeError(f"model = {job.model!r}: transformers needs a Hugging Face directory")
        shape = huggingface.read_config(Path(job.model)).shape()
        options = {"directory": job.model, "threads": job.threads}
        runner = MeasureProcess(make=GenerateRunner.load, arguments=options)
        return runner, workload_of(job, shape, requests)

    return generate_space(**values), start
