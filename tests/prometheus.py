"""A real Prometheus on loopback that scrapes engines, for tests; and its answers to the dashboard's expressions, drawn.

The program is the one on PATH, or that of Debian's package, as for `tests.promtool`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.ports import free_ports
from tests.promtool import DASHBOARD, RULES, find, with_variables

START_S = 60.0


@dataclass(frozen=True)
class Prometheus:
    """A server that runs."""

    url: str

    def ask(self, path: str, **query: str | float) -> Any:
        """The data of an answer of its API."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        return list(self.ask("query", query=expression)["result"])


def find_server(folder: Path) -> str | None:
    """The program; None where there is none. `folder`: where a package may be unpacked."""
    found = shutil.which("prometheus")
    if found is not None:
        return found
    promtool = find(folder)
    return None if promtool is None else str(Path(promtool).with_name("prometheus"))


@contextmanager
def prometheus(program: str, targets: Sequence[str]) -> Iterator[Prometheus]:
    """Scrape the targets each second, with the rules of `deploy/`."""
    port = free_ports(1)
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "prometheus.yaml"
        scrape = {"job_name": "engines", "static_configs": [{"targets": list(targets)}]}
        times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config.write_text(yaml.safe_dump({"global": times, "rule_files": [str(RULES)], "scrape_configs": [scrape]}))
        command = [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={place}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (Path(place) / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                server = Prometheus(f"http://127.0.0.1:{port}")
                deadline = time.monotonic() + START_S
                while not _is_ready(server):
                    assert process.poll() is None, (Path(place) / "log").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
                yield server
            finally:
                process.terminate()


def _is_ready(server: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/-/ready", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def draw(server: Prometheus, since_s: float, path: Path) -> None:
    """The dashboard as Grafana would lay it out, drawn from the same expressions. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] == "timeseries"]
    rows = -(-len(panels) // 3)
    figure, places = plt.subplots(rows, 3, figsize=(16, 2.7 * rows), layout="constrained")
    now_s = time.time()
    for axes, panel in zip(places.flat, panels, strict=False):
        for target in panel["targets"]:
            found = server.ask(
                "query_range", query=with_variables(target["expr"], "30s"), start=since_s, end=now_s, step=1
            )
            for series in found["result"]:
                label = target["legendFormat"]
                for name, value in series["metric"].items():
                    label = label.replace("{{" + name + "}}", value)
                times, values = zip(*series["values"], strict=True)
                axes.plot([time_s - since_s for time_s in times], [float(value) for value in values], label=label)
        axes.set_title(panel["title"], fontsize=10, loc="left")
        axes.set_ylabel(
            {"s": "seconds", "Bps": "bytes/s", "ops": "per second", "percentunit": "share"}.get(
                panel["fieldConfig"]["defaults"]["unit"], ""
            ),
            fontsize=8,
        )
        axes.set_xlim(0, now_s - since_s)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8, frameon=False, loc="upper left")
        else:
            axes.text(0.5, 0.5, "nothing", ha="center", va="center", transform=axes.transAxes, color="grey")
    for axes in list(places.flat)[len(panels) :]:
        axes.axis("off")
    figure.savefig(path, dpi=80)
