"""api: what Python calls for everything that the command line does.

``shoal.plan(...)`` and the other functions of :mod:`shoal` are these. Importing this room loads no
torch.
"""

from shoal.api.benching import bench_job, bench_peers, bench_serve, bench_url
from shoal.api.loading import load
from shoal.api.measuring import bench_attention, bench_decode, bench_kernels, bench_tune
from shoal.api.planning import plan
from shoal.api.plans import Plans
from shoal.api.probing import probe, probe_decode, probe_gemm, probe_gpu
from shoal.api.running import run
from shoal.api.serving import serve
from shoal.api.tools import check, explain, import_log, score
from shoal.api.training import train

__all__ = [
    "Plans",
    "bench_attention",
    "bench_decode",
    "bench_job",
    "bench_kernels",
    "bench_peers",
    "bench_serve",
    "bench_tune",
    "bench_url",
    "check",
    "explain",
    "import_log",
    "load",
    "plan",
    "probe",
    "probe_decode",
    "probe_gemm",
    "probe_gpu",
    "run",
    "score",
    "serve",
    "train",
]
