"""What claim [63] Ladder-residual runs on two ranks: counted sums, and decoding in turn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shoal.claims.experiments.tiny import llama, requests, served
from shoal.core.random import generator
from shoal.ir import ServeJob

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer
    from shoal.parallel.protocols import Comm
    from shoal.serve.ranks.workers import RankedEngine

__all__ = ["Decoding", "counted"]

_VOCAB = 1024


def _config(kind: str, hidden: int, layers: int) -> ModelConfig:
    """A model whose attention and feed-forward layer take about as long."""
    return llama(
        hidden, layers, max(2, hidden // 64), vocab=_VOCAB, ffn=2 * hidden, head_dim=64,
        family="parallel" if kind == "parallel" else "llama", initializer_range=0.1, tied=True,
        architecture={"residual": "ladder" if kind == "ladder" else "standard"},
    )  # fmt: skip


class _Counting:
    """Notes, of every sum, how many had begun when it was waited for."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.begun, self.late = comm, 0, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, x: Any, **options: Any) -> Any:
        pending, number = self._comm.all_reduce(x, **options), self.begun
        self.begun += 1

        class Waited:
            def wait(_) -> None:  # noqa: N805
                self.late.append(self.begun - number - 1)
                pending.wait()

        return Waited()


class _Weights:
    """The parameters of a model in memory, as those of a directory."""

    def __init__(self, model: Transformer) -> None:
        self.config, self.dtype = model.config, model.weight.dtype
        self._found = dict(model.named_parameters())

    def __call__(self, name: str) -> Tensor:
        return self._found[name].detach().reshape(-1)


def _attend(layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
    """Attention of one sequence from its beginning."""
    from shoal.model.attention import attend

    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHd, k_NKd, v_NKd))
    return attend(q, k, v, None, causal=True)[0].transpose(0, 1)


def counted(kind: str, seed: int) -> tuple[int, int, int]:
    """One pass of a small model on two ranks, and on one.

    Returns:
        Sums; how many had begun since, at least, when each but the last two was waited for; and
        next tokens that are not those of one process.
    """
    import torch

    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.serve.engine.build import prepare
    from shoal.serve.ranks.boundary import RankBoundary
    from shoal.serve.ranks.part import PartModel
    from shoal.train.zoo import random

    config = _config(kind, 128, 4)
    job = ServeJob(model=kind, precision="fp32", threads=1)
    tokens = torch.from_numpy(generator(seed, purpose="prompt").integers(0, _VOCAB, 48))
    places = torch.arange(len(tokens))

    def rank(comm: Comm) -> tuple[_Counting, Tensor | None]:
        log: Any = _Counting(comm)
        alone = RankBoundary(comm.split([[0], [1]]), config.hidden, torch.float32)
        model = PartModel(job, _Weights(random(config, seed)), log, alone, range(4))  # type: ignore[arg-type]
        log.begun, log.late = 0, []
        with torch.inference_mode():
            hidden = model.flat(tokens, places, _attend)
            assert hidden is not None
            return log, model.logits(hidden)

    (log, shared), _ = run_ranks(2, rank)
    assert shared is not None
    with torch.inference_mode():
        whole = prepare(job, random(config, seed))
        want = whole.logits(whole.flat(tokens, places, _attend))
    # The embedding is a sum too; it begins and ends before the first layer.
    late = log.late[1:-2]
    return log.begun, min(late), int((shared.argmax(-1) != want.argmax(-1)).sum())


class Decoding:
    """Engines of two processes each, which generate from the same prompts in turn.

    Args:
        folder: for their model directories.
        hidden: width.
        layers: blocks.
        requests: at once.
        tokens: of each.
        seed: of weights and prompts.
    """

    def __init__(
        self, folder: Path, hidden: int, layers: int, requests: int, tokens: int, seed: int
    ) -> None:
        self._folder, self._sizes = folder, (hidden, layers)
        self._requests, self._tokens, self._seed = requests, tokens, seed
        self._engines: dict[str, RankedEngine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close()

    def open(self, name: str, kind: str, **emulated: Any) -> None:
        """Start two ranks, in the place of those that had the name.

        Args:
            name: of these.
            kind: ``ladder``, ``standard`` or ``parallel``.
            emulated: ``latency_s`` and ``sums`` of their runner.
        """
        from shoal.model import huggingface
        from shoal.serve.ranks.workers import ranked_engine
        from shoal.train.zoo import random

        directory = self._folder / kind
        if not directory.exists():
            huggingface.write(directory, random(_config(kind, *self._sizes), self._seed))
        job = ServeJob.model_validate(
            {
                "model": str(directory),
                "precision": "fp32",
                "threads": 1,
                "kv_tokens": 4096,
                "parallel": {"tp": 2},
                "kv": {"name": "paged", "prefix_reuse": False},
            }
        )
        config = huggingface.read_config(directory)
        if name in self._engines:
            self._engines.pop(name).close()
        self._engines[name] = ranked_engine(job, config, **emulated)
        self.run(name)

    def run(self, name: str) -> None:
        """Generate all tokens of all requests."""
        prompts = (
            generator(self._seed, purpose="prompt", index=number).integers(0, _VOCAB, 4).tolist()
            for number in range(self._requests)
        )
        served(self._engines[name], requests(prompts, self._tokens))
