"""PPO from frames: its loss against a second way to compute it, probes of frames, rewards and lives, numbers."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
import torch
from algo_helpers import (
    ROOT,
    args_for,
    assert_as_recorded,
    assert_same_run,
    load_algorithm,
    start,
    train,
    training_episodes,
)

from cleanrl_zoo import core, zoo
from cleanrl_zoo.envs import make_vec
from cleanrl_zoo.run import compile_function, parse_args
from cleanrl_zoo.run.checkpoint import load_checkpoint

ppo = load_algorithm("ppo_atari")
needs_atari = pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="ale-py is not installed")


def collected(**changes):
    """State and rollout [T, N] of the untrained policy."""
    args = args_for(ppo, **changes)
    envs, state, rollout = start(ppo, args)
    ppo.collect(state, envs, rollout, ppo.act, args)
    return args, state, rollout


# The command line


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--env", "CartPole-v1"], ["CartPole-v1", "frames of bytes", "algos/ppo.py"]),
        (["--vec", "atari"], ["vec is atari", "probe/MatchFrames-v0"]),
        (["--num-minibatches", "7"], ["--num-minibatches 7", "must divide the batch of 256"]),
        (["--channels", "4", "4", "0"], ["--channels 4 4 0", "at least 1"]),
        (["--channels", "4", "4"], ["--channels"]),
        (["--hidden", "0"], ["--hidden 0", "at least 1"]),
        (["--repeat-action-probability", "1.5"], ["--repeat-action-probability 1.5", "at most 1"]),
        (["--repeat-action-probability", "0.25"], ["--repeat-action-probability 0.25", "probe/MatchFrames-v0"]),
        (["--no-episodic-life"], ["--no-episodic-life", "probe/MatchFrames-v0"]),
        (["--clip-coef", "0"], ["--clip-coef 0", "above 0"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(in_tmp, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--preset", "debug", *flags]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert all(word in err for word in words), err


@needs_atari
def test_checkpoints_that_cut_too_many_games_are_refused(in_tmp, capsys):
    with pytest.raises(SystemExit) as stop:
        ppo.main(args_for(ppo, env="ALE/Pong-v5", checkpoint_every=539_999))  # 10 limits of 27,000 × 2 are 540,000
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "at least 540000" in err
    args = ppo.Args()  # the defaults keep the rule
    assert args.checkpoint_every >= 10 * 27_000 * args.num_envs


# The algorithm


@pytest.mark.parametrize("clip_value_loss", [True, False])
def test_one_step_equals_the_textbook_loss_with_torchs_own_optimizer(clip_value_loss):
    """Equation 9 written out with torch's functions, its Adam and its norm clip, in float64, after a first update."""
    args, state, rollout = collected(clip_value_loss=clip_value_loss)
    batches = []

    def noted(agent, optimizer, batch, *rest):
        batches.append(batch)
        return ppo.minibatch_step(agent, optimizer, batch, *rest)

    args.learning_rate = 2.5e-3
    ppo.update(state, rollout, noted, args)  # so that ratios and values have moved from the old ones
    agent = state.agent.double()
    agent.features[0] = Bytes()
    batch = [x.double() if x.is_floating_point() else x for x in batches[0]]
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    index, optimizer = torch.arange(0, 256, 2), ppo.Adam(agent.parameters(), eps=1e-5)
    numbers = torch.tensor(0.01), 0.02, clip_value_loss, 0.5, 0.1, 0.3
    stats = ppo.minibatch_step(agent, optimizer, batch, index, *numbers)
    after = {name: value.clone() for name, value in agent.state_dict().items()}
    agent.load_state_dict(before)

    obs, actions, old_logprob, old_value, advantage, returns = (x[index] for x in batch)
    x = obs.double() / 255
    layers = [layer for layer in agent.features if hasattr(layer, "weight")]
    for layer, stride in zip(layers[:3], (4, 2, 1), strict=True):
        x = torch.relu(torch.nn.functional.conv2d(x, layer.weight, layer.bias, stride))
    features = torch.relu(x.flatten(1) @ layers[3].weight.T + layers[3].bias)
    logits, value = agent.actor(features), agent.critic(features)[:, 0]
    ratio = torch.exp(torch.log_softmax(logits, 1)[torch.arange(128), actions] - old_logprob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.98, 1.02) * advantage).mean()
    errors = (value - returns) ** 2
    if clip_value_loss:
        errors = torch.max(errors, (old_value + (value - old_value).clamp(-0.02, 0.02) - returns) ** 2)
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    torch_adam = torch.optim.Adam(agent.parameters(), lr=0.01, eps=1e-5)
    (-surrogate + 0.5 * 0.5 * errors.mean() - 0.1 * entropy).backward()
    norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.3)
    torch_adam.step()

    share = ((ratio - 1).abs() > 0.02).double().mean()
    assert 0.05 < share < 0.95 and norm > 0.3  # both clips are at work
    reported = dict(zip(ppo.STATS, stats.tolist(), strict=True))
    assert reported["losses/policy_loss"] == pytest.approx(-surrogate.item(), abs=1e-9)
    assert reported["losses/value_loss"] == pytest.approx(0.5 * errors.mean().item(), rel=1e-9)
    assert reported["losses/entropy"] == pytest.approx(entropy.item(), rel=1e-9)
    assert reported["losses/grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
    assert reported["losses/clipfrac"] == pytest.approx(share.item())
    for name, expected in agent.state_dict().items():
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-8)


class Bytes(torch.nn.Module):
    """The network's scaling in float64."""

    def forward(self, frames):
        return frames.double() / 255


def test_unchanged_policy_has_ratio_one():
    args, state, rollout = collected()
    seen = []

    def noted(agent, optimizer, batch, index, *rest):
        obs, actions, old_logprob = (x[index] for x in batch[:3])
        seen.append((agent(obs)[0].log_prob(actions) - old_logprob).exp().detach())
        return ppo.minibatch_step(agent, optimizer, batch, index, *rest)

    ppo.update(state, rollout, noted, args)
    torch.testing.assert_close(seen[0], torch.ones_like(seen[0]), atol=1e-5, rtol=0)
    assert (seen[1] - 1).abs().max() > 1e-5  # and the second one has moved


def test_rollout_keeps_bytes_and_both_observations_of_a_step():
    """58 MB for 8 × 128 steps of Atari: 2 · 4 · 84 · 84 bytes each."""
    _, state, rollout = collected(env="probe/CountFrames-v0", num_envs=1, num_steps=8, num_minibatches=1)
    assert rollout.obs.dtype == rollout.final_obs.dtype == torch.uint8
    place = [x[:, 0, 0, 15].float().argmax(-1) // 6 - 2 for x in (rollout.obs, rollout.final_obs)]
    assert place[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1] and torch.equal(place[1], place[0] + 1)
    assert rollout.truncated[:, 0].nonzero().flatten().tolist() == [2, 5] and not rollout.terminated.any()


def test_truncation_bootstraps_from_the_last_frames_and_not_from_the_reset(monkeypatch):
    """γ = 0.9, λ = 1, r = 1, V(3) = 10 and V(0) = V(1) = V(2) = 0: A_2 = 1 + 0.9 · 10 = 10 = A_1 = A_0. From the
    reset's frames, as from a termination, they would be 2.71, 1.9 and 1."""
    settings = {"num_envs": 1, "num_steps": 6, "num_minibatches": 1, "gamma": 0.9, "gae_lambda": 1.0}
    args, state, rollout = collected(env="probe/CountFrames-v0", **settings)
    policy = ppo.Categorical(torch.zeros(6, 2))
    state.agent.forward = lambda obs: (policy, torch.where(obs[:, 0, 15, 30] > 0, 10.0, 0.0))
    advantages = []

    def noted_gae(*arguments):
        advantages.append(core.gae(*arguments))
        return advantages[-1]

    monkeypatch.setattr(ppo, "gae", noted_gae)
    ppo.update(state, rollout, lambda *_: torch.zeros(len(ppo.STATS)), args)
    torch.testing.assert_close(advantages[0], torch.full((6, 1), 10.0))


@pytest.mark.parametrize("clip_rewards, expected", [(True, [1.0, -1.0, 0.0]), (False, [30.0, -7.0, 0.0])])
def test_learned_from_is_the_sign_of_the_reward(monkeypatch, clip_rewards, expected):
    args, state, rollout = collected(num_envs=1, num_steps=3, num_minibatches=1, clip_rewards=clip_rewards)
    rollout.rewards[:, 0] = torch.tensor([30.0, -7.0, 0.0])
    seen = []

    def noted_gae(rewards, *rest):
        seen.append(rewards[:, 0].tolist())
        return core.gae(rewards, *rest)

    monkeypatch.setattr(ppo, "gae", noted_gae)
    ppo.update(state, rollout, ppo.minibatch_step, args)
    assert seen == [expected] and rollout.rewards[0, 0] == 30.0


def test_first_learning_rate_is_the_given_one_and_the_last_is_above_zero():
    rates = [m["charts/learning_rate"] for m in train(ppo, args_for(ppo))[1]]
    np.testing.assert_allclose(rates, 2.5e-4 * np.array([1.0, 0.75, 0.5, 0.25]), rtol=1e-6)


def test_minibatches_of_one_stay_finite():
    """A single advantage whitens to 0, not to NaN."""
    state, metrics = train(ppo, args_for(ppo, num_envs=1, num_steps=8, num_minibatches=8, total_timesteps=32))
    assert all(m["losses/policy_loss"] == 0 for m in metrics)
    assert all(value.isfinite().all() for value in state.agent.state_dict().values())


@pytest.mark.parametrize("name", ["clipped_surrogate", "clipped_value_loss", "gae", "normalize", "aggregate"])
def test_the_core_functions_are_the_ones_that_run(monkeypatch, name):
    assert getattr(ppo, name) is getattr(core, name)

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(ppo, name, broken)
    args, state, rollout = collected()
    with pytest.raises(ZeroDivisionError):
        ppo.update(state, rollout, ppo.minibatch_step, args)


@pytest.mark.slow
def test_compiled_equals_eager_over_200_calls():
    """All parameters after 25 iterations of 8 minibatches and their 16 actions each."""
    args = args_for(ppo, num_steps=16, total_timesteps=800)
    eager, eager_metrics = train(ppo, args)
    step = compile_function(ppo.minibatch_step, True)
    compiled, metrics = train(ppo, args, step, compile_function(ppo.act, True))
    assert len(metrics) == 25
    initial = ppo.TrainState.create(args, make_vec(args.env, 2, 1)).agent.state_dict()
    for name, value in eager.agent.state_dict().items():
        torch.testing.assert_close(compiled.agent.state_dict()[name], value, rtol=2e-3, atol=2e-4)
        assert not torch.equal(value, initial[name]), f"{name} never moved"
    assert compiled.optimizer.steps.item() == eager.optimizer.steps.item() == 200
    for tag, value in eager_metrics[0].items():
        assert metrics[0][tag] == pytest.approx(value, rel=1e-3, abs=1e-5), tag


# Probes: the right values are known in closed form (cleanrl_zoo/envs/probes.py)


def trained_on_probe(name, **changes):
    settings = {"num_envs": 4, "num_steps": 32, "learning_rate": 3e-3, "ent_coef": 0.0, "total_timesteps": 4096}
    return train(ppo, args_for(ppo, env=f"probe/{name}Frames-v0", **{**settings, **changes}))[0].agent


@torch.no_grad()
def seen(agent, number):
    """Probability of action 1, and the value, where the probe shows `number`."""
    env = make_vec("probe/CountFrames-v0", 1, 0)._vec.envs[0].unwrapped
    env.value = number
    policy, value = agent(torch.as_tensor(env._obs())[None])
    return policy.logits.exp()[0, 1].item(), value.item()


def test_probe_truncation_is_no_termination():
    """Reward 1 for ever, cut after 10 steps: 1/(1 − 0.8) = 5. Taken for termination, at most 4.5."""
    agent = trained_on_probe("Loop", gamma=0.8, clip_value_loss=False, total_timesteps=6144)
    assert seen(agent, 0)[1] == pytest.approx(5.0, abs=0.1)


def test_probe_delayed_reward():
    agent = trained_on_probe("Delay", gamma=0.5)
    assert seen(agent, 0)[1] == pytest.approx(0.5, abs=0.05) and seen(agent, 1)[1] == pytest.approx(1.0, abs=0.05)


def test_probe_reward_depends_on_the_frames():
    agent = trained_on_probe("Cue")
    assert seen(agent, 1)[1] == pytest.approx(1.0, abs=0.05) and seen(agent, -1)[1] == pytest.approx(-1.0, abs=0.05)


def test_probe_reward_depends_on_action_and_frames():
    agent = trained_on_probe("Match")
    assert seen(agent, 1)[0] > 0.95 and seen(agent, -1)[0] < 0.05
    assert seen(agent, 1)[1] == pytest.approx(1.0, abs=0.1) and seen(agent, -1)[1] == pytest.approx(1.0, abs=0.1)


# Games


@needs_atari
@pytest.mark.parametrize("name", ["ppo_atari", "dqn_atari"])
def test_a_game_without_its_own_engine_is_told_which_it_needs(in_tmp, capsys, name):
    module = load_algorithm(name)
    words = ["--preset", "debug", "--env", "ALE/Breakout-v5", "--vec", "gymnasium", "--checkpoint-every", "0"]
    with pytest.raises(SystemExit) as stop:
        module.main(parse_args(module.Args, module.PRESETS, words))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "with --vec atari" in err, err


GAME = {"env": "ALE/Breakout-v5", "eval_episodes": 1, "num_steps": 64}


def shortened(monkeypatch, max_episode_steps):
    """Cuts all games after so many steps; the list of the arguments that they are made with."""
    from cleanrl_zoo.envs import atari

    real, made = atari.AtariVec, []

    def noted(*args, **kwargs):
        made.append(kwargs)
        return real(*args, **kwargs, max_episode_steps=max_episode_steps)

    monkeypatch.setattr(atari, "AtariVec", noted)
    return made


@needs_atari
def test_a_game_is_learned_by_lives_and_measured_whole_as_the_saved_policy_plays_it(in_tmp, monkeypatch):
    """Sticky actions are on the saved policy's card, so that it is measured on the game that it has learned."""
    made, sticky = shortened(monkeypatch, 100), {"repeat_action_probability": 0.25}
    ppo.main(args_for(ppo, run_dir="a", checkpoint_every=0, total_timesteps=256, **sticky, **GAME))
    assert made == [{**sticky, "episodic_life": True}, sticky]
    policy = zoo.load(in_tmp / "a/policy")
    summary = json.loads((in_tmp / "a/summary.json").read_text())
    assert zoo.evaluate(policy, 1, 1).tolist() == summary["final_eval"]["returns"]
    assert made[2] == policy.card["env_kwargs"] == sticky
    policy.spec["sizes"][1] = 6
    with pytest.raises(ValueError, match="it was trained on another environment"):
        zoo.evaluate(policy, 1, 1)


@needs_atari
def test_a_run_whose_games_are_cut_at_checkpoints_resumes_bit_equal(in_tmp, monkeypatch):
    """Games of 5 steps, so that boundaries may come every 10 · 5 · 2 steps; the one at 128 falls into a game."""
    shortened(monkeypatch, 5)
    for run_dir in ("a", "b"):
        ppo.main(args_for(ppo, run_dir=run_dir, checkpoint_every=128, total_timesteps=512, **GAME))
    assert json.loads((in_tmp / "a/summary.json").read_text())["finished"]
    (in_tmp / "b/summary.json").unlink()
    shutil.rmtree(sorted((in_tmp / "b/checkpoints").iterdir())[-1])
    saved = load_checkpoint(sorted((in_tmp / "b/checkpoints").iterdir())[-1])["state"]["obs"]
    assert saved[:, 3].any() and not saved[:, :3].any()  # the first frames of new games
    ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--resume", "b"]))
    assert_same_run(in_tmp / "a", in_tmp / "b")


def test_the_frames_that_a_saved_policy_sees_can_be_recorded(in_tmp):
    pytest.importorskip("PIL")
    ppo.main(args_for(ppo, run_dir="a", total_timesteps=256))
    policy = zoo.load(in_tmp / "a/policy")
    returns = zoo.record(policy, in_tmp / "a.gif", episodes=2, seed=1)
    assert returns == zoo.evaluate(policy, 2, 1).tolist() and (in_tmp / "a.gif").stat().st_size > 0


# Recorded numbers

FINGERPRINT = ROOT / "tests/algos/fingerprints/ppo_atari.json"


def fingerprint() -> dict[str, list[float]]:
    """What 20 updates of small rollouts report; frames of a probe, since a game's own would tie them to ale-py."""
    settings = {"num_envs": 4, "num_steps": 16, "learning_rate": 2.5e-3, "total_timesteps": 1280}
    _, metrics = train(ppo, args_for(ppo, **settings))
    return {tag: [float(f"{m[tag]:.6g}") for m in metrics] for tag in metrics[0]}


def write_fingerprint() -> None:
    FINGERPRINT.write_text(json.dumps(fingerprint(), indent=1) + "\n")


def test_fingerprint_of_twenty_updates():
    """Losses and gradient norms as committed. A change needs a reason; this writes the file anew:

    PYTHONPATH=.:tests/algos python -c "import test_ppo_atari; test_ppo_atari.write_fingerprint()"
    """
    assert_as_recorded(FINGERPRINT, fingerprint(), rtol=1e-2)


RECORDED = [0.61, 1.0, 0.7, 0.97, 0.96, 1.0, 1.0, 0.99, 0.53, 0.62]


@pytest.mark.learn
def test_learns_what_to_do_from_frames():
    """probe/MatchFrames-v0, 8,192 steps: mean return of the last 200 training episodes; 1 at best, 0 at random.

    Seeds 101–110 gave RECORDED; the bound is their mean minus two standard deviations. A game takes hours.
    """
    changes = {"total_timesteps": 8192, "num_envs": 8, "num_steps": 32, "learning_rate": 1e-3}
    args = args_for(ppo, **changes)
    returns = [episode[0] for episode in training_episodes(ppo, args, ppo.minibatch_step)[-200:]]
    assert np.mean(returns) > np.mean(RECORDED) - 2 * np.std(RECORDED) > 0.4
