"""Every metric's name, unit and definition, and the log that writes them: JSONL, TensorBoard, Weights & Biases."""

import json
import math
import os
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import Any

# One value per log interval; where several fall into it, their mean.
METRICS: dict[str, tuple[str, str]] = {
    "charts/episodic_return": ("return", "mean raw return of the training episodes that ended in the interval"),
    "charts/episodic_length": ("steps", "mean length of those episodes"),
    "charts/episodes": ("episodes", "number of training episodes that ended in the interval"),
    "charts/SPS": ("steps/s", "environment steps per second of wall-clock since this process's first iteration"),
    "charts/learning_rate": ("1", "learning rate of the interval's updates"),
    "charts/epsilon": ("share", "ε, chance of a random action, at the interval's updates"),
    "losses/policy_loss": (
        "1",
        "policy loss with its penalty, mean over all gradient steps; TRPO's: the surrogate after its step, no penalty",
    ),
    "losses/value_loss": (
        "return²",
        "½ mean squared error of the value, clipped where the file clips it, in the unit of the returns that are "
        "learned from: of scaled rewards where the file scales them, whitened ones in REINFORCE",
    ),
    "losses/entropy": (
        "nats",
        "entropy of the policy, mean over what was learned from; of samples where it has no formula",
    ),
    "losses/approx_kl": ("nats", "mean k3 estimate of KL(old‖new) over the minibatches of the last executed epoch"),
    "losses/kl": ("nats", "exact KL(old‖new) of the policies, mean over the whole batch after the update"),
    "losses/kl_coef": ("1", "weight of the KL penalty during the update"),
    "losses/clipfrac": ("share", "ratios outside [1 − clip_low, 1 + clip_high], mean over all minibatches"),
    "losses/clipfrac_low": ("share", "ratios below 1 − clip_low"),
    "losses/clipfrac_high": ("share", "ratios above 1 + clip_high"),
    "losses/explained_variance": ("1", "1 − Var(returns − values) / Var(returns), values before the update"),
    "losses/grad_norm": (
        "1",
        "Euclidean norm of the whole gradient before any clipping; of critics and policy together, without α's",
    ),
    "losses/improvement": ("1", "rise of the surrogate by the trust-region step that was taken, 0 where refused"),
    "losses/expected_improvement": ("1", "the same by the linear model: gradient · step"),
    "losses/step_fraction": ("1", "share of the full trust-region step that the line search took, 0 where refused"),
    "losses/step_accepted": ("share", "trust-region steps that passed the line search"),
    "losses/qf_loss": (
        "return²",
        "½ mean squared error of the action values, or the Huber loss and weights asked for; two critics' are added up",
    ),
    "losses/qf_values": ("return", "mean of the action values that the loss compared with their targets"),
    "losses/td_error": ("return", "mean |target − value| of the updates of tables, before each"),
    "losses/value_error": (
        "return",
        "root of the mean squared error over the states against the exact values, mean over the runs",
    ),
    "losses/qf_real": ("return", "mean action value of the update's transitions from the environment"),
    "losses/qf_model": ("return", "mean action value of the update's transitions from the model"),
    "charts/model_share": ("share", "transitions of an update that the model imagined"),
    "charts/rollout_length": ("steps", "k, longest imagined rollout after a fit of the model"),
    "charts/rollout_survival": ("share", "imagined rollouts that the model did not end by their last step"),
    "charts/model_epochs": ("epochs", "passes over the bootstrap samples that a fit of the model took"),
    "losses/model_nll": ("nats", "negative log-likelihood per column of the last epoch of a fit, mean over members"),
    "losses/model_error": ("target²", "mean squared error of the elites' means on the (scaled) targets of the holdout"),
    "losses/alpha": ("return/nat", "temperature: weight of the entropy against the reward"),
    "losses/epochs": ("epochs", "passes over the batch that were executed before target_kl stopped them"),
    "charts/action_std": ("action", "standard deviation of the Gaussian policy, mean over the action's dimensions"),
    "eval/episodic_return": ("return", "mean raw return of the deterministic policy's evaluation episodes"),
    "eval/teacher_kl": (
        "nats",
        "mean per token of the exact KL(student‖teacher) on the student's held-out completions",
    ),
    "eval/episodic_length": ("steps", "mean length of those episodes"),
    "charts/reward_mean": ("reward", "mean total reward of all completions that were sampled, dropped ones too"),
    "charts/reward_std": ("reward", "standard deviation of those rewards"),
    "charts/success": ("share", "mean of the task's first reward: the one that verifies the answer"),
    "charts/advantage_mean": ("reward", "mean advantage over the tokens that are learned from"),
    "charts/advantage_std": ("reward", "standard deviation of those advantages"),
    "charts/completion_length": ("tokens", "mean length of the sampled completions"),
    "charts/completion_length_max": ("tokens", "longest of them"),
    "charts/length_right": ("tokens", "mean length of completions whose first reward is at its highest"),
    "charts/length_wrong": ("tokens", "mean length of the others"),
    "charts/temperature": ("1", "of the iteration's samples, where it moves"),
    "charts/truncated_frac": ("share", "completions cut by --max-length"),
    "charts/zero_std_groups": (
        "share",
        "groups of equal rewards: a comparison within them has nothing to learn from",
    ),
    "charts/groups_all_right": ("share", "groups in which every completion has the highest reward"),
    "charts/groups_all_wrong": ("share", "groups in which every completion has the lowest reward"),
    "charts/dropped_groups": ("share", "groups that dynamic sampling replaced by others"),
    "charts/unscorable": ("completions", "sampled completions that the reward could not score"),
    "losses/loss": ("1", "the whole loss, of which the gradient is taken"),
    "losses/ent_coef": ("return/nat", "weight of the entropy bonus, before it moves"),
    "losses/clamped_entropy": ("nats", "mean entropy of the likeliest tokens alone, of which the bonus is"),
    "losses/ref_kl": ("nats", "mean per token of the k3 estimate of KL(policy‖reference)"),
    "losses/sequence_kl": ("nats", "mean over completions of the summed log(policy/reference), before the update"),
    "losses/sampler_kl": ("nats", "mean per token of the k3 estimate of KL(sampler‖trainer), before the first update"),
    "losses/teacher_kl": (
        "nats",
        "mean per token of KL(student‖teacher) on the student's samples: exact in the full form, k3 in the sampled one",
    ),
    "losses/forward_kl": ("nats", "mean per token of the k3 estimate of KL(teacher‖student) on the teacher's samples"),
    "rewards/accuracy": ("share", "pairs whose chosen completion has the higher score or implied reward, ties a half"),
    "rewards/margin": ("1", "mean score or implied reward of the chosen completions less that of the rejected"),
    "rewards/chosen": ("1", "mean score or implied reward of the chosen completions"),
    "rewards/rejected": ("1", "mean score or implied reward of the rejected completions"),
    "rewards/chosen_logprob": ("nats", "mean log-prob of the chosen completions, summed over their tokens"),
    "rewards/rejected_logprob": ("nats", "mean log-prob of the rejected completions, summed over their tokens"),
    "rewards/chosen_length": ("tokens", "mean length of the chosen completions"),
    "rewards/rejected_length": ("tokens", "mean length of the rejected completions"),
    "rewards/kto_baseline": (
        "nats",
        "z0 of KTO: mean log-ratio to the reference of mismatched completions, at least 0",
    ),
    "losses/ratio_min": ("1", "smallest ratio π/π_old of a token; 0.5 to 2 is healthy"),
    "losses/ratio_max": ("1", "largest ratio π/π_old of a token"),
    "charts/planned_return": ("return", "imagined return over the horizon of the plans that the last search kept"),
    "charts/planned_std": ("action", "standard deviation of those plans, mean over their actions"),
    "time/plan": ("s", "wall-clock seconds that the interval spent on planning"),
    "time/collect": ("s", "wall-clock seconds that the interval spent stepping environments"),
    "time/update": ("s", "wall-clock seconds spent updating"),
    "time/model": ("s", "wall-clock seconds spent fitting the model and on what it imagines"),
    "time/eval": ("s", "wall-clock seconds spent evaluating"),
}

# One tag per component of a task's reward: `rewards/<name>`, its mean over the sampled completions.
REWARDS = "rewards/"
# One tag per member of a model: `model/error_<i>`, its mean squared error on the holdout after a fit.
MODEL = "model/"

# These differ between two equal runs and stand outside every comparison.
WALL_CLOCK_TAGS = ("charts/SPS", "time/")


class MetricLog:
    """Writes rows to `metrics.jsonl` and, from the same rows, to TensorBoard (and Weights & Biases when asked).

    TensorBoard's files are derived from the JSONL: a resumed run cuts the JSONL at its checkpoint's byte offset and
    writes TensorBoard's anew, so that no tool ever shows the steps after the boundary twice. They also hold the flags
    of the folder's `run.json`, for the tab HPARAMS: which columns that tab has, flags and metrics, TensorBoard collects
    from all runs that it is shown, since different algorithms have different ones.
    """

    def __init__(self, run_dir: Path, offset: int = 0, wandb_run: Any = None) -> None:
        """Opens the log of `run_dir` and cuts it to its first `offset` bytes.

        Raises:
            ValueError: when the file is not what was written up to there; it is then left as it is.
        """
        # Imported here: half a second that a command line error or --help should not cost.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        path = run_dir / "metrics.jsonl"
        rows = _read_rows(path, offset)
        self._file = open(path, "ab")  # closed by close()
        self._file.truncate(offset)
        self._file.seek(offset)
        shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        self._tensorboard = EventFileWriter(str(run_dir / "tensorboard"))
        self._wandb = wandb_run
        self._run_dir, self._has_flags = run_dir, False
        self._start_session()
        for row in rows:
            self._to_tensorboard(row)

    def write(self, global_step: int, values: dict[str, float]) -> None:
        """Writes one row.

        Raises:
            KeyError: for a tag that `METRICS` does not define.
        """
        for tag in values:
            if tag not in METRICS and not tag.startswith((REWARDS, MODEL)):
                raise KeyError(f"metric {tag!r} is not defined in run/metrics.py")
        row = {"global_step": global_step, **{tag: value for tag, value in values.items() if not math.isnan(value)}}
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        self._to_tensorboard(row)
        if self._wandb is not None:
            self._wandb.log(row, step=global_step)

    def _to_tensorboard(self, row: dict[str, float]) -> None:
        entries = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in row.items() if tag != "global_step"
        ]
        event = self._event(wall_time=time.time(), step=row["global_step"], summary=self._summary(value=entries))
        self._tensorboard.add_event(event)

    def _start_session(self) -> None:
        """Tells TensorBoard the run's flags and when it began; nothing where there is no run.json."""
        try:
            run = json.loads((self._run_dir / "run.json").read_text())
        except (OSError, ValueError):
            return
        flags = {"algorithm": run.get("algorithm"), **run.get("args", {})}
        flags = {name: value for name, value in flags.items() if value is not None}
        started = run.get("provenance", {}).get("started")
        seconds = datetime.fromisoformat(started).timestamp() if started else time.time()
        self._has_flags = bool(flags)
        if flags:
            self._to_hparams("session_start_info", flags, start_time_secs=seconds)

    def _to_hparams(self, what: str, hparams: dict[str, Any] | None = None, **fields: float) -> None:
        """Writes a message of TensorBoard's plugin `hparams`: the session's start with its flags, or its end."""
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        content = plugin_data_pb2.HParamsPluginData(**{what: fields})
        for name, value in (hparams or {}).items():
            entry = content.session_start_info.hparams[name]
            if isinstance(value, bool):
                entry.bool_value = value
            elif isinstance(value, int | float):
                entry.number_value = value
            else:
                entry.string_value = str(value)
        summary = metadata.create_summary_metadata(content)
        value = self._summary.Value(tag=f"_hparams_/{what}", metadata=summary, tensor=metadata.NULL_TENSOR)
        self._tensorboard.add_event(self._event(wall_time=time.time(), summary=self._summary(value=[value])))

    def flush(self) -> int:
        """Puts the JSONL on the disk and gives its length in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Flushes and closes everything."""
        self._file.close()
        if self._has_flags and (self._run_dir / "summary.json").exists():  # finished; otherwise it may be resumed
            from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS

            self._to_hparams("session_end_info", status=STATUS_SUCCESS, end_time_secs=time.time())
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _read_rows(path: Path, offset: int) -> list[dict[str, float]]:
    """The rows in the first `offset` bytes; ValueError (one line) when they do not end there."""
    try:
        head = path.read_bytes()[:offset] if offset else b""
        if len(head) == offset and head.endswith(b"\n" if offset else b""):
            return [json.loads(line) for line in head.splitlines()]
    except (OSError, ValueError):
        pass
    raise ValueError(f"{path} was removed, cut or edited: the checkpoint was written at its byte {offset}")
