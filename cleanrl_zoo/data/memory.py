"""How much memory this process can still take."""

from pathlib import Path


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping: what the system has left, and what the limits of this process's
    control groups (a container's, a scheduler's) leave of it; None where the system does not say.

    root: where `proc` and `sys` are mounted.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except (OSError, ValueError, IndexError):
        return None
    for _, controllers, path in groups:
        if controllers in ("", "memory"):
            version_2 = controllers == ""
            top = root / ("sys/fs/cgroup" if version_2 else "sys/fs/cgroup/memory")
            group = top / path.lstrip("/")
            names = (
                ("memory.max", "memory.current") if version_2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
            )
            # in a container the path may be that outside of it, so the mounted top counts as well
            for folder in (group, *group.parents):
                free += _left(folder, *names)
                if folder == top:
                    break
    return min(free, default=None)


def _left(group: Path, limit: str, usage: str) -> list[int]:
    """What the limit of a control group leaves; file pages that were not used lately count as free."""
    try:
        allowed, used = int((group / limit).read_text()), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):  # no limit ("max"), or no such group
        return []
    return [max(0, allowed - used + reclaimable)]
