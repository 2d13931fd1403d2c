"""Steps per second here and in Stable-Baselines3 (and SBX), alternating on the same cores.

    python benchmarks/speed.py --name hopper --settings default --repeats 3
    python benchmarks/speed.py --name sac --settings sac_equal --threads 1 2 --sbx-python ~/sbx/bin/python

Every time is that of a whole process, from its start to its exit after the policy was saved: imports, compilation,
training and (ours) evaluations and checkpoints included. `cold` compiles into an empty cache, `warm` finds what the
cold run before it compiled; so it is for SBX, with JAX's own cache. A setting with `equal` in its name gives both sides
the same settings and, in turn, each number of `--threads`; the others compare what users get: ours with its default
threads, the peers with each number of threads, of which the best counts. Writes `results/speed/<name>.json` (every
single time) and `.md`.
"""

import dataclasses
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from records import ROOT, Parser, write_text

from cleanrl_zoo.run.arguments import usage_errors
from cleanrl_zoo.run.provenance import git_commit, machine, versions

IDLE_LOAD = 0.5  # 1-minute load average above which something else is running
SBX = ("ppo", "sac", "dqn")  # the algorithms that SBX has of those compared here
IDLE_CORES = 0.1  # cores kept busy by others during a measurement above which it is marked


@dataclass(frozen=True)
class Peer:
    """What the other package trains."""

    algo: str  # as `peers_sb3.py` names it
    num_envs: int = 1
    settings: str = "{}"  # the constructor's arguments as JSON; {}: the package's defaults

    @property
    def title(self) -> str:
        envs = "" if self.num_envs == 1 else f", {self.num_envs} environments"
        return f"{self.algo.upper()} {'with its defaults' if self.settings == '{}' else self.settings}{envs}"


PEERS: dict[str, Peer] = {
    "ppo": Peer("ppo"),
    "ppo_8": Peer("ppo", 8, '{"n_steps": 256}'),
    "ppo_discrete": Peer(
        "ppo",
        4,
        '{"n_steps": 128, "batch_size": 128, "n_epochs": 4, "learning_rate": 2.5e-4, "clip_range_vf": 0.2, '
        '"ent_coef": 0.01}',
    ),
    "a2c": Peer("a2c", 16),
    "trpo": Peer("trpo"),
    "trpo_16": Peer("trpo", 16, '{"n_steps": 64, "batch_size": 64, "cg_max_steps": 10}'),
    "sac": Peer("sac", 1, '{"learning_starts": 1000}'),  # otherwise the defaults: batches of 256, 256 × 256, 3e-4
    # otherwise the defaults: batches of 32, 64 × 64, 1e-4, a buffer of 1,000,000, copied every 10,000 steps
    "dqn": Peer("dqn", 1, '{"train_freq": 1}'),
}


@dataclass(frozen=True)
class Setting:
    """Ours and what it is compared with."""

    algorithm: str  # file in algos/
    flags: str  # of its command line
    peer: str  # key of PEERS
    steps: int = 1_000_000
    env: str = "Hopper-v4"
    equal: bool = False  # the same settings and threads on both sides


EQUAL_PPO = "--num-minibatches 32 --update-epochs 10"  # SB3's defaults
EQUAL_TRPO = "--cg-damping 0.1 --max-kl 0.01 --value-epochs 10 --learning-rate 1e-3"

SETTINGS: dict[str, Setting] = {
    "default": Setting("ppo_continuous", "", "ppo"),
    "equal1": Setting("ppo_continuous", f"--num-envs 1 --num-steps 2048 {EQUAL_PPO}", "ppo", 200_000, equal=True),
    "equal8": Setting("ppo_continuous", f"--num-envs 8 --num-steps 256 {EQUAL_PPO}", "ppo_8", 200_000, equal=True),
    "wide16": Setting("ppo_continuous", "--num-envs 16 --num-steps 128 --num-minibatches 16", "ppo"),
    "wide32": Setting("ppo_continuous", "--num-envs 32 --num-steps 64 --num-minibatches 16", "ppo"),
    "ppo_discrete_equal": Setting(
        "ppo",
        "--num-envs 4 --num-steps 128 --num-minibatches 4 --update-epochs 4",
        "ppo_discrete",
        200_000,
        "CartPole-v1",
        equal=True,
    ),
    "a2c_equal": Setting(
        "a2c",
        "--num-envs 16 --num-steps 5 --gae-lambda 1 --ent-coef 0 --vf-coef 1",
        "a2c",
        200_000,
        equal=True,
    ),
    "trpo_equal": Setting(
        "trpo",
        f"--num-envs 1 --num-steps 2048 --minibatch-size 128 --cg-iterations 15 {EQUAL_TRPO}",
        "trpo",
        200_000,
        equal=True,
    ),
    "trpo_equal16": Setting(
        "trpo",
        f"--num-envs 16 --num-steps 64 --minibatch-size 64 --cg-iterations 10 {EQUAL_TRPO}",
        "trpo_16",
        200_000,
        equal=True,
    ),
    "trpo_default": Setting("trpo", "", "trpo"),
    "dqn_equal": Setting(
        "dqn",
        "--num-envs 1 --updates-per-step 1 --batch-size 32 --hidden 64 64 --learning-rate 1e-4 --loss huber "
        "--max-grad-norm 10 --buffer-size 1000000 --learning-starts 100 --target-update-every 10000 "
        "--exploration-fraction 0.1",
        "dqn",
        200_000,
        "CartPole-v1",
        equal=True,
    ),
    "sac_equal": Setting(
        "sac",
        "--num-envs 1 --learning-starts 1000 --batch-size 256 --learning-rate 3e-4 --q-learning-rate 3e-4 "
        "--updates-per-step 1",
        "sac",
        15_000,
        equal=True,
    ),
}


@dataclass
class Time:
    """One process."""

    who: str  # ours, sb3 or sbx
    what: str  # ours: the setting; a peer: its key in PEERS
    env: str
    threads: int  # 0: ours with its default
    kind: str  # cold, warm; SB3 compiles nothing: ""
    repeat: int
    asked: int  # steps
    steps: int  # taken
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


def timed(
    command: list[str], variables: dict[str, str], cores: list[int] | None = None
) -> tuple[str, float, float, float | None]:
    """Runs a process: its output, wall and processor seconds, and the cores that others kept busy meanwhile.

    `cores` confines the process to some of this one's.

    Raises:
        ValueError: if it fails, with the last line of its errors.
    """
    before, started = busy_seconds(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=out, stderr=err, cwd=ROOT)
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)  # before it has made its threads
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


def thread_variables(threads: int) -> dict[str, str]:
    """The environment variables that hold a process to so many threads; none for 0."""
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} if threads else {}


def time_ours(name: str, env: str, steps: int, repeat: int, cache: Path, kind: str, threads: int) -> Time:
    setting = SETTINGS[name]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "algos" / f"{setting.algorithm}.py"), "--env", env]
        command += ["--run-dir", str(run_dir), "--total-timesteps", str(steps), "--seed", str(repeat)]
        command += shlex.split(setting.flags)
        if threads:
            command += ["--threads", str(threads), "--env-threads", str(threads)]
        _, *used = timed(command, {"TORCHINDUCTOR_CACHE_DIR": str(cache), **thread_variables(threads)})
        if not (run_dir / "policy" / "policy.safetensors").exists():
            raise ValueError(f"{name}: the run saved no policy")
        taken = json.loads((run_dir / "summary.json").read_text())["global_step"]
    return Time("ours", name, env, threads, kind, repeat, steps, taken, *used)


def time_peer(
    who: str, key: str, env: str, steps: int, repeat: int, threads: int, python: str, cache: Path, kind: str
) -> Time:
    """SB3 or SBX with so many threads; one thread of SBX is one core, since JAX takes what it finds."""
    peer = PEERS[key]
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(Path(__file__).with_name("peers_sb3.py")), "--package", who, "--algo", peer.algo]
        command += ["--env", env, "--total-timesteps", str(steps), "--num-envs", str(peer.num_envs)]
        command += ["--settings", peer.settings, "--seed", str(repeat), "--out", f"{folder}/model"]
        command += ["--threads", str(threads)]
        variables, cores = thread_variables(threads), None
        if who == "sbx":
            variables |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            variables |= {"JAX_PLATFORMS": "cpu"}
            cores = sorted(os.sched_getaffinity(0))[:threads]
        output, *used = timed(command, variables, cores)
    return Time(who, key, env, threads, kind, repeat, steps, int(output.split()[-1]), *used)


def installed(python: str, *packages: str) -> dict[str, str]:
    """The versions of those of `packages` that the interpreter has."""
    code = (
        "import sys; from importlib import metadata as m\n"
        "have = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print(*(f'{p}={have[p]}' for p in sys.argv[1:] if p in have))"
    )
    try:
        result = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"{python}: is not a Python interpreter that works ({error})") from None
    return dict(word.split("=") for word in result.stdout.split())


def rows(times: list[Time], settings: dict[str, Setting]) -> list[dict[str, Any]]:
    """For each setting and number of threads the median steps per second of all, and ours divided by the peers'.

    A peer's rate is that with as many threads, or, where ours has its default, that of its best number of threads. A
    ratio is between equals: cold with cold, warm with warm; SB3 compiles nothing.
    """
    rates: dict[tuple[Any, ...], list[float]] = {}  # by who, what, environment, steps; threads, kind
    for item in times:
        key = (item.who, item.what, item.env, item.asked, item.threads, item.kind)
        rates.setdefault(key, []).append(item.steps_per_second)
    middle = {key: median(values) for key, values in rates.items()}
    found = []
    for name, setting in settings.items():
        task = (setting.env, setting.steps)
        ours = {key[4:]: rate for key, rate in middle.items() if key[:4] == ("ours", name, *task)}
        for threads in sorted({threads for threads, _ in ours}):
            if not {(threads, "cold"), (threads, "warm")} <= set(ours):
                continue
            row = {"setting": name, "algorithm": setting.algorithm, "env": setting.env, "threads": threads}
            row |= {"flags": setting.flags, "peer": PEERS[setting.peer].title, "steps": setting.steps}
            row |= {"cold": ours[threads, "cold"], "warm": ours[threads, "warm"]}
            for who in ("sb3", "sbx"):
                theirs = {
                    key[4:]: rate
                    for key, rate in middle.items()
                    if key[:4] == (who, setting.peer, *task) and threads in (0, key[4])
                }
                if theirs:
                    best = max(theirs, key=theirs.__getitem__)[0]
                    row[who] = {"threads": best}
                    for kind in ("cold", "warm"):
                        rate = theirs.get((best, kind), theirs.get((best, "")))
                        if rate is not None:
                            row[who] |= {kind: rate, f"ratio_{kind}": row[kind] / rate}
            found.append(row)
    return found


def check_idle(force: bool) -> None:
    """Raises ValueError where the load average says that something else runs, unless `force`."""
    load = os.getloadavg()[0]
    if load > IDLE_LOAD and not force:
        raise ValueError(
            f"load average {load:.2f}: something else runs here; wait until it is below {IDLE_LOAD}, or --force"
        )


def disturbed(times: list[dict[str, Any]]) -> list[str]:
    """The line of a table that says how many measurements other processes disturbed, or none."""
    found = sum((item["other_cores"] or 0) > IDLE_CORES for item in times)
    return [f"- **{found} of {len(times)} measurements were disturbed by other processes.**"] if found else []


def table(records: list[dict[str, Any]]) -> str:
    """The medians of one or several records as one Markdown table, with what is needed to judge them."""
    all_rows = [row for record in records for row in record["rows"]]
    sbx = any("sbx" in row for row in all_rows)
    header = ["algorithm", "setting", "environment", "threads", "ours, cold", "warm", "SB3", "ratio, cold", "warm"]
    header += ["SBX, cold", "warm", "ratio, cold", "warm"] if sbx else []
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    for row in all_rows:
        cells = [row["algorithm"], row["setting"], row["env"], str(row["threads"] or "default")]
        cells += [f"{row['cold']:,.0f}", f"{row['warm']:,.0f}"]
        sb3 = row.get("sb3")
        beside = "" if sb3 is None or sb3["threads"] == row["threads"] else f" ({sb3['threads']} threads)"
        cells += ["–"] * 3 if sb3 is None else [f"{sb3['cold']:,.0f}{beside}", *ratios(sb3)]
        if sbx:
            other = row.get("sbx")
            cells += ["–"] * 4 if other is None else [*(f"{other[k]:,.0f}" for k in ("cold", "warm")), *ratios(other)]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for record in records:
        where, code = record["machine"], record["commit"] or "no commit"
        packages = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        steps = ", ".join(f"{row['setting']} {row['steps']:,}" for row in first_of_each(record["rows"]))
        lines.append(
            f"- Environment steps per second of whole processes (steps: {steps}), median of {record['repeats']}, on "
            f"{len(record['cores'])} core(s) of {where['cpu']} ({where['system']}), commit {code[:12]}"
            f"{' (modified)' if record['dirty'] else ''}, {packages}."
        )
        for row in first_of_each(record["rows"]):
            flags = f"`{row['flags']}`" if row["flags"] else "defaults"
            text = f"- `{row['setting']}`: {flags}; the peer: {row['peer']}."
            if text not in lines:
                lines.append(text)
        lines += disturbed(record["times"])
    return "\n".join(lines) + "\n"


def ratios(peer: dict[str, Any]) -> list[str]:
    return [f"{peer[f'ratio_{kind}']:.2f}" if f"ratio_{kind}" in peer else "–" for kind in ("cold", "warm")]


def first_of_each(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of each setting."""
    return list({row["setting"]: row for row in reversed(found)}.values())[::-1]


def measure(
    settings: dict[str, Setting],
    threads: list[int],
    repeats: int,
    out: Path,
    cores: list[int],
    sbx_python: str | None = None,
) -> dict[str, Any]:
    """Times everything `repeats` times, ours and the peers in turns; the record is written after each process."""
    commit, dirty = git_commit(ROOT)
    times: list[Time] = []
    record: dict[str, Any] = {
        "repeats": repeats,
        "settings": {name: dataclasses.asdict(setting) for name, setting in settings.items()},
        "peers": {s.peer: dataclasses.asdict(PEERS[s.peer]) for s in settings.values()},
        "cores": cores,
        "machine": machine(),
        "commit": commit,
        "dirty": dirty,
        "versions": {**versions(), **installed(sys.executable, "stable-baselines3", "sb3-contrib")},
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "load_before": os.getloadavg()[0],
    }
    if sbx_python:
        record["versions"] |= installed(sbx_python, "sbx-rl", "jax")

    def note(item: Time) -> None:
        times.append(item)
        record["times"] = [{**dataclasses.asdict(t), "steps_per_second": t.steps_per_second} for t in times]
        record["rows"] = rows(times, settings)
        write_text(out, json.dumps(record, indent=1) + "\n")
        warning = "  DISTURBED by other processes" if (item.other_cores or 0) > IDLE_CORES else ""
        title = f"{item.who} {item.what} {item.kind}, threads {item.threads or 'default'}"
        print(f"repeat {item.repeat}  {title:40} {item.seconds:8.1f} s  {item.steps_per_second:,.0f} steps/s{warning}")
        sys.stdout.flush()

    for repeat in range(1, repeats + 1):
        seen = set()
        for name, setting in settings.items():
            for count in threads if setting.equal else [0]:
                with tempfile.TemporaryDirectory() as cache:
                    for kind in ("cold", "warm"):
                        note(time_ours(name, setting.env, setting.steps, repeat, Path(cache), kind, count))
                for peer_threads in [count] if count else threads:
                    for who, python in (("sb3", sys.executable), ("sbx", sbx_python)):
                        task = (who, setting.peer, setting.env, setting.steps, repeat, peer_threads)
                        if task in seen or python is None or (who == "sbx" and PEERS[setting.peer].algo not in SBX):
                            continue
                        seen.add(task)
                        with tempfile.TemporaryDirectory() as cache:
                            for kind in ("cold", "warm") if who == "sbx" else ("",):
                                note(time_peer(*task, python, Path(cache), kind))
    return record


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/speed.py", description="Steps per second here and in Stable-Baselines3.")
    parser.add_argument("--name", default="hopper", help="results/speed/<name>.json and .md; default hopper")
    parser.add_argument("--settings", nargs="+", default=["default"], help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--env", help="another environment than the settings'")
    parser.add_argument("--steps", type=int, help="other steps than the settings'")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch threads; default 1 2")
    parser.add_argument("--cores", type=int, default=2, help="cores that every process is confined to; default 2")
    parser.add_argument("--sbx-python", help="interpreter that has sbx-rl (not needed here): SBX is measured too")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="default results/")
    parser.add_argument("--force", action="store_true", help="measure even while something else runs")
    args = parser.parse_args(argv)
    with usage_errors():
        unknown = [name for name in args.settings if name not in SETTINGS]
        if unknown:
            raise ValueError(f"--settings {' '.join(unknown)}: known are {', '.join(SETTINGS)}")
        if min(1 if args.steps is None else args.steps, args.repeats, args.cores, *args.threads) < 1:
            raise ValueError("--steps, --repeats, --threads and --cores must be at least 1")
        settings = {name: chosen(name, args.env, args.steps) for name in args.settings}
        check_installed(settings, args.sbx_python)
        check_idle(args.force)
        cores = confine(args.cores)
        out = args.results / "speed" / f"{args.name}.json"
        record = measure(settings, args.threads, args.repeats, out, cores, args.sbx_python)
    text = table([record])
    write_text(out.with_suffix(".md"), text)
    print(text)
    return 0


def chosen(name: str, env: str | None, steps: int | None) -> Setting:
    """The setting of that name, with another environment or number of steps where one is given."""
    changes = {key: value for key, value in (("env", env), ("steps", steps)) if value is not None}
    return dataclasses.replace(SETTINGS[name], **changes)


def check_installed(settings: dict[str, Setting], sbx_python: str | None) -> None:
    """Raises ValueError if a peer that the settings need is not installed."""
    algorithms = {PEERS[setting.peer].algo for setting in settings.values()}
    needed = {"stable_baselines3"} | ({"sb3_contrib"} if "trpo" in algorithms else set())
    for package in sorted(needed):
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise ValueError(f"{name} is not installed: pip install -c constraints.txt -e '.[peers]'")
    if sbx_python is not None and "sbx-rl" not in installed(sbx_python, "sbx-rl"):
        raise ValueError(f"--sbx-python {sbx_python}: that interpreter has no sbx-rl; pip install sbx-rl there")


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
