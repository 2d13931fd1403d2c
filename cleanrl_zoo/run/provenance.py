"""What a result needs beside it to be reproduced: commit, versions, machine."""

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("cleanrl_zoo", "torch", "numpy", "gymnasium", "mujoco")


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def git_commit(folder: Path) -> tuple[str | None, bool]:
    """The commit checked out at `folder` and whether tracked files differ; (None, False) outside a repository."""
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None, False
    return text.removesuffix("-dirty"), text.endswith("-dirty")


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that decide a run's numbers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str | int]:
    """Processor, usable cores and operating system."""
    return {"cpu": cpu_name(), "cores": usable_cores(), "system": f"{platform.system()} {platform.machine()}"}


def provenance(envs: Any, packages: Iterable[str] = ()) -> dict[str, Any]:
    """All of it for a run that begins now, and the environments' name, engine and versions.

    envs: what is learned from (`VecEnv`); packages: whose versions count besides.
    """
    commit, dirty = git_commit(Path(__file__).parent)
    return {
        "commit": commit,
        "dirty": dirty,
        "versions": {**versions(), **{name: metadata.version(name) for name in packages}},
        "machine": machine(),
        "env": {"id": envs.env_id, "engine": envs.engine, "versions": envs.versions()},
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
