"""How is an engine started in seconds? By forking a process that has imported vLLM once.

`python -m tests.e2e.nursery SOCKET` imports all that an engine needs, then serves one connection: it makes models,
forks engines, and says which of them still live. It never runs a kernel and never has a second thread, so that a fork
of it is sound. Three things of vLLM are replaced, all of them about processes and none about what is computed:

1. worker processes are forked as well, where the CPU platform asks for `spawn`;
2. a model class is inspected in this process, where vLLM starts another Python for it;
3. an engine that is told to record has its connector class extended by `tests.e2e.recorder`, which only reads.

An engine is its own process group with an environment and a temporary folder of its own (`tests.e2e.hosted`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

PRELOADED = """
vllm vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.engine.core_client vllm.v1.engine.coordinator
vllm.v1.executor.multiproc_executor vllm.v1.executor.uniproc_executor vllm.v1.worker.cpu_worker
vllm.v1.worker.cpu_model_runner vllm.v1.worker.cpu.model_runner vllm.engine.arg_utils vllm.sampling_params
vllm.distributed.kv_transfer.kv_connector.v1.nixl vllm.model_executor.models.llama
vllm.v1.attention.backends.cpu_attn nixl._api
""".split()

# The same in every engine; what differs is in `EngineSpec`. One thread per rank: two cores, and float32 sums that do
# not depend on how many threads share them.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends, so that a killed test run leaves no engine."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def import_vllm() -> None:
    """Import what an engine needs, and make it fork where it would spawn."""
    for name in PRELOADED:
        importlib.import_module(name)
    from vllm.model_executor.models import registry

    def here(function: Callable[[], Any]) -> Any:
        return function()

    registry._run_in_subprocess = here
    for module in list(sys.modules.values()):
        if module.__name__.startswith("vllm.") and hasattr(module, "get_mp_context"):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")


def fork(child: Callable[[], None]) -> int:
    """Run `child` in a fork that ends with it; its process id. The fork leads a process group of its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child does it too; whoever is first
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        child()
        status = 0
    except BaseException:  # noqa: BLE001  the fork must end here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Nursery:
    """Answers the requests of one connection, until it closes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.statuses: dict[int, int] = {}

    def serve(self) -> None:
        while True:
            try:
                method, arguments = self.connection.recv()
            except EOFError:
                return
            self._reap()
            try:
                answer: tuple[bool, Any] = (True, getattr(self, method)(*arguments))
            except Exception as error:  # noqa: BLE001  it is told to the test
                answer = (False, f"{type(error).__name__}: {error}")
            self.connection.send(answer)

    def make_model(self, name: str) -> str:
        """Make a model in a fork of its own: making it computes, and computing starts threads."""
        from tests.e2e import models

        status = os.waitpid(fork(lambda: models.make(name) and None), 0)[1]
        if status:
            raise RuntimeError(f"model {name} could not be made; see the log of the nursery")
        return str(models.folder(name))

    def start(self, socket: str, log: str, environment: dict[str, str], arguments: dict[str, Any]) -> int:
        """Fork an engine that will connect to `socket`; its process id, which is also that of its group."""

        def child() -> None:
            self.connection.close()
            with open(log, "ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ.update(environment)
            from tests.e2e import hosted

            hosted.main(Client(socket, "AF_UNIX"), arguments)

        return fork(child)

    def status(self, pid: int) -> int | None:
        """Exit status of a fork, None while it runs."""
        return self.statuses.get(pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self.statuses[pid] = os.waitstatus_to_exitcode(status)


def main() -> None:
    die_with_parent()
    os.environ.update(ENVIRONMENT)
    import_vllm()
    Nursery(Client(sys.argv[1], "AF_UNIX")).serve()
    os._exit(0)  # taking so many modules apart would take seconds


if __name__ == "__main__":
    main()
