"""An environment in which this processor is an older one, for a test's child processes.

Shoal believes the flags of the older processor and compiles for it, and the libraries of PyTorch
choose what they would choose there. What is compiled runs here, as newer processors run all that
older ones do.
"""

from __future__ import annotations

import os
from pathlib import Path

# Processor -> what it lacks of the flags that Linux lists, by their beginnings, and what its
# libraries are told.
PROCESSORS = {
    "haswell": (
        ("avx512", "amx", "avx_vnni", "gfni", "vaes", "vpclmulqdq", "sha_ni"),
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    ),
    "nehalem": (
        ("avx", "amx", "gfni", "vaes", "vpclmulqdq", "sha_ni", "fma", "f16c", "bmi", "aes"),
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    ),
}

# Read by every interpreter when it starts, those of child processes too.
_START = """
import shoal.core.native as native
info = dict(native._cpuinfo())
lacks = {lacks!r}
info["flags"] = " ".join(f for f in info["flags"].split() if not f.startswith(lacks))
info["model name"] = "an older processor, {name}"
native._cpuinfo = lambda: info
native.FLAGS = tuple("-march={name}" if f == "-march=native" else f for f in native.FLAGS)
"""


def environment(name: str, place: Path) -> dict[str, str]:
    """Variables for processes on that processor, with files and an empty home in ``place``."""
    lacks, variables = PROCESSORS[name]
    (place / "start").mkdir(parents=True, exist_ok=True)
    (place / "start" / "sitecustomize.py").write_text(_START.format(lacks=lacks, name=name))
    paths = [str(place / "start"), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {"PYTHONPATH": os.pathsep.join(paths), "SHOAL_HOME": str(place / "home")}
    return {**os.environ, **variables, **changed}
