"""Dovetail as pip and an index see it: a tree to build from, a venv without Dovetail, and an index
that holds what was built."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# setuptools is there
PIP_OPTIONS = (
    "--quiet",
    "--disable-pip-version-check",
    "--no-build-isolation",
)


def run(*command: str | Path, cwd: Path) -> str:
    """Return a command's output. pip reads no configuration: it uses only the given index."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PIP_", "PYTHONPATH"))
    }
    environment |= {"PIP_CONFIG_FILE": os.devnull, "DOVETAIL_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked_files() -> list[str]:
    """Paths of what git has, relative to the repository. Skips the test where this isn't a
    checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    return run("git", "ls-files", cwd=ROOT).splitlines()


def copy_tracked(folder: Path) -> Path:
    """Building leaves things behind, so it happens in a copy."""
    for path in tracked_files():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / path).read_bytes())
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        *PIP_OPTIONS,
        "--no-deps",
        "--wheel-dir",
        folder,
        source,
        cwd=folder.parent,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_venv(folder: Path) -> Path:
    """The Python of a venv that has all that is installed here but Dovetail and its plugins."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    layer = folder / "layer"
    layer.mkdir()
    for place in dict.fromkeys(
        path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")
    ):
        for entry in Path(place).iterdir():
            if (
                not entry.name.startswith(("dovetail", "__editable__"))
                and entry.suffix != ".pth"
                and not (layer / entry.name).exists()
            ):
                (layer / entry.name).symlink_to(entry)
    python = folder / "venv/bin/python"
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    ).strip()
    Path(site, "layer.pth").write_text(f"{layer}\n")
    return python


def pip_install(python: Path, *what: str | Path, index: str) -> None:
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        *PIP_OPTIONS,
        "--index-url",
        index,
        *what,
        cwd=python.parent,
    )


@contextmanager
def serve_index(wheels: Sequence[Path], folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve an index of these wheels (PEP 503) on this machine. Yields its address, and the
    requested paths."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_request(self, *_: Any) -> None:
            asked.append(self.path)

        def log_message(self, *_: Any) -> None:
            pass

    for wheel in wheels:
        home = folder / "simple" / wheel.name.split("-")[0].replace("_", "-")
        home.mkdir(parents=True)
        (home / wheel.name).symlink_to(wheel)
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple", asked
        finally:
            server.shutdown()
            thread.join()
