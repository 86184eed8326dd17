"""[130] BipolarInt: do products of few bits pay on this machine?

Source: Ma et al., Efficient Arbitrary Precision Acceleration for Large Language Models on GPU
Tensor Cores, 2024.

Layers of 4096 x 4096, bf16 in and out, weights from memory, beside PyTorch's bf16 product, int8 on
``vpdpbusd`` and the form that writes every product of two planes; and a mini-model with weights of
3 and activations of 8 bits after a minute of finetuning. The A/A run has bf16 products, written
planes and rounding without finetuning.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import Arm, ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.native import compiler
from shoal.core.parts import part
from shoal.kernel.calls import MatmulPlanesCall
from shoal.kernel.dispatch import here, kernels_of
from shoal.kernel.planes.engines import ENGINES, chosen

if TYPE_CHECKING:
    from shoal.ir import Machine

_BF16, _SPILLED = "torch bf16", "planes written"
# Odd lengths around a word, and one longer than a tile.
_LENGTHS = (1, 63, 65, 100, 200)
_MODEL, _FORMAT, _ACTIVATIONS = "shoal-4m-h128", "bipolar3-g64", "bipolar8"
_RECOVERED = {"fused": _SPILLED}
_GPU = ("gpu_w2a2_over_bf16", "gpu_w1a2_over_int8")


@part
class BipolarIntClaim(BaseClaim, row=130):
    """Layers of few bits against bf16 and int8, and a model that is finetuned to them.

    Args:
        size: outputs and inputs of the layers.
        tokens: rows of the large product.
        pairs: rounds of timings.
        buffers: weights that take turns; 20 of 4096 x 4096 in bf16 are 640 MB.
        finetune_s: seconds of finetuning.
    """

    size: Annotated[int, Ge(64)] = 4096
    tokens: Annotated[int, Ge(64)] = 256
    pairs: Annotated[int, Ge(3)] = 25
    buffers: Annotated[int, Ge(1)] = 20
    finetune_s: Annotated[float, Gt(0)] = 60.0

    def refuses(self, context: ExperimentContext) -> str | None:
        """Without an engine there is nothing to compare."""
        if compiler() is None:
            return "no C++ compiler; install g++"
        if all(engine.refuses() for engine in ENGINES.values()):
            return "this CPU has neither VNNI nor vpopcntdq"
        return None

    def collect(self, run: ClaimRun) -> None:
        """Count; the full run also times, for a minute, and finetunes, for another."""
        machine = run.context.machine or here()
        run.progress("all widths", 0.0)
        run.put("wrong_products", _wrong(run.seed, run.as_baseline))
        run.put("extra_memory", _memory(machine, run.as_baseline))
        if run.quick:
            return
        self._time(run, machine)
        run.progress("finetuning", 0.6)
        losses = run.details["losses"] = self._finetuned(run.context, run.as_baseline)
        run.put("finetuned_loss", losses["method"], losses["fp32"])

    def _time(self, run: ClaimRun, machine: Machine) -> None:
        import torch
        import torch.nn.functional as F

        from shoal.claims.experiments.bipolar_int_layers import fused, packed, spilled
        from shoal.claims.experiments.bipolar_int_peer import IntMatmulPeer
        from shoal.kernel.planes.bench import held, layer, turning

        n = k = self.size
        codes = [_codes(n, k, run.seed + i) for i in range(self.buffers)]
        dense = [(torch.rand(n, k) - 0.5).to(torch.bfloat16) for _ in range(self.buffers)]
        x = torch.randn(self.tokens, k, dtype=torch.bfloat16)
        one = x[:1].contiguous()

        def bf16(rows: torch.Tensor, times: int) -> Arm:
            return turning([lambda w=w: F.linear(rows, w) for w in dense], times)  # type: ignore[misc]

        def bits(rows: torch.Tensor, w: int, a: int, times: int, engine: str | None = None) -> Arm:
            best = ENGINES[engine] if engine else chosen(len(rows), n, k, w, a, k, machine)
            assert best is not None
            layers = [layer(best, held(c & (2**w - 1), w, a, tiles=best.tiles)) for c in codes]
            return turning([lambda ready=ready: ready(rows) for ready in layers], times)  # type: ignore[misc]

        times = 2
        methods: dict[str, Arm] = {
            _BF16: bf16(x, times),
            "w1a1": bf16(x, times) if run.as_baseline else bits(x, 1, 1, times),
            "w2a2": bf16(x, times) if run.as_baseline else bits(x, 2, 2, times),
        }
        vnni = ENGINES["vnni"].refuses()
        if vnni is None:
            methods["vnni"] = bits(x, 7, 8, times, "vnni")
        run.progress("the large product", 0.1)
        with IntMatmulPeer(self.tokens, n, k, self.buffers // 2, torch.get_num_threads()) as peer:
            answer = peer()
            if vnni is None and answer == "done":
                methods["peer"] = lambda: peer(times)
            seconds = run.race(methods, self.pairs, swaps={})
        large = {name: statistics.median(taken) / times for name, taken in seconds.items()}
        for name, bit in (("w1a1", 1), ("w2a2", 2)):
            bound = large[_BF16] / _roof_s(machine, self.tokens, n, k, bit, bit)
            run.put(f"{name}_over_bf16", seconds[name], seconds[_BF16], bound=bound)
        if "peer" in seconds:
            bound = large["peer"] / _roof_s(machine, self.tokens, n, k, 1, 1)
            ours = seconds[run.pick("w1a1", "vnni")]
            run.put("w1a1_over_vnni", ours, seconds["peer"], bound=bound)
        else:
            run.skip(vnni or f"oneDNN has no int8 product here: {answer}", "w1a1_over_vnni")

        run.progress("one row", 0.3)
        times = 10
        row = {
            _BF16: bf16(one, times),
            "w2a8": bf16(one, times) if run.as_baseline else bits(one, 2, 8, times),
        }
        seconds = run.race(row, self.pairs, swaps={})
        small = {name: statistics.median(taken) / times for name, taken in seconds.items()}
        bound = small[_BF16] / _roof_s(machine, 1, n, k, 2, 8)
        run.put("w2a8_one_row", seconds["w2a8"], seconds[_BF16], bound=bound)

        run.progress("recovery", 0.4)
        planes_x = packed(self.tokens, k, 2, run.seed)
        planes_w = [packed(n, k, 2, run.seed + i) for i in range(4)]
        forms = {
            name: [make(p, self.tokens, k, 2, machine) for p in planes_w]
            for name, make in run.arms({"fused": fused, _SPILLED: spilled}, _RECOVERED).items()
        }
        arms = {
            name: turning([lambda ready=ready: ready(planes_x) for ready in form], 2)  # type: ignore[misc]
            for name, form in forms.items()
        }
        seconds = run.race(arms, self.pairs, swaps={})
        run.put("recovery_gain", seconds["fused"], seconds[_SPILLED])
        self._gpu(run)
        run.profile = ", ".join(
            f"{name} {1e3 * s:.2f} ms" for name, s in (*large.items(), *small.items())
        )

    def _gpu(self, run: ClaimRun) -> None:
        """Triton's product against torch's."""
        import torch

        call = MatmulPlanesCall(m=self.tokens, n=self.size, k=self.size, w=2, a=2, device="cuda")
        if not torch.cuda.is_available():
            run.skip("no GPU", *_GPU)
            return
        reason = kernels_of(call.op)["triton"].refuses(call)
        if reason is not None:
            run.skip(f"triton {reason}", *_GPU)
            return
        from shoal.claims.experiments.bipolar_int_layers import timed

        result = timed(self.tokens, self.size, self.pairs, run.as_baseline)
        run.metrics |= dict(zip(_GPU, result, strict=True))

    def _finetuned(self, context: ExperimentContext, as_baseline: bool) -> dict[str, float]:
        """Held-out losses of the model: as it was, and with few bits, by the kernel."""
        from shoal.claims.experiments.bipolar_int_layers import ScoredModel

        scored: ScoredModel = context.remember(
            "model", lambda: ScoredModel(context.model or _MODEL, context.data, context.progress)
        )
        method = scored.few_bits(
            _FORMAT,
            _ACTIVATIONS,
            seconds=None if as_baseline else self.finetune_s,
            seed=context.seed,
            progress=context.progress,
        )
        return {"fp32": scored.loss, "method": method}


def _codes(n: int, k: int, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=generator)


def _roof_s(machine: Machine, m: int, n: int, k: int, w: int, a: int) -> float:
    """Seconds that no kernel can do without: weights from memory, products at the peak."""
    units = {u.quantity: u.median for u in machine.measurements if u.probe == "units"}
    peak = max(
        units.get("popcount", 0.0) / (w * a) * 2, units.get("dot_int8", 0.0),
        units.get("tile_int8", 0.0), 256.0,
    )  # fmt: skip
    cores = machine.device.num_cores or 1
    rate = peak * units.get("clock", 4e9) * cores
    bandwidth = machine.device.main_memory.read_bandwidth or 1e11
    return max(2.0 * m * n * k / rate, n * k * w / 8 / bandwidth)


def _wrong(seed: int, as_baseline: bool) -> tuple[float, ...]:
    """Wrong integers for each pair of widths, over all kernels that can."""
    import torch

    from shoal.claims.experiments.bipolar_int_layers import odd
    from shoal.kernel.planes.layout import pack

    wrong = []
    for w in range(1, 9):
        for a in range(1, 9):
            k = _LENGTHS[(8 * w + a) % len(_LENGTHS)]
            x, weight = odd(20, k, a, seed), odd(40, k, w, seed + 1)
            exact = x @ weight.T
            call = MatmulPlanesCall(m=20, n=40, k=k, w=w, a=a)
            if as_baseline:
                results = [(x.to(torch.bfloat16) @ weight.to(torch.bfloat16).T).long()]
            else:
                results = [
                    kernel.prepare(call, pack(weight, w))(pack(x, a)).long()
                    for kernel in kernels_of(call.op).values()
                    if kernel.refuses(call) is None and kernel.backend != "triton"
                ]
            wrong.append(float(sum(int((out != exact).sum()) for out in results)))
    return tuple(wrong)


def _memory(machine: Machine, as_baseline: bool) -> tuple[float, ...]:
    """Bytes beyond operands and result, times w a, over those of the form that writes planes."""
    from shoal.claims.experiments.bipolar_int_layers import AllocatedBytes, fused, packed, spilled

    results = []
    for m, w, a in ((256, 1, 1), (256, 2, 2), (256, 3, 8), (1, 2, 8)):
        n = k = 1024
        planes_w, planes_x = packed(n, k, w, 0), packed(m, k, a, 1)
        extra = []
        for make in (spilled if as_baseline else fused, spilled):
            run: Any = make(planes_w, m, k, a, machine)
            with AllocatedBytes() as counted:
                out = run(planes_x)
            extra.append(counted.nbytes - out.nbytes + run.scratch)
        results.append(w * a * extra[0] / extra[1])
    return tuple(results)
