"""PPO for discrete actions: its loss against a second way to compute it, probes, its own recorded numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from algo_helpers import args_for, assert_as_recorded, load_algorithm, start, train

from cleanrl_zoo import core, zoo
from cleanrl_zoo.envs import make_vec
from cleanrl_zoo.run import compile_function, parse_args

ppo = load_algorithm("ppo")
FINGERPRINT = Path(__file__).parent / "fingerprints/ppo.json"


def collected(**changes):
    """State and rollout [T, N] of the untrained policy."""
    args = args_for(ppo, **changes)
    envs, state, rollout = start(ppo, args)
    ppo.collect(state, envs, rollout, args)
    return args, state, rollout


# The command line


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--env", "Pendulum-v1"], ["Pendulum-v1", "Box(-2.0, 2.0", "algos/ppo_continuous.py"]),
        (["--env", "CliffWalking-v1"], ["CliffWalking-v1", "Discrete(48)", "FlattenObservation"]),
        (["--env", "CartPol-v1"], ["CartPol-v1", "CartPole-v1"]),
        (["--vec", "mujoco"], ["CartPole-v1", "mujoco"]),
        (["--num-minibatches", "7"], ["--num-minibatches 7", "must divide the batch of 256"]),
        (["--clip-coef", "0"], ["--clip-coef 0", "above 0"]),
        (["--ent-coef", "-1"], ["--ent-coef -1", "at least 0"]),
        (["--hidden", "64", "0"], ["--hidden 64 0", "at least 1"]),
        (["--target-kl", "0"], ["--target-kl 0", "above 0"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(in_tmp, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--preset", "debug", *flags]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert all(word in err for word in words), err


def test_box2d_at_a_checkpoint_is_one_line_that_says_what_to_give(in_tmp, capsys):
    """Box2D cannot save its state: episodes are cut at boundaries, which must leave ten limits of 1,000 steps each."""
    pytest.importorskip("Box2D")
    with pytest.raises(SystemExit) as stop:
        ppo.main(args_for(ppo, env="LunarLander-v3"))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert "--checkpoint-every 512" in err and "at least 20000" in err and "or 0" in err
    args = parse_args(ppo.Args, ppo.PRESETS, ["--preset", "lunar_lander"])
    assert args.checkpoint_every >= 10 * 1000 * args.num_envs


# The algorithm


@pytest.mark.parametrize("clip_value_loss", [True, False])
def test_one_step_equals_the_textbook_loss_with_torchs_own_optimizer(clip_value_loss):
    """Equation 9 written out with torch's functions, its Adam and its norm clip, in float64, after a first update."""
    args, state, rollout = collected(clip_value_loss=clip_value_loss)
    batches = []

    def noted(agent, optimizer, batch, *rest):
        batches.append(batch)
        return ppo.minibatch_step(agent, optimizer, batch, *rest)

    ppo.update(state, rollout, noted, args)  # so that ratios and values have moved from the old ones
    agent = state.agent.double()
    batch = [x.double() if x.is_floating_point() else x for x in batches[0]]
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    index = torch.arange(0, 256, 2)
    stats = ppo.minibatch_step(
        agent,
        ppo.Adam(agent.parameters(), eps=1e-5),
        batch,
        index,
        torch.tensor(0.01),
        0.02,
        clip_value_loss,
        0.5,
        0.1,
        0.3,
    )
    after = {name: value.clone() for name, value in agent.state_dict().items()}
    agent.load_state_dict(before)

    obs, actions, old_logprob, old_value, advantage, returns = (x[index] for x in batch)
    logits, value = agent.actor(obs), agent.critic(obs)[:, 0]
    ratio = torch.exp(torch.log_softmax(logits, 1)[torch.arange(128), actions] - old_logprob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.98, 1.02) * advantage).mean()
    errors = (value - returns) ** 2
    if clip_value_loss:
        errors = torch.max(errors, (old_value + (value - old_value).clamp(-0.02, 0.02) - returns) ** 2)
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01, eps=1e-5)
    (-surrogate + 0.5 * 0.5 * errors.mean() - 0.1 * entropy).backward()
    norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.3)
    optimizer.step()

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
        assert not torch.equal(after[name], before[name])


def test_unchanged_policy_has_ratio_one():
    args, state, rollout = collected()
    seen = []

    def noted(agent, optimizer, batch, index, *rest):
        obs, actions, old_logprob = (x[index] for x in batch[:3])
        seen.append((agent.policy(obs).log_prob(actions) - old_logprob).exp().detach())
        return ppo.minibatch_step(agent, optimizer, batch, index, *rest)

    ppo.update(state, rollout, noted, args)
    torch.testing.assert_close(seen[0], torch.ones_like(seen[0]), atol=1e-5, rtol=0)
    assert (seen[1] - 1).abs().max() > 1e-4  # and the second one has moved


def test_first_learning_rate_is_the_given_one_and_the_last_is_above_zero():
    rates = [m["charts/learning_rate"] for m in train(ppo, args_for(ppo))[1]]
    np.testing.assert_allclose(rates, 2.5e-4 * np.array([1.0, 0.75, 0.5, 0.25]), rtol=1e-6)
    rates = [m["charts/learning_rate"] for m in train(ppo, args_for(ppo, anneal_lr=False))[1]]
    np.testing.assert_allclose(rates, [2.5e-4] * 4, rtol=1e-6)


def test_normalize_freezes_the_scales_for_a_rollout_and_its_update():
    """`--normalize`: the scales change between the collection of one rollout and the next only, so that also with
    moved scales the ratio of the first minibatch is 1; without the flag there are none."""
    assert not any(name.startswith("obs_norm") for name in collected()[1].agent.state_dict())
    args, state, rollout = collected(normalize=True)
    envs, counts, firsts = make_vec(args.env, 2, 1), [], []

    def noted(agent, optimizer, batch, index, *rest):
        obs, actions, old_logprob = (x[index] for x in batch[:3])
        ratio = (agent.policy(obs).log_prob(actions) - old_logprob).exp().detach()
        firsts.append(ratio)
        counts.append(agent.obs_norm.count.item())
        return ppo.minibatch_step(agent, optimizer, batch, index, *rest)

    state.obs = envs.reset()
    for iteration in range(3):
        ppo.collect(state, envs, rollout, args)
        firsts.clear()
        ppo.update(state, rollout, noted, args)
        torch.testing.assert_close(firsts[0], torch.ones_like(firsts[0]), atol=1e-5, rtol=0)
        assert set(counts[-len(firsts) :]) == {256.0 * iteration}
    assert not torch.equal(state.agent.obs_norm.var, torch.ones(4, dtype=torch.float64))
    assert state.reward_scaler.count.item() == 3 * 256


def test_normalized_observations_are_part_of_the_saved_policy(in_tmp):
    ppo.main(args_for(ppo, run_dir="a", normalize=True))
    policy, summary = zoo.load(in_tmp / "a/policy"), json.loads((in_tmp / "a/summary.json").read_text())
    assert policy.obs_norm.count.item() == 1024
    assert zoo.evaluate(policy, 2, 1).tolist() == summary["final_eval"]["returns"]
    assert policy.obs_norm.count.item() == 1024  # evaluation changes nothing


def test_target_kl_stops_after_the_epoch():
    for target_kl, epochs in ((1e-9, 1), (1e9, 2)):
        _, metrics = train(ppo, args_for(ppo, target_kl=target_kl, total_timesteps=256))
        assert metrics[0]["losses/epochs"] == epochs


def test_minibatches_of_one_stay_finite():
    """A single advantage whitens to 0, not to NaN."""
    state, metrics = train(ppo, args_for(ppo, num_envs=1, num_steps=8, num_minibatches=8, total_timesteps=32))
    assert all(np.isfinite(m["losses/policy_loss"]) and m["losses/policy_loss"] == 0 for m in metrics)
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
    """All parameters after 25 iterations of 8 minibatches."""
    args = args_for(ppo, total_timesteps=6400)
    eager, eager_metrics = train(ppo, args)
    step = compile_function(ppo.minibatch_step, True)
    compiled, metrics = train(ppo, args, step)
    assert len(metrics) == 25
    start_values = ppo.TrainState.create(args, make_vec(args.env, 2, 1)).agent.state_dict()
    for name, value in eager.agent.state_dict().items():
        torch.testing.assert_close(compiled.agent.state_dict()[name], value, rtol=2e-3, atol=2e-4)
        assert not torch.equal(value, start_values[name]), f"{name} never moved"
    assert compiled.optimizer.steps.item() == eager.optimizer.steps.item() == 200
    for tag, value in eager_metrics[0].items():
        assert metrics[0][tag] == pytest.approx(value, rel=1e-3, abs=1e-5), tag


# Probes: the right values are known in closed form (cleanrl_zoo/envs/probes.py)


def trained_on_probe(name, **changes):
    settings = {"num_envs": 4, "num_steps": 32, "learning_rate": 3e-3, "ent_coef": 0.0, "total_timesteps": 8192}
    return train(ppo, args_for(ppo, env=f"probe/{name}-v0", **{**settings, **changes}))[0].agent


@torch.no_grad()
def value(agent, obs):
    return agent.value(torch.tensor([obs])).item()


@torch.no_grad()
def probability(agent, obs, action):
    return agent.policy(torch.tensor([obs])).log_prob(torch.tensor([action])).exp().item()


@pytest.mark.parametrize("clip_value_loss", [True, False])
def test_probe_truncation_is_no_termination(clip_value_loss):
    """Reward 1 for ever, cut after 10 steps: 1/(1 − 0.9) = 10. Read as termination, the mean over the ten steps of
    an episode would be Σ_k (1 − 0.9^k)/(1 − 0.9)/10 = 4.1."""
    agent = trained_on_probe("Loop", gamma=0.9, clip_value_loss=clip_value_loss, total_timesteps=16384)
    assert value(agent, [0.0]) == pytest.approx(10.0, abs=0.2)


def test_probe_delayed_reward():
    """V(0) = γ, V(1) = 1: a termination that kept bootstrapping would add γ V(2) to V(1)."""
    agent = trained_on_probe("Delay", gamma=0.5)
    assert value(agent, [0.0]) == pytest.approx(0.5, abs=0.02) and value(agent, [1.0]) == pytest.approx(1.0, abs=0.02)


def test_probe_reward_depends_on_the_observation():
    agent = trained_on_probe("Cue")
    assert value(agent, [1.0]) == pytest.approx(1.0, abs=0.02) and value(agent, [-1.0]) == pytest.approx(-1.0, abs=0.02)


def test_probe_reward_depends_on_the_action():
    agent = trained_on_probe("Choice")
    assert probability(agent, [0.0], 1) > 0.98 and value(agent, [0.0]) == pytest.approx(1.0, abs=0.05)


def test_probe_reward_depends_on_both():
    agent = trained_on_probe("Match")
    assert probability(agent, [1.0], 1) > 0.98 and probability(agent, [-1.0], 0) > 0.98
    assert value(agent, [1.0]) == pytest.approx(1.0, abs=0.05) and value(agent, [-1.0]) == pytest.approx(1.0, abs=0.05)


# Recorded numbers


def fingerprint(**changes) -> dict[str, list[float]]:
    """What 20 updates on CartPole-v1 report: small rollouts, and large steps so that ratios and values are clipped."""
    settings = {"num_envs": 4, "num_steps": 32, "update_epochs": 4, "learning_rate": 2.5e-3, "total_timesteps": 2560}
    args = args_for(ppo, **{**settings, **changes})
    _, metrics = train(ppo, args)
    return {tag: [float(f"{m[tag]:.6g}") for m in metrics] for tag in metrics[0]}


def write_fingerprint() -> None:
    FINGERPRINT.write_text(json.dumps(fingerprint(), indent=1) + "\n")


def test_fingerprint_of_twenty_updates():
    """Losses and gradient norms as committed. A change needs a reason; this writes the file anew:

    PYTHONPATH=.:tests/algos python -c "import test_ppo; test_ppo.write_fingerprint()"
    """
    assert_as_recorded(FINGERPRINT, fingerprint(), rtol=1e-2)


@pytest.mark.learn
def test_learns_to_balance_the_pole(in_tmp):
    """100,000 steps with the defaults: mean return of the last 100 training episodes.

    Seeds 1–10 gave 234.1, 222.2, 268.7, 268.4, 255.9, 274.5, 270.6, 331.5, 257.5, 283.0: mean 266.6, standard
    deviation 27.9. The bound is the mean minus two deviations; random actions give 22.
    """
    flags = ["--total-timesteps", "100000", "--eval-every", "0", "--no-compile", "--run-dir", "run"]
    ppo.main(parse_args(ppo.Args, ppo.PRESETS, flags))
    summary = json.loads((in_tmp / "run/summary.json").read_text())
    assert summary["train_last100"]["mean"] > 266.6 - 2 * 27.9
