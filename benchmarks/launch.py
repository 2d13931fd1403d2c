"""Where runs run: as processes of this machine, or as tasks of a Ray cluster; and the algorithm's file as a module.

A launched run has the part of `subprocess.Popen` that the runners use: `poll`, `wait`, `send_signal`, `kill` and
`returncode`.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from records import ROOT

from cleanrl_zoo.run.arguments import flag, nearest

LAUNCHERS = ("local", "ray")
RETRIES = 3  # how often a run that was killed is resumed
STOP_SECONDS = 60  # what a run may take to stop after Ctrl-C before it is killed; its last checkpoint stays


class Process(subprocess.Popen):
    """A run as a process of this machine, in a session of its own: a Ctrl-C in the terminal does not reach it."""

    def kill(self) -> None:
        """Kills the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class RayRun:
    """A run as a Ray task, which Ray starts again on another worker, from its last checkpoint, when it was killed.

    The folder of the run and both files must be the same ones on every machine of the cluster.
    """

    def __init__(
        self, first: list[str], again: list[str] | None, run_dir: Path, stdout: Path, stderr: Path, cpus: int, gpus: int
    ) -> None:
        """Hands the run to the cluster. `again` goes on with a run that has begun; None if it cannot be resumed."""
        self.returncode: int | None = None
        self._stderr = stderr
        task = _task().options(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES, retry_exceptions=True)
        self._task = task.remote(first, again, str(run_dir), str(stdout), str(stderr))

    def poll(self) -> int | None:
        """The exit code, or None while the run goes on or waits for a worker."""
        import ray

        if self.returncode is None and ray.wait([self._task], timeout=0)[0]:
            try:
                self.returncode = ray.get(self._task)
            except ray.exceptions.RayError as error:  # stopped, or killed too often
                self.returncode = -signal.SIGKILL
                with open(self._stderr, "a") as file:
                    print(f"Ray gave up: {str(error).strip().splitlines()[-1]}", file=file)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """As `Popen.wait`."""
        import ray

        if self.returncode is None and not ray.wait([self._task], timeout=timeout)[0]:
            raise subprocess.TimeoutExpired("ray", timeout or 0)
        return self.poll()

    def send_signal(self, _: int) -> None:
        """Stops the run as Ctrl-C does, whatever the signal."""
        import ray

        ray.cancel(self._task)

    def kill(self) -> None:
        """Kills the run's worker."""
        import ray

        ray.cancel(self._task, force=True)


@functools.cache
def _task() -> Any:
    """The Ray function that makes a run. It is defined in here so that Ray sends its code and needs no import path."""
    import ray

    @ray.remote
    def make_run(first: list[str], again: list[str] | None, run_dir: str, stdout: str, stderr: str) -> int:
        """The run's exit code; RuntimeError if it was killed, so that Ray tries again."""
        import fcntl
        import os
        import shutil
        import signal
        import subprocess
        from pathlib import Path

        folder = Path(run_dir)
        if (folder / ".lock").exists():  # a run may outlive the worker that began it: then its results are waited for
            with open(folder / ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "summary.json").exists():
            return 0
        if again is None:
            shutil.rmtree(folder, ignore_errors=True)
        with open(stdout, "w") as out, open(stderr, "w") as err:
            process = subprocess.Popen(
                again if again and (folder / "run.json").exists() else first,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                code = process.wait()
            except KeyboardInterrupt:  # how Ray cancels
                process.send_signal(signal.SIGINT)
                process.wait()
                raise
        if code < 0:
            raise RuntimeError(f"the run was killed by signal {-code}")
        return code

    return make_run


def connect(launcher: str) -> None:
    """Makes the launcher ready. Ray: the cluster that RAY_ADDRESS names or that runs here, else one of this machine.

    Raises:
        ImportError: if ray is not installed.
        ValueError: if the cluster cannot be reached.
    """
    if launcher == "local":
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ImportError(
            "--launcher ray: ray is not installed; install it with pip install -c constraints.txt -e '.[ray]'"
        ) from None
    try:
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises this very class where its processes do not come up in time
        where = os.environ.get("RAY_ADDRESS", "this machine")
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--launcher ray: the cluster at {where} cannot be reached ({reason})") from None


def launch(
    launcher: str,
    first: Sequence[Any],
    again: Sequence[Any] | None,
    run_dir: Path,
    stdout: Path,
    stderr: Path,
    locks: tuple[int, ...] = (),
) -> Process | RayRun:
    """Starts a run, or goes on with one that has begun: words of both commands.

    Args:
        launcher: one of `LAUNCHERS`.
        first: the command of a new run; its `--threads` and `--device` are what a Ray task asks for.
        again: the command that resumes it; None if it cannot be resumed.
        locks: file descriptors that a process of this machine inherits: what they lock is locked as long as it lives.
    """
    first, again = [str(word) for word in first], again and [str(word) for word in again]
    if launcher == "ray":
        cpus = int(_last(first, "--threads", "1"))
        gpus = int(_last(first, "--device", "cpu").startswith("cuda"))
        return RayRun(first, again, run_dir, stdout, stderr, cpus, gpus)
    begun = again is not None and (run_dir / "run.json").exists()
    if not begun:
        shutil.rmtree(run_dir, ignore_errors=True)  # killed before it had written anything, or cannot be resumed
    with open(stdout, "w") as out, open(stderr, "w") as err:
        return Process(
            again if begun else first,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=locks,
            start_new_session=True,
        )


def _last(words: list[str], flag: str, default: str) -> str:
    """The last value that the command's words give the flag."""
    values = [after for word, after in zip(words, words[1:], strict=False) if word == flag]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return values[-1] if values else default


def places(results: Path | None, runs_dir: Path | None, launcher: str) -> tuple[Path, Path]:
    """Folders of the results and of the runs; for a cluster both lie in the shared folder that `--results` names."""
    if runs_dir is None:
        runs_dir = results / "runs" if results and launcher == "ray" else ROOT / "runs"
    return (results or ROOT / "results").resolve(), runs_dir.resolve()


@functools.cache
def load_algorithm(script: Path) -> ModuleType:
    """The module of an algorithm's file, with its `Args` and `PRESETS`.

    Raises:
        ValueError: if there is no such file; the nearest is named.
    """
    if not script.is_file():
        near = nearest(script.stem, [path.stem for path in script.parent.glob("*.py")])
        raise ValueError(f"{script.parent.name}/{script.name} does not exist; the nearest is {near}")
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(script.stem, module)  # where dataclasses look up the types of their fields
    spec.loader.exec_module(module)
    return module


def check_flags(script: Path, words: Sequence[str], where: str) -> None:
    """Raises ValueError, beginning with `where`, for a flag among the words that the algorithm's file does not have."""
    known = []
    for field in dataclasses.fields(load_algorithm(script).Args):
        known += [flag(field.name), flag(f"no_{field.name}")] if isinstance(field.default, bool) else [flag(field.name)]
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in known:
            near = nearest(name, known)
            raise ValueError(f"{where}: {script.parent.name}/{script.name} has no flag {name}; the nearest is {near}")
