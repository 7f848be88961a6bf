"""OpenAI's SDK for Node: `node/client.test.js` against a running server."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.conftest import Server

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("node") is None or shutil.which("npm") is None, reason="Node.js with npm is not installed"),
]

SOURCE = Path(__file__).parent / "node"
FILES = ("package.json", "package-lock.json", "client.test.js")
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    """The SDK as the lock file has it, installed once and kept with pytest's cache."""
    assert pytestconfig.cache is not None
    folder: Path = pytestconfig.cache.mkdir("node")
    installed, lock = folder / "package-lock.json", (SOURCE / "package-lock.json").read_text()
    fresh = (folder / "node_modules").is_dir() and installed.is_file() and installed.read_text() == lock
    for name in FILES:
        shutil.copy(SOURCE / name, folder)
    if not fresh:
        command = ["npm", "ci", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            installed.unlink()
            if any(code in done.stderr for code in UNREACHABLE):
                pytest.skip("the npm registry cannot be reached")
            pytest.fail(f"npm ci failed:\n{done.stderr}")
    return folder


def test_the_node_sdk(server: Server, folder: Path) -> None:
    environment = {**os.environ, "BASE_URL": server.base_url}
    # A test that waits for what never comes would wait for ever.
    command = ["node", "--test", "--test-reporter=spec", "--test-timeout=60000"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
