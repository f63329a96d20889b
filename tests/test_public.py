"""The names that `import pyspec` offers, and its cost."""

import subprocess
import sys

import pyspec


def test_public_names_are_sorted_and_real() -> None:
    assert pyspec.__all__ == sorted(sum(pyspec._HOMES.values(), ()))
    for name in pyspec.__all__:
        assert getattr(pyspec, name).__name__ == name


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, pyspec, pyspec.cli, pyspec.gguf, pyspec.text.tokenizer, pyspec.server.http.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
