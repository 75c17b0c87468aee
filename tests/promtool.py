"""Checks the alerts, the recording rules and the expressions of the dashboard with Prometheus' own `promtool`.

    python -m tests.promtool

`promtool` is the one on PATH, or that of Debian's package `prometheus`, which is fetched and unpacked here (not installed). Where there is neither, it says
so and ends with 0: `tests/unit/test_deploy.py` still holds the series to the page of metrics.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
RULES, DASHBOARD = DEPLOY / "prometheus" / "rules.yaml", DEPLOY / "grafana" / "kvreshard.json"


def find(folder: Path) -> str | None:
    """The program; `folder`: where a package may be unpacked."""
    found = shutil.which("promtool")
    if found is not None or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return found
    for command in (
        ["apt-get", "download", "prometheus"],
        ["apt-get", "update"],
        ["apt-get", "download", "prometheus"],
    ):
        subprocess.run(command, cwd=folder, capture_output=True, check=False)
        packages = list(folder.glob("prometheus_*.deb"))
        if packages:
            subprocess.run(["dpkg-deb", "-x", packages[0], folder], check=True)
            return str(folder / "usr" / "bin" / "promtool")
    return None


def dashboard_expressions() -> Iterator[str]:
    """Every expression of the dashboard, with its variables filled in."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield with_variables(target["expr"], "5m")


def with_variables(expression: str, interval: str) -> str:
    """An expression of the dashboard with Grafana's variables filled in."""
    return re.sub(r"\$__(rate_interval|range)", interval, expression).replace("$instance", ".+")


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        promtool = find(Path(place))
        if promtool is None:
            print(
                "promtool is not here, and Debian's package prometheus cannot be fetched: the rules were not checked with it"
            )
            return 0
        records = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(dashboard_expressions())]
        panels = Path(place) / "panels.yaml"
        panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
        for command in (
            ["check", "rules", RULES],
            ["check", "rules", panels],
            ["test", "rules", RULES.with_suffix(".test.yaml")],
        ):
            if subprocess.run([promtool, *command], check=False).returncode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
