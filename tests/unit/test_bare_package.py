"""Does the bare package need only what it declares? A plan must be readable on a laptop without NIXL, torch or pytest."""

import subprocess
import sys

OPTIONAL = ("nixl", "torch", "vllm", "zmq", "hypothesis", "pytest")

# A meta path finder that comes first and refuses: it holds even where the packages are installed, as they are here.
BLOCKED = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"{{name}} is not part of the bare package", name=name)

sys.meta_path.insert(0, Refuse())
"""


def run_without_optional_packages(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter of its own, where no optional package can be imported."""
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, check=False)


def test_the_block_holds() -> None:
    assert "nixl is not part of the bare package" in run_without_optional_packages("import nixl").stderr


def test_commands_start_without_any_optional_package() -> None:
    code = "from kvreshard.cli import main; sys.argv[1:] = ['models', '--json']; main()"
    done = run_without_optional_packages(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.lstrip().startswith(("[", "{"))


def test_the_oracle_loads_without_any_optional_package() -> None:
    done = run_without_optional_packages("import kvreshard.testing.oracle")
    assert done.returncode == 0, done.stderr
