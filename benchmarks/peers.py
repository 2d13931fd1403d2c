"""Runs other packages on a suite's environments, with its seeds, steps and evaluations, and stores them as ours.

    python benchmarks/peers.py --suite peers                        # the peers that this suite names
    python benchmarks/peers.py --suite classic --only CartPole-v1   # Stable-Baselines3 beside any other suite
    python benchmarks/peers.py --suite sac --package sbx

A suite that names no runs of the package gets one for each of its algorithms that the package has, with the package's
own defaults, in `results/<suite>_<package>`; `benchmarks/report.py --suite <suite>_<package>` then shows ours and
theirs in one table and one figure. Every run is a process of `peers_sb3.py` with one thread, started by the functions
of `run.py`: finished runs are skipped; a run that was cut starts again, since the packages cannot resume one.
"""

import importlib.util
import sys
from pathlib import Path

import run
from records import ROOT, Parser, suite
from suites import PACKAGES, Entry, with_peers

from cleanrl_zoo.run.arguments import usage_errors

# What installs each module: the extra, but for SBX, which brings JAX.
INSTALL = {"stable_baselines3": "-e '.[peers]'", "sb3_contrib": "-e '.[peers]'", "sbx": "sbx-rl"}


def package_of(entry: Entry) -> str:
    """The package that an entry's runs train with."""
    return entry.flags[entry.flags.index("--package") + 1] if "--package" in entry.flags else "sb3"


def with_package(name: str, package: str) -> tuple[str, list[Entry]]:
    """The suite that shows the package beside ours, `name` itself or `<name>_<package>`, and the package's entries.

    Raises:
        ValueError: if no algorithm of the suite is in the package.
    """
    own = [entry for entry in suite(name) if entry.is_peer and package_of(entry) == package]
    if own:
        return name, own
    derived = [entry for entry in with_peers(name, package) if entry.is_peer]
    if not derived:
        has = ", ".join(sorted(set(PACKAGES[package].values())))
        raise ValueError(f"--suite {name}: --package {package} has none of its algorithms, only {has}")
    return f"{name}_{package}", derived


def check_installed(entries: list[Entry]) -> None:
    """Raises ValueError, naming the extra, if a package that the entries need is not installed."""
    needed = ["stable_baselines3"]
    needed += ["sb3_contrib"] * any(("--algo", "trpo") in zip(e.flags, e.flags[1:], strict=False) for e in entries)
    needed += ["sbx"] * any(package_of(entry) == "sbx" for entry in entries)
    for module in needed:
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"{module} is not installed: pip install -c constraints.txt {INSTALL[module]}")


def settings(entry: Entry) -> str:
    """What an entry's runs train with, in words."""
    words, own = list(entry.flags), []
    while words:
        word = words.pop(0)
        if word in ("--package", "--algo", "--eval-every", "--eval-episodes", "--log-every"):
            words.pop(0)
        else:
            own.append(word)
    return f"{package_of(entry)} with {' '.join(own) or 'its defaults'}"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/peers.py", description="Runs other packages beside a suite of ours.")
    parser.add_argument("--suite", required=True, help="a name in benchmarks/suites.py")
    parser.add_argument("--package", choices=PACKAGES, default="sb3", help="Stable-Baselines3 or SBX; default sb3")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each; default 1")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs", help="where runs live; default runs/")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="published results; default results/")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="of the peers, these: <name>, <env> or <name>/<env>"
    )
    args = parser.parse_args(argv)
    with usage_errors():
        if args.jobs < 1:
            raise ValueError(f"--jobs {args.jobs}: must be at least 1")
        name, entries = with_package(args.suite, args.package)
        entries = run.chosen(name, args.only, entries)
        check_installed(entries)
        jobs = run.make_jobs(name, entries, args.runs_dir.resolve(), args.results.resolve())
        args.runs_dir.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        print(f"{entry.name} on {entry.env}, {entry.steps:,} steps, {len(entry.seeds)} seeds: {settings(entry)}")
    run.listen()
    code = run.run_jobs(jobs, args.jobs)
    if code == 0:
        print(f"table and figures: python benchmarks/report.py --suite {name}")
    return code


if __name__ == "__main__":
    sys.exit(main())
