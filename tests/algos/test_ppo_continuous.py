"""PPO for continuous actions: from the command line, through kills, on probes, against its own recorded numbers."""

import fcntl
import functools
import importlib.machinery
import json
import shutil
import signal
import subprocess
import sys
import time
import types
from types import SimpleNamespace

import algo_helpers
import numpy as np
import pytest
import torch
from algo_helpers import ROOT, assert_as_recorded, assert_same_run, command, environment, load_algorithm

from cleanrl_zoo import core
from cleanrl_zoo.envs import make_vec
from cleanrl_zoo.run import compile_function, parse_args
from cleanrl_zoo.run.checkpoint import load_checkpoint

ppo = load_algorithm("ppo_continuous")
DEBUG = ("--preset", "debug")


args_for, start, train = (
    functools.partial(f, ppo) for f in (algo_helpers.args_for, algo_helpers.start, algo_helpers.train)
)


# The command line


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--env", "Hoper-v4"], ["Hoper-v4", "Hopper-v4"]),
        (["--env", "CartPole-v1"], ["CartPole-v1", "Discrete(2)", "algos/ppo.py"]),
        (["--num-envs", "-1"], ["--num-envs -1", "at least 1"]),
        (["--num-steps", "0"], ["--num-steps 0", "at least 1"]),
        (["--num-minibatches", "7"], ["--num-minibatches 7", "must divide the batch of 256"]),
        (["--clip-coef", "0"], ["--clip-coef", "above 0"]),
        (["--learning-rate", "inf"], ["--learning-rate inf", "above 0"]),
        (["--env", "FrozenLake-v1"], ["FrozenLake-v1", "flat vectors"]),
        (["--hidden", "0"], ["--hidden", "at least 1"]),
        (["--target-kl", "-1"], ["--target-kl", "above 0"]),
        (["--run-dir", "/proc/nowhere"], ["--run-dir /proc/nowhere", "cannot be written"]),
        (["--run-dir", "x" * 300], ["--run-dir", "cannot be written"]),
        (["--run-dir", "/dev/null"], ["--run-dir /dev/null", "is a file"]),
        (["--hidden"], ["--hidden"]),
        (["--device", "cudafoo"], ["--device cudafoo", "cuda:K"]),
        (["--device", "cuda:7"], ["--device cuda:7", "CUDA devices"]),
        (["--env", "no_such_module:Thing-v0"], ["no_such_module"]),
        (["--env", "a:b:c"], ["a:b:c"]),
        (["--vec", "mujoco", "--env", "Pendulum-v1"], ["Pendulum-v1", "mujoco"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(in_tmp, monkeypatch, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        ppo.main(parse_args(ppo.Args, ppo.PRESETS, [*DEBUG, *flags]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "Traceback" not in err
    assert all(word in err for word in words), err


def test_missing_extra_is_one_line(in_tmp, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as stop:
        ppo.main(parse_args(ppo.Args, ppo.PRESETS, [*DEBUG, "--track"]))
    assert stop.value.code == 2 and "pip install -c constraints.txt -e '.[track]'" in capsys.readouterr().err


def test_tracked_runs_never_share_an_identity(in_tmp, monkeypatch):
    """Folders of one name in two places are two runs; a resumed run is the same one."""
    wandb = types.ModuleType("wandb")
    wandb.__spec__, begun = importlib.machinery.ModuleSpec("wandb", None), []
    wandb.init = lambda **kwargs: (
        begun.append(kwargs) or SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for folder in ("a/seed_1", "b/seed_1"):
        monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", "--run-dir", folder])
        ppo.main(args_for(run_dir=folder, track=True))
    (in_tmp / "a/seed_1/summary.json").unlink()
    ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", "a/seed_1"]))
    one, other, again = (kwargs["id"] for kwargs in begun)
    assert one == again != other and begun[0]["name"] == f"ppo_continuous {args_for().env} seed_1"


def test_the_log_keeps_whole_numbers_and_decimals(in_tmp):
    """16,777,217 and 3e-4 have no float32 of their own."""
    args = args_for(run_dir="a")
    with ppo.Run(args, ppo.make_vec(args.env, 1, 1), None) as run:
        run.resume_or(lambda: start(args)[1])
        run.metrics({"losses/grad_norm": 16_777_217, "losses/entropy": 3e-4})
        run._write_row()
    row = json.loads((in_tmp / "a/metrics.jsonl").read_text())
    assert row["losses/grad_norm"] == 16_777_217 and row["losses/entropy"] == 3e-4


def test_a_second_run_never_overwrites_the_first(in_tmp, capsys):
    ppo.main(args_for(run_dir="a"))
    before = (in_tmp / "a/metrics.jsonl").read_bytes()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        ppo.main(args_for(run_dir="a", seed=2))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "not empty" in err and "--resume" not in err  # a finished run has no more to do
    assert (in_tmp / "a/metrics.jsonl").read_bytes() == before


# Resume


def test_interrupt_says_how_to_go_on(in_tmp):
    flags = (*DEBUG, "--total-timesteps", "100000000", "--run-dir", "a run")
    process = subprocess.Popen(
        command("ppo_continuous", *flags), cwd=in_tmp, env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        while not list((in_tmp / "a run/checkpoints").glob("step_*")):
            time.sleep(0.02)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err
    assert "--resume 'a run'" in err and "last checkpoint" in err


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_a_damaged_checkpoint_offers_the_one_before(in_tmp, capsys, name):
    ppo.main(args_for(run_dir="a", total_timesteps=2048))
    (in_tmp / "a/summary.json").unlink()
    newest = sorted((in_tmp / "a/checkpoints").iterdir())[-1]
    content = (newest / name).read_bytes()
    (newest / name).write_bytes(content[: len(content) // 2])
    before = {p: p.read_bytes() for p in (in_tmp / "a").rglob("*") if p.is_file()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", "a"]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and name in err
    assert {p: p.read_bytes() for p in (in_tmp / "a").rglob("*") if p.is_file()} == before
    earlier = err.split("--resume ")[1].strip()
    ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", earlier]))
    ppo.main(args_for(run_dir="b", total_timesteps=2048))
    assert_same_run(in_tmp / "a", in_tmp / "b")


def test_a_finished_run_is_not_run_again(in_tmp, capsys):
    ppo.main(args_for(run_dir="a"))
    with pytest.raises(SystemExit) as stop:
        ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", "a"]))
    assert stop.value.code == 0 and "finished" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(in_tmp, capsys):
    ppo.main(args_for(run_dir="a"))
    (in_tmp / "a/summary.json").unlink()
    with open(in_tmp / "a/.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as stop:
            ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", "a"]))
    assert stop.value.code == 2 and "in use by another process" in capsys.readouterr().err


def cut_short(folder):
    """`folder` as if killed before its last checkpoint: earlier ones stay, as many as were kept."""
    (folder / "summary.json").unlink()
    shutil.rmtree(sorted((folder / "checkpoints").iterdir())[-1])


@pytest.mark.parametrize("damage", ["remove", "cut", "edit"])
def test_a_damaged_log_is_refused_and_left_alone(in_tmp, capsys, damage):
    ppo.main(args_for(run_dir="a", total_timesteps=2048))
    cut_short(in_tmp / "a")
    log = in_tmp / "a/metrics.jsonl"
    content = log.read_bytes()
    if damage == "remove":
        log.unlink()
    else:
        log.write_bytes(content[:300] if damage == "cut" else content.replace(b'":', b'";', 1))
    before = log.read_bytes() if log.exists() else None
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", "a"]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "metrics.jsonl" in err
    assert (log.read_bytes() if log.exists() else None) == before


@pytest.mark.parametrize("change", [{"num_envs": 4}, {"learning_rate": 0.1}, {"num_envs": "2"}, {"hidden": "ab"}, None])
def test_edited_flags_are_refused_before_anything_is_cut(in_tmp, capsys, change):
    ppo.main(args_for(run_dir="a", total_timesteps=2048))
    cut_short(in_tmp / "a")
    run = json.loads((in_tmp / "a/run.json").read_text())
    run["args"] = None if change is None else {**run["args"], **change}
    (in_tmp / "a/run.json").write_text(json.dumps(run))
    before = {p: p.read_bytes() for p in (in_tmp / "a").rglob("*") if p.is_file()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", "a"]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "run.json" in err
    assert {p: p.read_bytes() for p in (in_tmp / "a").rglob("*") if p.is_file()} == before


def test_killed_after_resuming_from_an_earlier_checkpoint(in_tmp):
    """The checkpoints of the future that is run anew must not be taken up again: the log no longer leads to them."""
    ppo.main(args_for(run_dir="a", total_timesteps=2048))
    (in_tmp / "a/summary.json").unlink()
    earlier = sorted((in_tmp / "a/checkpoints").iterdir())[0]
    args = parse_args(ppo.Args, ppo.PRESETS, ["--resume", str(earlier)])
    envs, state, _ = start(args)
    run = ppo.Run(args, envs, None)
    run.resume_or(lambda: state)  # and dies here
    run.log.close()
    run._lock.close()
    assert list((in_tmp / "a/checkpoints").iterdir()) == [earlier]
    ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", "a"]))
    ppo.main(args_for(run_dir="b", total_timesteps=2048))
    assert_same_run(in_tmp / "a", in_tmp / "b")


def test_killed_before_the_first_file_was_written(in_tmp):
    (in_tmp / "a").mkdir()
    for name in (".lock", ".writing-run.json"):
        (in_tmp / "a" / name).touch()
    ppo.main(args_for(run_dir="a"))
    assert (in_tmp / "a/summary.json").exists()


def test_an_engine_without_exact_state_resumes_bit_equal_too(in_tmp, capsys):
    """Gymnasium's own MuJoCo cannot be saved here: its episodes are cut at every checkpoint, in every run."""
    flags = {"env": "Reacher-v4", "vec": "gymnasium", "checkpoint_every": 1024, "total_timesteps": 4096}
    ppo.main(args_for(run_dir="a", **flags))
    ppo.main(args_for(run_dir="b", **flags))
    assert json.loads((in_tmp / "a/summary.json").read_text())["cut_episodes"] > 0
    cut_short(in_tmp / "b")
    saved = load_checkpoint(sorted((in_tmp / "b/checkpoints").iterdir())[-1])
    assert saved["state"]["reward_scaler"]["running_return"].eq(0).all()  # it belongs to episodes that were dropped
    ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", "b"]))
    assert_same_run(in_tmp / "a", in_tmp / "b")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        ppo.main(args_for(run_dir="c", **{**flags, "checkpoint_every": 999}))
    assert stop.value.code == 2 and "--checkpoint-every 999" in capsys.readouterr().err  # 10 limits of 50 × 2 are 1000


def test_the_card_tells_how_the_run_began(in_tmp):
    ppo.main(args_for(run_dir="a", total_timesteps=2048))
    cut_short(in_tmp / "a")
    ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", "a"]))
    run, card = (json.loads((in_tmp / "a" / name).read_text()) for name in ("run.json", "policy/card.json"))
    assert card["provenance"] == run["provenance"] and card["command"] == run["command"]


# The algorithm


def test_one_step_equals_the_textbook_loss_with_torchs_own_optimizer():
    """Equation 9 written out with torch's distributions, Adam and norm clip, in float64, after a first update."""
    args = args_for()
    envs, state, rollout = start(args)
    ppo.collect(state, envs, rollout, args)
    batches = []

    def noted(agent, optimizer, batch, *rest):
        batches.append(batch)
        return ppo.minibatch_step(agent, optimizer, batch, *rest)

    ppo.update(state, rollout, noted, args)  # so that ratios have moved from 1
    agent, batch = state.agent.double(), [x.double() for x in batches[0]]
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    index, optimizer = torch.arange(0, 256, 2), ppo.Adam(agent.parameters(), eps=1e-5)
    stats = ppo.minibatch_step(agent, optimizer, batch, index, torch.tensor(0.01), 0.02, 0.5, 0.1, 0.3)
    after = {name: value.clone() for name, value in agent.state_dict().items()}
    agent.load_state_dict(before)

    obs, actions, old_logprob, advantage, returns = (x[index] for x in batch)
    mean, value = agent.actor(obs), agent.critic(obs)[:, 0]
    normal = torch.distributions.Normal(mean, agent.log_std.exp().expand_as(mean))
    policy = torch.distributions.Independent(normal, 1)
    ratio = torch.exp(policy.log_prob(actions) - old_logprob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.98, 1.02) * advantage).mean()
    error = ((value - returns) ** 2).mean()
    entropy = policy.entropy().mean()
    torch_adam = torch.optim.Adam(agent.parameters(), lr=0.01, eps=1e-5)
    (-surrogate + 0.5 * 0.5 * error - 0.1 * entropy).backward()
    norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.3)
    torch_adam.step()

    low, high = (share.double().mean().item() for share in (ratio < 0.98, ratio > 1.02))
    assert low > 0.05 and high > 0.05 and low + high < 0.95 and norm > 0.3  # both clips are at work
    reported = dict(zip(ppo.STATS, stats.tolist(), strict=True))
    assert reported["losses/policy_loss"] == pytest.approx(-surrogate.item(), abs=1e-9)
    assert reported["losses/value_loss"] == pytest.approx(0.5 * error.item(), rel=1e-9)
    assert reported["losses/entropy"] == pytest.approx(entropy.item(), rel=1e-9)
    assert reported["losses/approx_kl"] == pytest.approx((ratio - 1 - ratio.log()).mean().item(), rel=1e-9)
    assert reported["losses/grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
    assert reported["losses/clipfrac_low"] == pytest.approx(low)
    assert reported["losses/clipfrac_high"] == pytest.approx(high)
    assert reported["losses/clipfrac"] == pytest.approx(low + high)
    for name, expected in agent.state_dict().items():
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-8)
        assert name.startswith(("obs_norm", "low", "high")) or not torch.equal(after[name], before[name]), name


def test_unchanged_policy_has_ratio_one_for_out_of_bounds_actions_too():
    """Actions are stored as sampled: in the first minibatch of the first epoch every ratio is 1 and approx_kl 0.

    Reported is the approx_kl of the last executed epoch, the second one of four minibatches.
    """
    args = args_for()
    envs, state, rollout = start(args)
    ppo.collect(state, envs, rollout, args)
    assert (rollout.actions.abs() > 1).float().mean() > 0.2  # N(0, 1) leaves [−1, 1] for 32 % of its mass
    seen, divergences = [], []

    def noted(agent, optimizer, batch, index, *rest):
        obs, actions, old_logprob = (x[index] for x in batch[:3])
        seen.append((agent.policy(obs).log_prob(actions) - old_logprob).exp())
        stats = ppo.minibatch_step(agent, optimizer, batch, index, *rest)
        divergences.append(stats[ppo.STATS.index("losses/approx_kl")].item())
        return stats

    metrics = ppo.update(state, rollout, noted, args)
    torch.testing.assert_close(seen[0], torch.ones_like(seen[0]), atol=1e-5, rtol=0)
    assert abs(divergences[0]) < 1e-9  # k3 of ratios within 1e-5 of 1 is below (1e-5)²
    assert (seen[1] - 1).abs().max() > 1e-4  # and the second one has moved
    assert len(divergences) == 8 and metrics["losses/approx_kl"] > 0
    assert metrics["losses/approx_kl"].item() == pytest.approx(np.mean(divergences[4:]), rel=1e-5)
    assert np.mean(divergences[4:]) > 1.1 * np.mean(divergences)  # so that the first epoch does not enter unseen


def test_first_learning_rate_is_the_given_one_and_the_last_is_above_zero():
    args = args_for(total_timesteps=1024)
    _, metrics = train(args)
    rates = [m["charts/learning_rate"] for m in metrics]
    np.testing.assert_allclose(rates, 3e-4 * np.array([1.0, 0.75, 0.5, 0.25]), rtol=1e-6)


def test_target_kl_stops_after_the_epoch():
    _, metrics = train(args_for(target_kl=1e-9, total_timesteps=256))
    assert metrics[0]["losses/epochs"] == 1
    _, metrics = train(args_for(target_kl=1e9, total_timesteps=256))
    assert metrics[0]["losses/epochs"] == 2


def test_minibatches_of_one_stay_finite():
    """A single advantage whitens to 0, not to NaN."""
    state, metrics = train(args_for(num_envs=1, num_steps=8, num_minibatches=8, total_timesteps=32))
    assert len(metrics) == 4 and all(m["losses/policy_loss"] == 0 for m in metrics)
    assert all(value.isfinite().all() for value in state.agent.state_dict().values())


def test_the_core_functions_are_the_ones_that_run(monkeypatch):
    """One core: the surrogate and the advantage of this file are core's own objects."""
    assert ppo.clipped_surrogate is core.clipped_surrogate and ppo.gae is core.gae

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(core, "clipped_surrogate", broken)
    with pytest.raises(ZeroDivisionError):
        module = load_algorithm("ppo_continuous")
        algo_helpers.train(module, algo_helpers.args_for(module))
    monkeypatch.undo()
    load_algorithm("ppo_continuous")


def test_nan_stops_the_run_with_step_tensor_and_checkpoint(in_tmp, monkeypatch, capsys):
    real, calls = ppo.minibatch_step, []

    def poisoned(agent, *rest):
        calls.append(1)
        if len(calls) == 20:  # in the third iteration of eight minibatches
            agent.actor[0].weight.data[0, 0] = float("nan")
        return real(agent, *rest)

    monkeypatch.setattr(ppo, "minibatch_step", poisoned)
    with pytest.raises(SystemExit) as stop:
        ppo.main(args_for(run_dir="a"))
    err = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1
    assert "losses/" in err and "step_000000000512" in err and "step 768" in err and "--learning-rate" in err


def test_nan_from_the_environment_is_told_apart(in_tmp, monkeypatch, capsys):
    real = ppo.collect

    def poisoned(state, envs, rollout, *rest):
        real(state, envs, rollout, *rest)
        rollout.rewards[3, 1] = float("nan")

    monkeypatch.setattr(ppo, "collect", poisoned)
    with pytest.raises(SystemExit) as stop:
        ppo.main(args_for(run_dir="a"))
    err = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and "rewards holds NaN" in err and "--learning-rate" not in err


@pytest.mark.slow
def test_compiled_equals_eager_over_200_calls():
    """All parameters and all buffers, after 25 iterations of 8 minibatches."""
    args = args_for(total_timesteps=6400)
    eager, eager_metrics = train(args)
    compiled, metrics = train(args, compile_function(ppo.minibatch_step, True))
    assert len(metrics) == 25
    initial = ppo.TrainState.create(args, make_vec(args.env, 2, 1, threads=1)).agent.state_dict()
    for name, value in eager.agent.state_dict().items():
        other = compiled.agent.state_dict()[name]
        torch.testing.assert_close(other, value, rtol=2e-3, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")
        assert name in ("low", "high") or not torch.equal(value, initial[name]), f"{name} never moved"
    assert compiled.optimizer.steps.item() == eager.optimizer.steps.item() == 200
    first, second = eager_metrics[0], metrics[0]
    assert first.keys() == second.keys()
    for tag in first:
        assert second[tag] == pytest.approx(first[tag], rel=1e-3, abs=1e-5), tag


# Probes: the right values are known in closed form (cleanrl_zoo/envs/probes.py)


def trained_on_probe(name, **changes):
    settings = {"num_envs": 4, "num_steps": 64, "update_epochs": 10, "learning_rate": 3e-3, "total_timesteps": 10_000}
    args = args_for(env=f"probe/{name}Continuous-v0", **{**settings, **changes})
    args.scale_rewards = False  # values in the reward's own unit
    state, _ = train(args)
    return state.agent


def value(agent, obs):
    return agent.value(agent.obs_norm(torch.tensor([[obs]]))).item()


def mean_action(agent, obs):
    return agent.actor(agent.obs_norm(torch.tensor([[obs]]))).item()


def test_probe_truncation_is_no_termination():
    """Reward 1 for ever, cut after 10 steps: 1/(1 − 0.9) = 10. Taken for termination, at most 6.5."""
    assert value(trained_on_probe("Loop", gamma=0.9, total_timesteps=20_000), 0.0) == pytest.approx(10.0, abs=0.5)


def test_probe_delayed_reward():
    agent = trained_on_probe("Delay", gamma=0.5)
    assert value(agent, 0.0) == pytest.approx(0.5, abs=0.05) and value(agent, 1.0) == pytest.approx(1.0, abs=0.05)


def test_probe_reward_depends_on_the_observation():
    agent = trained_on_probe("Cue")
    assert value(agent, 1.0) == pytest.approx(1.0, abs=0.05) and value(agent, -1.0) == pytest.approx(-1.0, abs=0.05)


def test_probe_reward_depends_on_the_action():
    assert mean_action(trained_on_probe("Choice", total_timesteps=15_000), 0.0) == pytest.approx(0.5, abs=0.1)


def test_probe_reward_depends_on_both():
    agent = trained_on_probe("Match", total_timesteps=15_000)
    assert mean_action(agent, 1.0) == pytest.approx(0.5, abs=0.15)
    assert mean_action(agent, -1.0) == pytest.approx(-0.5, abs=0.15)


# Fingerprint and learning


def test_fingerprint_of_twenty_updates():
    """Losses and gradient norms of 20 minibatches. A change needs a reason; this writes the file anew:

    python -c "import sys; sys.path[:0] = ['.', 'tests/algos']; import test_ppo_continuous as t; t.write_fingerprint()"
    """
    assert_as_recorded(FINGERPRINT, fingerprint(), rtol=2e-3, atol=2e-5)


FINGERPRINT = ROOT / "tests/algos/fingerprints/ppo_continuous.json"


def fingerprint() -> dict[str, list[float]]:
    rows = []

    def noted(*arguments):
        rows.append(ppo.minibatch_step(*arguments))
        return rows[-1]

    train(args_for(total_timesteps=768, num_minibatches=4), minibatch_step=noted)
    table = torch.stack(rows[:20])  # three iterations of 2 epochs × 4 minibatches are 24
    return {tag: [round(v, 7) for v in table[:, i].tolist()] for i, tag in enumerate(ppo.STATS)}


def write_fingerprint() -> None:
    FINGERPRINT.write_text(json.dumps(fingerprint(), indent=1) + "\n")


LEARN = ("--no-compile", "--env-threads", "1")
RECORDED = [204.25, 224.55, 124.5, 195.0, 224.65, 180.3, 148.5, 231.3, 164.25, 241.7]
RANDOM = 7.0


@pytest.mark.learn
def test_learns_to_balance_the_pendulum():
    """InvertedPendulum-v4, 20,480 steps: mean length of the last 20 training episodes.

    Seeds 101–110 gave RECORDED; the bound is their mean minus two standard deviations. A random policy lasts 7 steps.
    """
    args = parse_args(ppo.Args, ppo.PRESETS, ["--env", "InvertedPendulum-v4", "--total-timesteps", "20480", *LEARN])
    envs, state, rollout = start(args)
    while state.global_step < args.total_timesteps:
        ppo.collect(state, envs, rollout, args)
        ppo.update(state, rollout, ppo.minibatch_step, args)
    lengths = [episode[1] for episode in envs.pop_episodes()][-20:]
    assert np.mean(lengths) > np.mean(RECORDED) - 2 * np.std(RECORDED) > 10 * RANDOM
