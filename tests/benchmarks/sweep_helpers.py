"""A fake algorithm for the tests of sweeps and launchers: a file as in algos/, which runs in a fraction of a second."""

import json
from pathlib import Path

# The return at every step is 100 × quality + seed. A checkpoint after every row; two rows, then a run waits until
# the file FAKE_GATE, if one is named, exists.
FAKE = '''
import json, os, sys, time
from pathlib import Path

if __name__ != "__main__":
    from dataclasses import dataclass
    from cleanrl_zoo.run.arguments import EnvArgs, check

    @dataclass
    class Args(EnvArgs):
        """Fake."""
        total_timesteps: int = 100
        log_every: int = 10
        quality: float = 0.5
        colour: str = "red"
        hidden: tuple[int, ...] = (4, 4)

        def check(self):
            super().check()
            check(self, "quality", at_most=1)

    PRESETS = {"debug": {}}
else:
    words = sys.argv[1:]
    flag = lambda name: words[words.index("--" + name) + 1] if "--" + name in words else None
    resumed = flag("resume")
    folder = Path(resumed or flag("run-dir"))
    log = folder / "metrics.jsonl"
    if resumed:
        args = json.loads((folder / "run.json").read_text())["args"]
    else:
        folder.mkdir(parents=True)
        preset = json.loads(Path(flag("preset")).read_text())
        args = {"quality": 0.5, "colour": "red", "preset": flag("preset")} | preset
        args |= {"env": flag("env"), "seed": int(flag("seed")), "total_timesteps": int(flag("total-timesteps"))}
        (folder / ".writing").write_text(json.dumps({"algorithm": "fake", "args": args, "provenance": {}}))
        (folder / ".writing").rename(folder / "run.json")
    with open(folder.parents[1] / "calls.txt", "a") as file:
        print(folder.parent.name, args["seed"], "resume" if resumed else "start", os.getpid(), file=file)
    if args["colour"] == "broken" or args["colour"] == "cracked" and not resumed:
        print("RuntimeError: the sky fell", file=sys.stderr)
        sys.exit(3)
    if args["env"] == "Unknown-v0":
        print("error: --env Unknown-v0: no such environment", file=sys.stderr)
        sys.exit(2)
    steps = args["total_timesteps"]
    done = len(log.read_text().splitlines()) if log.exists() else 0
    value = 100 * args["quality"] + args["seed"]
    for step in range(10 * (done + 1), steps + 1, 10):
        while step == 30 and "FAKE_GATE" in os.environ and not os.path.exists(os.environ["FAKE_GATE"]):
            time.sleep(0.02)
        row = {"global_step": step, "charts/episodes": 1.0, "charts/episodic_return": value}
        row["eval/episodic_return"] = -value
        with open(log, "a") as file:
            file.write(json.dumps(row) + "\\n")
    summary = {"train_last100": {"mean": value}, "final_eval": {"mean": -value}, "eval_curve": [[steps, -value]],
               "wall_clock_s": 1.0}
    (folder / ".writing").write_text(json.dumps(summary))
    (folder / ".writing").rename(folder / "summary.json")
'''

SPACE = """
def quality(trial):
    return {"quality": trial.suggest_float("quality", 0.0, 1.0)}

def colours(trial):
    return {"colour": trial.suggest_categorical("colour", ["red", "green", "blue"])}

def half(trial):  # one half of it is refused
    return {"quality": trial.suggest_int("quality", 0, 3) / 2, "hidden": [1, 2]}

def broken(trial):
    return {"colour": trial.suggest_categorical("colour", ["broken", "cracked"])}

def misspelt(trial):
    return {"qualty": trial.suggest_float("qualty", 0.0, 1.0)}

def refused(trial):
    return {"quality": trial.suggest_float("quality", 2.0, 3.0)}
"""


def write_fake(folder: Path) -> Path:
    """The folder of algorithms with fake.py in it; beside it space.py."""
    (folder / "algos").mkdir()
    (folder / "algos" / "fake.py").write_text(FAKE)
    (folder / "space.py").write_text(SPACE)
    return folder / "algos"


def command(folder: Path, space: str, *words: str, trials: int = 3, name: str = "s", env: str = "E-v0") -> list[str]:
    """The words of a sweep of the fake algorithm in `folder`."""
    places = ["--runs-dir", str(folder / "runs"), "--results", str(folder / "results")]
    plan = ["--name", name, "--algorithm", "fake", "--env", env, "--trials", str(trials)]
    return [*plan, "--space", f"{folder / 'space.py'}:{space}", *places, *words]


def calls(folder: Path, name: str = "s") -> list[list[str]]:
    """Every start and resumption of a run: trial, seed, which of both, process id."""
    path = folder / "runs" / "sweeps" / name / "calls.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def read(folder: Path, file: str, name: str = "s") -> dict:
    return json.loads((folder / "results" / "sweeps" / name / file).read_text())
