"""One run: folder, seeds, phases, log, evaluation, checkpoints, and the way back after a kill."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from cleanrl_zoo.run.alarms import Alarms
from cleanrl_zoo.run.arguments import (
    LanguageArgs,
    RunArgs,
    check_unused,
    exit_with,
    flag,
    folder_name,
    read_run,
    run_folder,
)
from cleanrl_zoo.run.checkpoint import (
    DamagedCheckpoint,
    capture,
    list_checkpoints,
    load_checkpoint,
    restore,
    save_checkpoint,
    write_json,
)
from cleanrl_zoo.run.compiling import resolve_compile
from cleanrl_zoo.run.distributed import World
from cleanrl_zoo.run.metrics import MetricLog
from cleanrl_zoo.run.progress import Progress, duration
from cleanrl_zoo.run.provenance import provenance, versions
from cleanrl_zoo.run.seeding import global_random_state, seed_everything, set_global_random_state

StateT = TypeVar("StateT")
Evaluate = Callable[[Any], tuple[np.ndarray, np.ndarray]]


class NonFinite(RuntimeError):
    """A tensor that must be finite is not; the message names it."""


class Run:
    """Everything of a training run that is not the algorithm. Used as a context manager around the training loop.

    Args:
        args: the parsed flags. `args.resume` goes on with a run, otherwise a new folder is made.
        envs: the training environments; their episodes are counted and their state is part of the checkpoint. For
            language models the source of prompts, where a completion is an episode and its reward the return.
        evaluate: `evaluate(state) -> (returns [episodes], lengths [episodes])` of the deterministic policy, on
            environments and generators of its own; for language models of sampled completions of held-out prompts.
        world: the ranks that train together; only rank 0 evaluates, shows and writes anything.

    Set-up ends with one line and exit code 2 on a run folder that is taken, in use or cannot be written, and on a
    checkpoint that is damaged or of another version. `recorded` is the content of run.json.
    """

    def __init__(self, args: RunArgs, envs: Any, evaluate: Evaluate, world: World | None = None) -> None:
        self.args, self.envs, self.evaluate = args, envs, evaluate
        self.is_main = world is None or world.is_main
        self.algorithm = Path(sys.modules[type(args).__module__].__file__ or "run").stem
        self.compile = resolve_compile(args.compile, args.device)
        self._check_boundaries()
        torch.set_num_threads(args.threads)
        threadpool_limits(args.threads, "blas")  # NumPy's, which asks for every core otherwise
        if args.device.startswith("cuda"):  # resuming is bit-equal only with deterministic kernels
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        seed_everything(args.seed)

        self.returns: deque[float] = deque(maxlen=100)  # of the last training episodes
        self.eval_curve: list[list[float]] = []
        self.eval_returns: list[float] = []  # of the last evaluation
        self.global_step = 0
        self.seconds_before = 0.0
        self.alarms = Alarms() if isinstance(args, LanguageArgs) else None
        self._resumed_from: Path | None = None
        self._values: dict[str, list[Tensor | float]] = {}
        self._episodes: list[tuple[float, int]] = []
        self._seconds: dict[str, float] = {}
        self._saved: Any = None
        self._lock: Any = None

        self.log: Any = None  # opened when a resumed run has been restored: nothing is cut before
        self.progress = self._progress(0)
        try:
            self._resume() if args.resume is not None else self._new_folder()
        except OSError as error:
            self._unlock_folder()
            name, advice = ("--resume", "") if args.resume else ("--run-dir", "; give a folder that can")
            exit_with(f"{name} {self.run_dir}: cannot be written ({error.strerror}){advice}")

    # Set-up

    def _check_boundaries(self) -> None:
        """An engine that cannot save its state is re-seeded at boundaries: they must be rare against an episode."""
        args, limit = self.args, self.envs.max_episode_steps
        if self.envs.exact_state or args.checkpoint_every == 0 or limit is None:
            return
        least = 10 * limit * args.num_envs
        if args.checkpoint_every < least:
            exit_with(
                f"--checkpoint-every {args.checkpoint_every}: this engine starts {args.subject} anew at each "
                f"checkpoint; give at least {least} (ten episode limits per environment) or 0 (only at the end)"
            )

    def _new_folder(self) -> None:
        args = self.args
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        default = Path("runs") / self.algorithm / folder_name(args.subject) / f"seed_{args.seed}_{stamp}"
        self.run_dir = Path(args.run_dir) if args.run_dir else default
        self.recorded = self._description()
        if not self.is_main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock_folder()
        try:
            check_unused(self.run_dir)
        except ValueError as error:
            exit_with(str(error))
        write_json(self.run_dir / "run.json", self.recorded)

    def _resume(self) -> None:
        """Reads run.json and the newest checkpoint, or the one named."""
        self.run_dir = run_folder(self.args.resume or "")
        self.recorded = read_run(self.run_dir)
        if (self.run_dir / "summary.json").exists():
            print(f"{self.run_dir} is finished; its results are in {self.run_dir / 'summary.json'}", file=sys.stderr)
            sys.exit(0)
        self._lock_folder()
        now, then = versions(), self.recorded.get("provenance", {}).get("versions", {})
        for name in sorted(name for name in now if now[name] != then.get(name, now[name])):
            print(f"note: {name} was {then[name]}, is {now[name]}: the numbers may differ", file=sys.stderr)
        found, named = list_checkpoints(self.run_dir / "checkpoints"), Path(self.args.resume or "")
        chosen = named if named != self.run_dir else (found[-1] if found else None)
        if chosen is None:
            return  # killed before the first boundary: the run starts again from its seed
        try:
            self._saved = load_checkpoint(chosen)
        except DamagedCheckpoint as error:
            self._refuse(chosen, str(error))
        if self._saved["args"] != self.recorded["args"]:
            self._refuse(chosen, f"{self.run_dir / 'run.json'} does not hold the flags that {chosen} was made with")
        self._resumed_from = chosen

    def _refuse(self, checkpoint: Path, reason: str) -> NoReturn:
        """Ends with `reason` and the checkpoint before the refused one."""
        self._unlock_folder()
        earlier = [path for path in list_checkpoints(self.run_dir / "checkpoints") if path.name < checkpoint.name]
        offer = f"the one before it: --resume {earlier[-1]}" if earlier else "there is no earlier checkpoint"
        exit_with(f"{reason}; nothing was changed; {offer}")

    def _lock_folder(self) -> None:
        """Holds the folder for this process as long as it lives, so that a run is not resumed twice at once."""
        if not self.is_main:
            return
        try:
            import fcntl
        except ImportError:  # no advisory locks on this system
            return
        self._lock = open(self.run_dir / ".lock", "w")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            name = "--resume" if self.args.resume else "--run-dir"
            exit_with(f"{name} {self.run_dir}: in use by another process; wait for it or give another folder")

    def _unlock_folder(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _start_wandb(self) -> Any:
        import wandb

        # of run.json, which no other run shares and a resumed one reads again: folders may have one name
        identity = hashlib.sha256(json.dumps(self.recorded, sort_keys=True).encode()).hexdigest()[:16]
        name = f"{self.algorithm} {self.args.subject} {self.run_dir.name}"
        return wandb.init(project="cleanrl_zoo", name=name, id=identity, resume="allow", config=self.recorded["args"])

    def _description(self) -> dict[str, Any]:
        """The content of run.json: algorithm, flags, provenance."""
        flags = {**dataclasses.asdict(self.args), "compile": self.compile}
        del flags["resume"], flags["run_dir"]
        return {
            "algorithm": self.algorithm,
            "args": flags,
            "provenance": provenance(self.envs),
            "command": ["python", f"algos/{self.algorithm}.py", *sys.argv[1:]],
        }

    def resume_or(self, create: Callable[[], StateT]) -> StateT:
        """A new state, or, in a resumed run, a new one filled with what the checkpoint holds."""
        state, offset = create(), 0
        if self._saved is not None:
            own = self._saved["run"]
            try:
                state = restore(state, self._saved["state"])
                self.envs.load_state_dict(self._saved["envs"])
                self.returns.extend(own["returns"])
                self.eval_curve, self.eval_returns = own["eval_curve"], own["eval_returns"]
                self.global_step, self.seconds_before, offset = own["global_step"], own["seconds"], own["log_bytes"]
                if self.alarms is not None:
                    self.alarms.load_state_dict(own["alarms"])
                set_global_random_state(self._saved["random"])
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                self._refuse(self._resumed_from, f"{self._resumed_from} is of another version ({error})")
        if not self.is_main:
            self._saved = None
            return state
        try:
            self.log = MetricLog(self.run_dir, offset, self._start_wandb() if self.args.track else None)
        except ValueError as error:
            self._refuse(self._resumed_from, str(error))
        except OSError as error:
            exit_with(f"{self.run_dir}: cannot be written ({error.strerror})")
        compiling = "; compiling first, once" if self.compile else ""
        if self._saved is None:
            again = "no checkpoint yet, starting again from the beginning in" if self.args.resume else "run folder:"
            self.progress.message(f"{again} {self.run_dir}{compiling}")
        else:
            unit = self.args.words.unit[:-1]
            self.progress.message(f"resumed {self.run_dir} at {unit} {self.global_step:,}{compiling}")
            for later in list_checkpoints(self.run_dir / "checkpoints"):  # of a future that is run anew
                if later.name > self._resumed_from.name:
                    shutil.rmtree(later)
        self._saved = None
        self.progress = self._progress(self.global_step)
        return state

    def _progress(self, first_step: int) -> Progress:
        name = f"{self.algorithm} {self.args.subject} seed {self.args.seed}"
        return Progress(name, self.args.total_steps, first_step, self.args.words, silent=not self.is_main)

    # The loop

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the wall-clock seconds inside to `time/<name>` of the log interval."""
        started = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self, values: Mapping[str, Tensor | float]) -> None:
        """Notes one iteration's values; the log shows their mean over the interval. Tensors are read only then."""
        for tag, value in values.items():
            self._values.setdefault(tag, []).append(value)

    def check_finite(self, **values: Tensor | np.ndarray) -> None:
        """Raises NonFinite when one of the named arrays or tensors holds NaN or Inf. Waits for the device."""
        for name, value in values.items():
            finite = np.isfinite(value) if isinstance(value, np.ndarray) else torch.isfinite(value)
            if not finite.all():
                raise NonFinite(f"{name} holds NaN or Inf")

    def end_iteration(self, state: Any) -> None:
        """Counts the episodes, then logs, evaluates and writes a checkpoint, each when its multiple was reached."""
        previous, self.global_step = self.global_step, state.global_step
        for episode in self.envs.pop_episodes():
            self._episodes.append(episode)
            self.returns.append(episode[0])
        for tag, seen in self._values.items():
            if tag.startswith("losses/") and not math.isfinite(seen[-1]):
                raise NonFinite(f"{tag} is {float(seen[-1])}")
        finished = self.global_step >= self.args.total_steps
        if not self.is_main:
            self._values, self._episodes, self._seconds = {}, [], {}
            return
        evaluate = self._due(previous, self.args.eval_every) or finished
        checkpoint = self._due(previous, self.args.checkpoint_every) or finished
        if evaluate:
            self._evaluate(state)
        if evaluate or checkpoint or self._due(previous, self.args.log_every):
            self._write_row()
        if checkpoint:
            if not self.envs.exact_state and not finished:
                state.cut(self.envs.cut(self.global_step))
            self._checkpoint(state)
        self.progress.update(self.global_step, self.returns)

    def _due(self, previous: int, every: int) -> bool:
        return every > 0 and self.global_step // every > previous // every

    def _evaluate(self, state: Any) -> None:
        with self.phase("eval"):
            returns, lengths = self.evaluate(state)
        self.eval_returns = [float(value) for value in returns]
        self.eval_curve.append([self.global_step, float(np.mean(returns))])
        self.metrics({"eval/episodic_return": np.mean(returns), "eval/episodic_length": np.mean(lengths)})

    def _write_row(self) -> None:
        row = {
            tag: float(torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in seen]).mean())
            for tag, seen in self._values.items()
        }
        if self._episodes:
            returns, lengths = zip(*self._episodes, strict=True)
            row["charts/episodic_return"] = float(np.mean(returns))
            row["charts/episodic_length"] = float(np.mean(lengths))
        row["charts/episodes"] = float(len(self._episodes))
        row["charts/SPS"] = self.progress.steps_per_second(self.global_step)
        row.update({f"time/{name}": seconds for name, seconds in self._seconds.items()})
        self.log.write(self.global_step, row)
        if self.alarms is not None:
            for sentence in self.alarms.check(row):
                self.progress.message(f"alarm at {self.args.words.unit[:-1]} {self.global_step:,}: {sentence}")
        self._values, self._episodes, self._seconds = {}, [], {}

    def _checkpoint(self, state: Any) -> None:
        own = {
            "global_step": self.global_step,
            "returns": list(self.returns),
            "eval_curve": self.eval_curve,
            "eval_returns": self.eval_returns,
            "seconds": self.seconds(),
            "log_bytes": self.log.flush(),
            "alarms": None if self.alarms is None else self.alarms.state_dict(),
        }
        tree = {
            "args": capture(self.recorded["args"]),
            "state": capture(state),
            "envs": capture(self.envs.state_dict()),
            "run": own,
            "random": capture(global_random_state()),
        }
        folder = self.run_dir / "checkpoints" / f"step_{self.global_step:012d}"
        save_checkpoint(folder, tree)

    def seconds(self) -> float:
        """Wall-clock seconds of training so far, over all processes of the run."""
        return self.seconds_before + time.perf_counter() - self.progress.started

    # The end

    def results(self, state: Any) -> dict[str, Any]:
        """The run's raw returns: last 100 training episodes, final deterministic evaluation, those on the way."""
        return {
            "algorithm": self.algorithm,
            "env": self.envs.env_id,
            "engine": self.envs.engine,
            "seed": self.args.seed,
            "global_step": state.global_step,
            "finished": True,
            "train_last100": {
                "mean": float(np.mean(self.returns)) if self.returns else None,
                "returns": list(self.returns),
            },
            "final_eval": {"mean": float(np.mean(self.eval_returns)), "returns": self.eval_returns},
            "eval_curve": self.eval_curve,
            "cut_episodes": self.envs.cut_episodes,
            "wall_clock_s": round(self.seconds(), 1),
            "steps_per_second": round(state.global_step / self.seconds(), 1),
        }

    def finish(self, results: dict[str, Any]) -> None:
        """Writes summary.json, which marks the run as finished, and says what came out."""
        write_json(self.run_dir / "summary.json", results)
        last, final, words = results["train_last100"], results["final_eval"], self.args.words
        best = max(self.eval_curve, key=lambda point: point[1])
        episodes = f"last {len(last['returns'])} {words.episodes}"
        width = max(len(episodes), len(words.evaluation))
        trained = (
            "" if isinstance(self.args, LanguageArgs) else f"  {words.score}, {episodes:<{width}}  no episode ended\n"
        )
        if last["mean"] is not None:
            trained = f"  {words.score}, {episodes:<{width}}  {words.number(last['mean'])}\n"
        self.progress.message(
            f"{self.progress.name}: {results['global_step']:,} {words.unit} in {duration(results['wall_clock_s'])} "
            f"({results['steps_per_second']:,.0f} {words.unit}/s)\n"
            f"{trained}  {words.score}, {words.evaluation:<{width}}  {words.number(final['mean'])} ± "
            f"{words.number(float(np.std(final['returns'])))}\n"
            f"  {words.score}, {'best evaluation on the way':<{width}}  {words.number(best[1])} at {words.unit[:-1]} "
            f"{best[0]:,.0f}\n"
            f"  run folder: {self.run_dir}"
        )

    def __enter__(self) -> "Run":
        # a scheduler's SIGTERM ends the run as Ctrl-C does; MuJoCo's warnings become one line each
        if threading.current_thread() is threading.main_thread():
            # SIGINT too: a shell's `&` in a script has it ignored
            numbers = (signal.SIGINT, signal.SIGTERM)
            self._old_handlers = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
        self._old_showwarning = warnings.showwarning
        warnings.showwarning = lambda message, *_: self.progress.message(f"note: {message}")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        warnings.showwarning = self._old_showwarning
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        with contextlib.suppress(OSError):  # a full disk has been told already
            if self.log is not None:
                self.log.close()
        self.envs.close()
        self._unlock_folder()
        script = sys.argv[0] if sys.argv[0].endswith(".py") else f"algos/{self.algorithm}.py"
        # as found in the folder: an interrupt may come between a checkpoint's renaming and any note of it
        found = list_checkpoints(self.run_dir / "checkpoints")
        last = f"last checkpoint {found[-1]}" if found else "no checkpoint yet"
        command = f"python {shlex.join([script, '--resume', os.fspath(self.run_dir)])}"
        advice = f"{'go on' if found else 'begin again'} with: {command}"
        if isinstance(error, KeyboardInterrupt):
            self.progress.message(f"stopped at {self.args.words.unit[:-1]} {self.global_step:,}; {last}; {advice}")
            sys.exit(130)
        if isinstance(error, getattr(self.envs, "errors", ())):
            self.progress.message(f"error: {error}; {last}; mend that and {advice}")
            sys.exit(1)
        if isinstance(error, NonFinite):
            diverged = str(error).startswith(("losses/", "actions"))
            fields = dataclasses.asdict(self.args).items()
            rates = [flag(name) for name, value in fields if name.endswith("learning_rate") and value is not None]
            smaller = f"; try a smaller {' or '.join(rates)}" if diverged and rates else ""
            self.progress.message(
                f"error: {error} at {self.args.words.unit[:-1]} {self.global_step:,}; {last}{smaller}"
            )
            sys.exit(1)
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            where = f"{self.args.words.unit[:-1]} {self.global_step:,}"
            told = f": {str(error).splitlines()[0]}" if str(error) else ""
            self.progress.message(f"error: out of memory at {where}{told}; {last}; {advice}")
            sys.exit(1)
        if isinstance(error, OSError) and error.filename is not None and str(self.run_dir) in str(error.filename):
            self.progress.message(f"error: {error.filename}: {error.strerror}; {last}; {advice}")
            sys.exit(1)
