"""A prefill engine at TP 1 and a decode engine at TP 2, real vLLM servers on this machine without a GPU.

    make demo-vllm            # compare, and end
    make demo-vllm KEEP=1     # leave the servers up, with commands to try

1. A tiny model with random weights and a byte-level tokenizer is made.
2. Three servers start: a prefill engine and a decode engine with ReshardConnector, and an ordinary engine; and the router of
   this folder.
3. Prompts go through the router and to the ordinary engine; tokens and log-probabilities stand side by side.
4. The decode engine's `/metrics` say how many bytes it read, and in what time.

Exit status 0 if the texts agree and log-probabilities differ by no more than float32 noise.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

PROMPTS = [
    "Hi",
    "The prefill engine has one rank, the decode engine two.",
    "Every head of the cache goes to the rank that owns it, and to no other. " * 4,
    "Pages of one side need not be pages of the other. " * 16,
]
MAX_TOKENS = 12
# Three times what two ordinary engines of different tensor parallel sizes differ by in float32.
NOISE = 1.5e-5
START_S = 600.0
# The tokenizer has no template of its own: one line per message.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONNECTOR = {"kv_connector": "ReshardConnector", "kv_connector_module_path": "kvreshard.vllm"}


class RequestFailed(Exception):
    """A server answered with an error."""


def make_model(folder: Path) -> None:
    """A Llama of two layers and four KV heads, with one token per byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,  # the smallest that vLLM runs on a CPU
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def free_port() -> int:
    """Below the ports that the kernel gives to outgoing connections: engines open hundreds of those before they bind ours."""
    for port in random.sample(range(12000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit("no free port between 12000 and 32000")


@contextlib.contextmanager
def running(name: str, command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process group that is stopped as it should be: engines that are killed leave shared memory behind.

    No session of its own: on two cores, engines in different sessions starve one another (docs/howto/troubleshooting.md).
    """
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=os.environ | environment, process_group=0
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            print(f"{name} does not end; it is killed")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def engine(model: Path, home: Path, name: str, tp: int, role: str | None) -> tuple[str, list[str], dict[str, str]]:
    """Address, command and environment of one server; without a role it is an ordinary engine."""
    port = free_port()
    transfer = ["--kv-transfer-config", json.dumps({**CONNECTOR, "kv_role": role})] if role else []
    command = [
        *(
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--served-model-name",
            "tiny",
        ),
        *("--host", "127.0.0.1", "--port", str(port), "--tensor-parallel-size", str(tp), "--dtype", "float32"),
        *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", str(64 << 20), *transfer),
    ]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "UCX_NET_DEVICES": "lo",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(home / name),
    }
    return f"http://127.0.0.1:{port}", command, environment


def wait_until_up(name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5.0).status_code < 500:
                return
        time.sleep(0.5)
    raise SystemExit(f"{name} did not start; the end of its log:\n{log.read_text(errors='replace')[-12000:]}")


def complete(url: str, prompt: str) -> tuple[str, list[float]]:
    """The text that follows a prompt, and the log-probability of each of its tokens."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0, "logprobs": 1}
    answer = httpx.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=300.0)
    if answer.status_code != 200:
        raise RequestFailed(f"{url} answers {answer.status_code}: {answer.text[:2000]}")
    choice = answer.json()["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def read_metrics(url: str, *names: str) -> list[float]:
    """The sums of some metrics over all their labels."""
    lines = httpx.get(f"{url}/metrics", timeout=30.0).text.splitlines()
    return [sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{")) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prefill-tp", type=int, default=1)
    parser.add_argument("--decode-tp", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="leave the servers up until Ctrl-C, with commands to try")
    chosen = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as with Ctrl-C, or the servers would stay
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    console = Console()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvreshard-demo-")))
        model = home / "model"
        make_model(model)
        urls: dict[str, str] = {}
        processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, tp, role in (
            ("prefill", chosen.prefill_tp, "kv_producer"),
            ("decode", chosen.decode_tp, "kv_consumer"),
            ("ordinary", 1, None),
        ):
            urls[name], command, environment = engine(model, home, name, tp, role)
            console.print(f"starting the {name} engine, TP {tp}, at {urls[name]}", highlight=False)
            processes[name] = stack.enter_context(running(name, command, home / f"{name}.log", **environment))
        port = free_port()
        routing = [sys.executable, str(Path(__file__).with_name("router.py")), "--prefill", urls["prefill"]]
        routing += ["--decode", urls["decode"], "--port", str(port)]
        processes["router"] = stack.enter_context(running("router", routing, home / "router.log"))
        urls["router"] = f"http://127.0.0.1:{port}"
        for name, process in processes.items():
            wait_until_up(name, urls[name], process, home / f"{name}.log")
        try:
            code = compare(console, urls)
            if chosen.keep:
                keep(console, urls, processes)
            return code
        except RequestFailed as error:
            for name in processes:
                log = (home / f"{name}.log").read_text(errors="replace")
                console.print(f"--- the end of the {name} engine's log", log[-6000:], highlight=False, markup=False)
            console.print(str(error), markup=False)
            return 1


def compare(console: Console, urls: dict[str, str]) -> int:
    """Send everything, print both answers side by side, and say whether they agree."""
    series = "kvreshard_bytes_total", "kvreshard_load_seconds_count", "kvreshard_load_seconds_sum"
    complete(urls["router"], "The first load meets the prefill engine.")
    first = read_metrics(urls["decode"], *series)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        routed = list(pool.map(lambda prompt: complete(urls["router"], prompt), PROMPTS))
        ordinary = list(pool.map(lambda prompt: complete(urls["ordinary"], prompt), PROMPTS))
    table = Table(title="the same prompts through the pair of engines, and to one ordinary engine")
    for column in ("prompt", "through the pair", "ordinary", "largest difference of a log-probability"):
        table.add_column(column, overflow="fold")
    worst, equal = 0.0, True
    for prompt, (text, mine), (other, theirs) in zip(PROMPTS, routed, ordinary, strict=True):
        gap = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
        worst, equal = max(worst, gap), equal and text == other
        table.add_row(f"{prompt[:24]}... ({len(prompt)} tokens)", ascii(text), ascii(other), f"{gap:.7f}")
    console.print(table)
    moved, loads, seconds = (now - then for now, then in zip(read_metrics(urls["decode"], *series), first, strict=True))
    agree = equal and worst <= NOISE and moved > 0
    mean_ms = 1e3 * seconds / loads if loads else 0.0
    console.print(
        f"the decode engine read the cache of {sum(map(len, PROMPTS)):,} tokens, {moved / 1e6:.2f} MB, from the prefill engine: "
        f"{loads:.0f} loads of its ranks, {mean_ms:.1f} ms each (the first of all, which meets the prefill engine: {1e3 * first[2] / (first[1] or 1):.0f} ms)",
        highlight=False,
    )
    verdict = "[bold green]they agree[/]: texts are equal" if agree else "[bold red]they do not agree[/]: texts "
    if not agree:
        verdict += "are equal" if equal else "differ"
    console.print(
        f"{verdict}, log-probabilities differ by at most {worst:.7f} (two ordinary engines: up to {NOISE:.7f})",
        highlight=False,
    )
    return 0 if agree else 1


def keep(console: Console, urls: dict[str, str], processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Print what to try, and wait for Ctrl-C or for a server that ends."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    header = "-H 'Content-Type: application/json'"
    console.print(
        "\nThe servers stay up; Ctrl-C ends them. The model has random weights, so its texts mean nothing. Try:"
    )
    for what, command in (
        ("a completion", f"curl {urls['router']}/v1/completions {header} -d '{json.dumps(body)}'"),
        ("a chat", f"curl {urls['router']}/v1/chat/completions {header} -d '{json.dumps(chat)}'"),
        (
            "what was moved",
            f"curl -s {urls['decode']}/metrics | grep -E '^kvreshard_(bytes_total|load_seconds_(sum|count)|failures)'",
        ),
        ("what the prefill engine keeps for readers", f"curl -s {urls['prefill']}/metrics | grep ^kvreshard_leases"),
    ):
        console.print(f"\n# {what}", style="bold", highlight=False)
        console.print(command, soft_wrap=True, highlight=False, markup=False)
    with contextlib.suppress(KeyboardInterrupt):
        while all(process.poll() is None for process in processes.values()):
            time.sleep(1.0)
        console.print(f"a server has ended: {', '.join(n for n, p in processes.items() if p.poll() is not None)}")


if __name__ == "__main__":
    sys.exit(main())
