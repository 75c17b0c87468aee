"""Finds something, starts a process that outlives it, and never ends."""

import subprocess
import sys
import time

from bench.gpu.findings import Bench


def run(bench: Bench) -> None:
    with bench.check("before it hangs") as found:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        found.figure(child=child.pid)
    time.sleep(600)
