"""Trains with Stable-Baselines3 (sb3-contrib for TRPO), or with SBX, through their own public entry points.

    python benchmarks/peers_sb3.py --algo sac --env Hopper-v4 --total-timesteps 100000 --run-dir runs/sb3_sac

With their defaults, or with the constructor's arguments that `--settings` names as JSON; "lin_0.001" is a rate that
falls from 0.001 to 0, as RL Baselines3 Zoo writes it. `--normalize` puts VecNormalize around the environments, with its
defaults. `--out` saves the model: `speed.py` measures that as a process, from start to exit. `--run-dir` leaves the
files that a run of `algos/` leaves, so that `run.py` can run and publish it: its log with wall-clock seconds,
evaluations on the environments and seeds of ours, and its summary. Such a run cannot be resumed: one that was cut
starts again, a finished one is left as it is. The last line printed is the number of environment steps taken (a last
rollout is completed).

Only what the measured process needs is imported at the top: SBX may have an environment of its own, without this
package.
"""

import argparse
import json
import re
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

INSTALL = "pip install -c constraints.txt -e '.[peers]'"


def exit_with(message: str) -> NoReturn:
    """Prints one line to stderr and leaves with exit code 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


try:
    import gymnasium
    import torch
    from stable_baselines3 import A2C, DQN, PPO, SAC
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize
except ModuleNotFoundError as error:
    exit_with(f"{error.name} is not installed: {INSTALL}")

ALGORITHMS = ("ppo", "a2c", "sac", "dqn", "trpo")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; errors are one line, exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--algo", choices=ALGORITHMS, default="ppo")
    parser.add_argument("--package", choices=("sb3", "sbx"), default="sb3")
    parser.add_argument("--env", default="Hopper-v4")
    parser.add_argument("--total-timesteps", type=int, default=1_000_000)
    parser.add_argument("--num-envs", type=int, default=1, help="more than 1: DummyVecEnv")
    parser.add_argument(
        "--settings", default="{}", help="JSON: arguments of the constructor; default: the package's own"
    )
    parser.add_argument("--normalize", action="store_true", help="VecNormalize, frozen in evaluations")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: torch's default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="file to save the model to")
    parser.add_argument("--run-dir", type=Path, help="folder for the run's log and summary")
    parser.add_argument("--log-every", type=int, default=2000, help="steps between two rows of the log")
    parser.add_argument("--eval-every", type=int, default=250_000, help="steps between two evaluations; 0: at the end")
    parser.add_argument("--eval-episodes", type=int, default=10)
    args = parser.parse_args(argv)
    for name in ("total_timesteps", "num_envs", "log_every", "eval_episodes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    try:
        keywords(args.settings)
    except (ValueError, AttributeError) as error:
        parser.error(f"--settings {args.settings}: must be a JSON object of the constructor's arguments ({error})")
    if args.package == "sbx" and args.algo not in ("ppo", "sac", "dqn"):
        parser.error(f"--algo {args.algo}: SBX has ppo, sac and dqn")
    return args


def keywords(settings: str) -> dict[str, Any]:
    """The constructor's arguments. An activation is given by its name in torch.nn, a falling rate as "lin_<start>"."""
    values = json.loads(settings)
    if not isinstance(values, dict):
        raise ValueError("not an object")
    policy = values.get("policy_kwargs", {})
    if "activation_fn" in policy:
        policy["activation_fn"] = getattr(torch.nn, policy["activation_fn"])
    for name, value in values.items():
        if isinstance(value, str) and re.match(r"lin_\d", value):
            values[name] = falling(float(value.removeprefix("lin_")))
    return values


def falling(start: float) -> Any:
    """The rate as a function of the share of the run that is left, 1 to 0."""
    return lambda left: start * left


def make(args: argparse.Namespace) -> BaseAlgorithm:
    """The package's model, as its documentation makes it.

    Raises:
        ValueError: one line, if the package is not installed, or it refuses the environment or an argument.
    """
    try:
        if args.package == "sbx":
            import sbx

            algorithm = getattr(sbx, args.algo.upper())
        elif args.algo == "trpo":
            from sb3_contrib import TRPO as algorithm
        else:
            algorithm = {"ppo": PPO, "a2c": A2C, "sac": SAC, "dqn": DQN}[args.algo]
    except ModuleNotFoundError as error:
        install = "pip install -c constraints.txt sbx-rl" if args.package == "sbx" else INSTALL
        raise ValueError(f"{error.name} is not installed: {install}") from None
    settings = keywords(args.settings)
    try:
        env = args.env if args.num_envs == 1 else make_vec_env(args.env, args.num_envs)
        if args.normalize:
            gamma = {"gamma": settings["gamma"]} if "gamma" in settings else {}
            env = VecNormalize(make_vec_env(args.env, args.num_envs), **gamma)
        return algorithm("MlpPolicy", env, seed=args.seed, **settings)
    except (gymnasium.error.Error, AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"--algo {args.algo} --env {args.env} --settings {args.settings}: {error}") from None


class Recorder(BaseCallback):
    """Notes the training episodes, evaluates and writes the log, at the same multiples of steps as a run of ours."""

    def __init__(self, args: argparse.Namespace, log: Any, evaluate: Any) -> None:
        super().__init__()
        self.args, self.log, self.evaluate = args, log, evaluate
        self.returns: deque[float] = deque(maxlen=100)
        self.episodes: list[tuple[float, float]] = []  # since the last row: return, length
        self.eval_curve: list[list[float]] = []
        self.eval_returns: list[float] = []
        self.previous, self.started = 0, time.perf_counter()
        self.phase, self.since = "collect", self.started
        self.seconds: dict[str, float] = {}  # by phase, since the last row

    def enter(self, phase: str) -> None:
        """Counts the time since the last call as that of the phase until now; a new one begins."""
        now = time.perf_counter()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now

    def _on_rollout_start(self) -> None:
        self.enter("collect")

    def _on_rollout_end(self) -> None:
        self.enter("update")

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.episodes.append((float(info["episode"]["r"]), float(info["episode"]["l"])))
                self.returns.append(self.episodes[-1][0])
        previous, self.previous = self.previous, self.num_timesteps
        if self.num_timesteps < self.args.total_timesteps:  # the end comes after the last update: `finish`
            evaluate = self._due(previous, self.args.eval_every)
            if evaluate or self._due(previous, self.args.log_every):
                self.write(evaluate)
        return True

    def _due(self, previous: int, every: int) -> bool:
        return every > 0 and self.num_timesteps // every > previous // every

    def write(self, evaluate: bool) -> None:
        """Writes one row of the log, with an evaluation if asked."""
        row = {"charts/episodes": float(len(self.episodes))}
        if self.episodes:
            returns, lengths = zip(*self.episodes, strict=True)
            row["charts/episodic_return"] = sum(returns) / len(returns)
            row["charts/episodic_length"] = sum(lengths) / len(lengths)
        phase = self.phase
        if evaluate:
            self.enter("eval")
            self.eval_returns, lengths = self.evaluate()
            mean = sum(self.eval_returns) / len(self.eval_returns)
            self.eval_curve.append([self.num_timesteps, mean])
            row |= {"eval/episodic_return": mean, "eval/episodic_length": sum(lengths) / len(lengths)}
        self.enter(phase)
        row["charts/SPS"] = self.num_timesteps / (time.perf_counter() - self.started)
        row |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.log.write(self.num_timesteps, row)
        self.episodes, self.seconds = [], {}


def record(model: BaseAlgorithm, args: argparse.Namespace) -> None:
    """Trains and writes run.json, metrics.jsonl and summary.json into the run folder.

    Evaluations play on our environments of the evaluation stream: the same first states as in our runs of that seed.
    """
    from cleanrl_zoo.envs import EVAL_STREAM, make_vec, run_episodes
    from cleanrl_zoo.run.checkpoint import write_json
    from cleanrl_zoo.run.metrics import MetricLog
    from cleanrl_zoo.run.provenance import provenance

    args.run_dir.mkdir(parents=True, exist_ok=True)
    eval_envs = make_vec(args.env, args.eval_episodes, args.seed, stream=EVAL_STREAM, threads=1)
    own = make_vec(args.env, 1, args.seed, "gymnasium")  # for its name and versions: what the package steps
    package = {"sb3": "stable-baselines3", "sbx": "sbx-rl"}[args.package]
    packages = [package] if args.algo != "trpo" else [package, "sb3-contrib"]
    flags = {name: value for name, value in vars(args).items() if name not in ("run_dir", "out")}
    run = {
        "algorithm": "peers_sb3",
        "args": flags,
        "provenance": provenance(own, packages),
        "command": ["python", "benchmarks/peers_sb3.py", *sys.argv[1:]],
    }
    own.close()
    write_json(args.run_dir / "run.json", run)
    scales = model.get_vec_normalize_env() if args.normalize else None

    def evaluate() -> tuple[list[float], list[float]]:
        def act(obs: Any) -> Any:
            return model.predict(obs if scales is None else scales.normalize_obs(obs), deterministic=True)[0]

        returns, lengths = run_episodes(eval_envs, act)
        return [float(value) for value in returns], [float(value) for value in lengths]

    log = MetricLog(args.run_dir)
    recorder = Recorder(args, log, evaluate)
    model.learn(args.total_timesteps, callback=recorder)
    recorder.write(evaluate=True)
    eval_envs.close()
    seconds = time.perf_counter() - recorder.started
    last = list(recorder.returns)
    summary = {
        "algorithm": "peers_sb3",
        "env": args.env,
        "engine": "gymnasium",
        "seed": args.seed,
        "global_step": model.num_timesteps,
        "finished": True,
        "train_last100": {"mean": sum(last) / len(last) if last else None, "returns": last},
        "final_eval": {"mean": recorder.eval_curve[-1][1], "returns": recorder.eval_returns},
        "eval_curve": recorder.eval_curve,
        "cut_episodes": 0,
        "wall_clock_s": round(seconds, 1),
        "steps_per_second": round(model.num_timesteps / seconds, 1),
    }
    write_json(args.run_dir / "summary.json", summary)
    log.close()  # which now says that the run has ended


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.run_dir is not None and (args.run_dir / "summary.json").exists():
        print(f"{args.run_dir} is finished; its results are in {args.run_dir / 'summary.json'}", file=sys.stderr)
        return
    if args.run_dir is not None and (args.run_dir / "run.json").exists():
        print(f"{args.run_dir} was cut; this run cannot be resumed and starts again", file=sys.stderr)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        model = make(args)
    except ValueError as error:
        exit_with(str(error))
    try:
        if args.run_dir is None:
            model.learn(args.total_timesteps)
        else:
            record(model, args)
    except KeyboardInterrupt:
        print("stopped; this run cannot be resumed: it would start again", file=sys.stderr)
        sys.exit(130)
    if args.out:
        model.save(args.out)
    print(model.num_timesteps)


if __name__ == "__main__":
    main()
