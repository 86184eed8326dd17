"""Threads that wait do not spin for long."""

from __future__ import annotations

import subprocess
import sys

from shoal.serve.ranks.spinning import spin_briefly


def test_only_where_nobody_chose():
    environment = {"A": "b"}
    assert spin_briefly(environment)
    assert environment == {"A": "b", "GOMP_SPINCOUNT": "20000"}
    assert not spin_briefly(environment)
    chosen = {"OMP_WAIT_POLICY": "passive"}
    assert not spin_briefly(chosen)
    assert chosen == {"OMP_WAIT_POLICY": "passive"}


def test_before_torch_and_not_after():
    program = (
        "import os, sys\n"
        "os.environ.pop('GOMP_SPINCOUNT', None); os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "from shoal.serve.ranks.spinning import spin_briefly\n"
        "assert 'torch' not in sys.modules\n"
        "print(spin_briefly(), os.environ['GOMP_SPINCOUNT'])\n"
        "del os.environ['GOMP_SPINCOUNT']; sys.modules['torch'] = sys\n"
        "print(spin_briefly(), 'GOMP_SPINCOUNT' in os.environ)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "20000", "False", "False"], done.stderr
