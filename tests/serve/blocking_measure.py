"""A measurement that can block; in a file that other processes can import."""

from __future__ import annotations

import os
import signal
import time

from shoal.plan.tune.serving import ServingSample


class SleepingMeasure:
    """Measures that block in one way or another, for ever."""

    def prepare(self, config, workload):
        if config["where"] == "prepare":
            time.sleep(3600)

    def measure(self, config, workload, seconds):
        if config["where"] == "measure":
            time.sleep(3600)
        if config["where"] == "stopped":  # as a process in the middle of native code
            os.kill(os.getpid(), signal.SIGSTOP)
        if config["where"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return ServingSample(throughput=1.0, seconds=seconds)
