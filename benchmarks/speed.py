"""Steps per second of PPO here and in Stable-Baselines3, alternating on the same cores.

    python benchmarks/speed.py --name hopper --steps 1000000 --repeats 3

Every time is that of a whole process, from its start to its exit after the policy was saved: imports, compilation,
training and (ours) evaluations and checkpoints included. `cold` compiles into an empty cache, `warm` finds what the
cold run before it compiled. SB3 runs with torch's default threads as its users have it, and with one thread too where a
short trial shows that to be faster; its best counts. Writes `results/speed/<name>.json` (every single time) and `.md`.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from records import ROOT, Parser, write_text

from cleanrl_zoo.run.arguments import usage_errors
from cleanrl_zoo.run.provenance import git_commit, machine, versions

TRIAL_STEPS = 20_480  # of SB3 with 1 thread and with torch's default
IDLE_LOAD = 0.5  # 1-minute load average above which something else is running
IDLE_CORES = 0.1  # cores kept busy by others during a measurement above which it is marked

# name: (flags of ppo_continuous.py, environments of SB3)
SETTINGS: dict[str, tuple[str, int]] = {
    "default": ("", 1),  # each with its own defaults
    "equal1": ("--num-envs 1 --num-steps 2048 --num-minibatches 32 --update-epochs 10", 1),  # SB3's defaults for both
    "equal8": ("--num-envs 8 --num-steps 256 --num-minibatches 32 --update-epochs 10", 8),  # both with 8 environments
    "wide16": ("--num-envs 16 --num-steps 128 --num-minibatches 16", 1),  # minibatches of 128
    "wide32": ("--num-envs 32 --num-steps 64 --num-minibatches 16", 1),  # wide_32 of the suite num_envs
}


@dataclass
class Time:
    """One process."""

    who: str  # a setting's name, or sb3_<environments>
    kind: str  # ours: cold, warm; SB3: default, 1 (torch threads)
    repeat: int
    steps: int
    seconds: float
    cpu_seconds: float
    other_cores: float | None  # cores kept busy by other processes meanwhile; None where the system does not tell

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds


def busy_seconds() -> float | None:
    """Seconds that all cores together have been busy since boot, or None."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def timed(command: list[str], variables: dict[str, str]) -> tuple[str, float, float, float | None]:
    """Runs a process: its output, wall and processor seconds, and the cores that others kept busy meanwhile.

    Raises:
        ValueError: if it fails, with the last line of its errors.
    """
    before, started = busy_seconds(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=out, stderr=err, cwd=ROOT)
        try:
            _, status, usage = os.wait4(process.pid, 0)  # usage: of the process and the children it waited for
        except BaseException:
            process.kill()
            raise
        seconds, cpu = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        if process.returncode:
            last = (err.read().strip().splitlines() or [""])[-1]
            raise ValueError(f"{' '.join(command[1:])}: exit code {process.returncode}: {last}")
        other = None if before is None else max(0.0, (busy_seconds() - before - cpu) / seconds)
        return out.read(), seconds, cpu, other


def time_ours(setting: str, env: str, steps: int, repeat: int, cache: Path, kind: str) -> Time:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "algos" / "ppo_continuous.py"), "--env", env, "--run-dir", str(run_dir)]
        command += ["--total-timesteps", str(steps), "--seed", str(repeat), *SETTINGS[setting][0].split()]
        _, *used = timed(command, {"TORCHINDUCTOR_CACHE_DIR": str(cache)})
        if not (run_dir / "policy" / "policy.safetensors").exists():
            raise ValueError(f"{setting}: the run saved no policy")
        taken = json.loads((run_dir / "summary.json").read_text())["global_step"]
    return Time(setting, kind, repeat, taken, *used)


def time_sb3(num_envs: int, env: str, steps: int, repeat: int, threads: str) -> Time:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("peers_sb3.py")), "--env", env, "--steps", str(steps)]
        command += ["--num-envs", str(num_envs), "--seed", str(repeat), "--out", f"{folder}/model"]
        command += ["--threads", {"default": "0"}.get(threads, threads)]
        output, *used = timed(command, {})
    return Time(f"sb3_{num_envs}", threads, repeat, int(output.split()[-1]), *used)


def peer_version() -> str:
    """The installed version of SB3."""
    try:
        return metadata.version("stable-baselines3")
    except metadata.PackageNotFoundError:
        return "not installed"


def medians(times: list[Time], settings: list[str]) -> dict[str, dict[str, Any]]:
    """Median steps per second of each setting and of SB3's better thread count, and their ratios."""
    rates: dict[tuple[str, str], list[float]] = {}
    for item in times:
        rates.setdefault((item.who, item.kind), []).append(item.steps_per_second)
    middle = {key: median(values) for key, values in rates.items()}
    summary = {}
    for setting in settings:
        peer = f"sb3_{SETTINGS[setting][1]}"
        peers = {kind: rate for (who, kind), rate in middle.items() if who == peer}
        if not peers or (setting, "cold") not in middle or (setting, "warm") not in middle:
            continue
        threads = max(peers, key=peers.__getitem__)
        cold, warm = middle[setting, "cold"], middle[setting, "warm"]
        summary[setting] = {
            "cold": cold,
            "warm": warm,
            "sb3": peers[threads],
            "sb3_envs": SETTINGS[setting][1],
            "sb3_threads": threads,
            "ratio_cold": cold / peers[threads],
            "ratio_warm": warm / peers[threads],
        }
    return summary


def table(record: dict[str, Any]) -> str:
    """The medians as Markdown, with what is needed to judge them."""
    lines = ["| setting | flags | cold | warm | SB3 | ratio cold | ratio warm |", "| --- " * 7 + "|"]
    for name, row in record["medians"].items():
        sb3 = f"{row['sb3']:,.0f} ({row['sb3_envs']} env, {row['sb3_threads']} threads)"
        ratios = f"{row['ratio_cold']:.2f} | {row['ratio_warm']:.2f}"
        flags = SETTINGS[name][0] or "defaults"
        lines.append(f"| {name} | {flags} | {row['cold']:,.0f} | {row['warm']:,.0f} | {sb3} | {ratios} |")
    where, code = record["machine"], record["commit"] or "no commit"
    packages = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines += [
        "",
        f"Environment steps per second, {record['env']}, {record['steps']:,} steps, whole processes, median of "
        f"{record['repeats']}, on {len(record['cores'])} core(s) of {where['cpu']} ({where['system']}), "
        f"commit {code[:12]}{' (modified)' if record['dirty'] else ''}, {packages}.",
    ]
    disturbed = [item for item in record["times"] if (item["other_cores"] or 0) > IDLE_CORES]
    if disturbed:
        lines.append(f"**{len(disturbed)} of {len(record['times'])} measurements were disturbed by other processes.**")
    return "\n".join(lines) + "\n"


def measure(settings: list[str], env: str, steps: int, repeats: int, out: Path, cores: list[int]) -> dict[str, Any]:
    """Times everything `repeats` times, ours and SB3 in turns; the record is written after each process."""
    commit, dirty = git_commit(ROOT)
    times: list[Time] = []
    record: dict[str, Any] = {
        "env": env,
        "steps": steps,
        "repeats": repeats,
        "settings": {name: SETTINGS[name] for name in settings},
        "cores": cores,
        "machine": machine(),
        "commit": commit,
        "dirty": dirty,
        "versions": {**versions(), "stable-baselines3": peer_version()},
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "load_before": os.getloadavg()[0],
    }

    def note(item: Time) -> None:
        times.append(item)
        record["times"] = [{**dataclasses.asdict(t), "steps_per_second": t.steps_per_second} for t in times]
        record["medians"] = medians(times, settings)
        write_text(out, json.dumps(record, indent=1) + "\n")
        warning = "  DISTURBED by other processes" if (item.other_cores or 0) > IDLE_CORES else ""
        rate = f"{item.steps_per_second:,.0f} steps/s"
        print(f"repeat {item.repeat}  {item.who:8} {item.kind:8} {item.seconds:8.1f} s  {rate}{warning}", flush=True)

    peers = sorted({SETTINGS[name][1] for name in settings})
    threads = {}
    for num_envs in peers:
        trial = {kind: time_sb3(num_envs, env, TRIAL_STEPS, 0, kind).steps_per_second for kind in ("default", "1")}
        threads[num_envs] = ["default", "1"] if trial["1"] > trial["default"] else ["default"]
        record.setdefault("sb3_thread_trials", {})[str(num_envs)] = trial
    for repeat in range(1, repeats + 1):
        waiting = [(num_envs, kind) for num_envs in peers for kind in threads[num_envs]]
        for setting in settings:
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("cold", "warm"):
                    note(time_ours(setting, env, steps, repeat, Path(cache), kind))
            if waiting:
                num_envs, kind = waiting.pop(0)
                note(time_sb3(num_envs, env, steps, repeat, kind))
        for num_envs, kind in waiting:
            note(time_sb3(num_envs, env, steps, repeat, kind))
    return record


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/speed.py", description="Steps per second here and in Stable-Baselines3.")
    parser.add_argument("--name", default="hopper", help="results/speed/<name>.json and .md; default hopper")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), help=f"of {', '.join(SETTINGS)}; default all")
    parser.add_argument("--env", default="Hopper-v4")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2, help="cores that every process is confined to; default 2")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="default results/")
    parser.add_argument("--force", action="store_true", help="measure even while something else runs")
    args = parser.parse_args(argv)
    with usage_errors():
        unknown = [name for name in args.settings if name not in SETTINGS]
        if unknown:
            raise ValueError(f"--settings {' '.join(unknown)}: known are {', '.join(SETTINGS)}")
        if min(args.steps, args.repeats, args.cores) < 1:
            raise ValueError("--steps, --repeats and --cores must be at least 1")
        if importlib.util.find_spec("stable_baselines3") is None:
            raise ValueError("stable-baselines3 is not installed: pip install -c constraints.txt -e '.[peers]'")
        load = os.getloadavg()[0]
        if load > IDLE_LOAD and not args.force:
            raise ValueError(
                f"load average {load:.2f}: something else runs here; wait until it is below {IDLE_LOAD}, or --force"
            )
        cores = confine(args.cores)
        out = args.results / "speed" / f"{args.name}.json"
        record = measure(args.settings, args.env, args.steps, args.repeats, out, cores)
    text = table(record)
    write_text(out.with_suffix(".md"), text)
    print(text)
    return 0


def confine(count: int) -> list[int]:
    """Confines this process and its children to `count` cores; returns them."""
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("--cores: this system cannot confine a process to cores; speed is measured on Linux")
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < count:
        raise ValueError(f"--cores {count}: only {len(allowed)} may be used here")
    os.sched_setaffinity(0, allowed[:count])
    return allowed[:count]


if __name__ == "__main__":
    sys.exit(main())
