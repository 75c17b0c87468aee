"""A real Prometheus on loopback that scrapes engines, for tests; and its answers to the dashboard's expressions, drawn.

    python -m tests.prometheus PANELS.json PICTURE.png

The program is the one on PATH, or that of Debian's package, as for `tests.promtool`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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
UNITS = {"s": "seconds", "Bps": "bytes/s", "ops": "per second", "percentunit": "share"}


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


def collect(server: Prometheus, since_s: float) -> list[dict[str, Any]]:
    """What each panel of the dashboard would show: its title, unit and lines, with seconds since then."""
    now_s, found = time.time(), []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "timeseries":
            continue
        lines = []
        for target in panel["targets"]:
            query = with_variables(target["expr"], "30s")
            for series in server.ask("query_range", query=query, start=since_s, end=now_s, step=1)["result"]:
                label = target["legendFormat"]
                for name, value in series["metric"].items():
                    label = label.replace("{{" + name + "}}", value)
                points = [(round(at_s - since_s, 1), float(value)) for at_s, value in series["values"]]
                lines.append({"label": label, "points": points})
        found.append({"title": panel["title"], "unit": panel["fieldConfig"]["defaults"]["unit"], "lines": lines})
    return found


def draw(panels: Sequence[dict[str, Any]], path: Path) -> None:
    """The panels as Grafana would lay them out. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(panels) // 3)
    figure, places = plt.subplots(rows, 3, figsize=(16, 2.7 * rows), layout="constrained")
    for axes, panel in zip(places.flat, panels, strict=False):
        for line in panel["lines"]:
            axes.plot(*zip(*line["points"], strict=True), label=line["label"])
        axes.set_title(panel["title"], fontsize=10, loc="left")
        axes.set_ylabel(UNITS.get(panel["unit"], ""), fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if panel["lines"]:
            axes.legend(fontsize=8, frameon=False, loc="upper left")
        else:
            axes.text(0.5, 0.5, "nothing", ha="center", va="center", transform=axes.transAxes, color="grey")
    for axes in list(places.flat)[len(panels) :]:
        axes.axis("off")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
