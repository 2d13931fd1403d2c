"""PPO with the adaptive KL penalty: its loss against a second way to compute it, the rule for β, probes, numbers."""

import json

import numpy as np
import pytest
import torch
from algo_helpers import ROOT, args_for, assert_as_recorded, load_algorithm, start, train, training_episodes

from cleanrl_zoo import core
from cleanrl_zoo.envs import make_vec
from cleanrl_zoo.run import compile_function, parse_args

ppo = load_algorithm("ppo_penalty")
DISCRETE, CONTINUOUS = "CartPole-v1", "Hopper-v4"
both = pytest.mark.parametrize("env", [DISCRETE, CONTINUOUS])


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
        (["--env", "FrozenLake-v1"], ["FrozenLake-v1", "flat vectors"]),
        (["--env", "ALE/Pong-v5"], ["ALE/Pong-v5", "algos/ppo_atari.py"]),
        (["--num-minibatches", "7"], ["--num-minibatches 7", "must divide the batch of 256"]),
        (["--d-targ", "0"], ["--d-targ 0", "above 0"]),
        (["--kl-coef", "-1"], ["--kl-coef -1", "above 0"]),
        (["--clip-coef", "0.2"], ["clip-coef"]),
        (["--hidden", "64", "0"], ["--hidden 64 0", "at least 1"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(in_tmp, capsys, flags, words):
    if "ALE/Pong-v5" in flags:
        pytest.importorskip("ale_py")
    with pytest.raises(SystemExit) as stop:
        ppo.main(parse_args(ppo.Args, ppo.PRESETS, ["--preset", "debug", *flags]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert all(word in err for word in words), err


# The algorithm


@both
def test_one_step_equals_the_textbook_loss_with_torchs_own_optimizer(env):
    """Equation 9 with the loss of equation 8, by torch's distributions, Adam and norm clip, in float64."""
    args, state, rollout = collected(env=env)
    batches = []

    def noted(agent, optimizer, batch, old_log_std, *rest):
        batches.append((batch, old_log_std))
        return ppo.minibatch_step(agent, optimizer, batch, old_log_std, *rest)

    ppo.update(state, rollout, noted, args)  # so that the policy has moved from the old one
    agent, (batch, old_log_std) = state.agent.double(), batches[0]
    batch = [x.double() if x.is_floating_point() else x for x in batch]
    old_log_std = None if old_log_std is None else old_log_std.double()
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    index, optimizer = torch.arange(0, 256, 2), ppo.Adam(agent.parameters(), eps=1e-5)
    numbers = torch.tensor(0.01), torch.tensor(3.0), 0.5, 0.1, 0.3
    stats = ppo.minibatch_step(agent, optimizer, batch, old_log_std, index, *numbers)
    after = {name: value.clone() for name, value in agent.state_dict().items()}
    agent.load_state_dict(before)

    obs, actions, old_output, advantage, returns = (x[index] for x in batch)
    if old_log_std is None:
        old, new = (torch.distributions.Categorical(logits=x) for x in (old_output, agent.actor(obs)))
    else:
        pairs = (old_output, old_log_std), (agent.actor(obs), agent.log_std)
        old, new = (torch.distributions.Normal(mean, s.exp().expand_as(mean)) for mean, s in pairs)
        old, new = (torch.distributions.Independent(normal, 1) for normal in (old, new))
    ratio = torch.exp(new.log_prob(actions) - old.log_prob(actions))
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    kl = torch.distributions.kl_divergence(old, new)
    penalized = (ratio * advantage - 3.0 * kl).mean()
    error = ((agent.critic(obs)[:, 0] - returns) ** 2).mean()
    torch_adam = torch.optim.Adam(agent.parameters(), lr=0.01, eps=1e-5)
    (-penalized + 0.5 * 0.5 * error - 0.1 * new.entropy().mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.3)
    torch_adam.step()

    assert kl.mean() > 1e-6 and norm > 0.3  # penalty and norm clip are at work
    reported = dict(zip(ppo.STATS, stats.tolist(), strict=True))
    assert reported["losses/policy_loss"] == pytest.approx(-penalized.item(), abs=1e-9)
    assert reported["losses/value_loss"] == pytest.approx(0.5 * error.item(), rel=1e-9)
    assert reported["losses/entropy"] == pytest.approx(new.entropy().mean().item(), rel=1e-9)
    assert reported["losses/grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
    for name, expected in agent.state_dict().items():
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-8)
        assert name.startswith(("obs_norm", "low", "high")) or not torch.equal(after[name], before[name]), name


@both
def test_unchanged_policy_has_ratio_one_and_no_divergence(env):
    """Actions are learned from as sampled, those outside the box too: before the first step every ratio is 1."""
    args, state, rollout = collected(env=env)
    if env == CONTINUOUS:
        assert (rollout.actions.abs() > 1).float().mean() > 0.2  # N(0, 1) leaves [−1, 1] for 32 % of its mass
    seen = []

    def noted(agent, optimizer, batch, old_log_std, index, *rest):
        obs, actions, old_output = (x[index] for x in batch[:3])
        old, new = agent.policy(old_output, old_log_std), agent.policy(agent.actor(obs), agent.log_std)
        seen.append(((new.log_prob(actions) - old.log_prob(actions)).exp().detach(), old.kl(new).detach()))
        return ppo.minibatch_step(agent, optimizer, batch, old_log_std, index, *rest)

    ppo.update(state, rollout, noted, args)
    torch.testing.assert_close(seen[0][0], torch.ones_like(seen[0][0]), atol=1e-5, rtol=0)
    assert seen[0][1].abs().max() < 1e-6
    assert (seen[1][0] - 1).abs().max() > 1e-4 and seen[1][1].max() > 1e-8  # and the second minibatch has moved


@both
def test_the_reported_divergence_is_that_of_the_whole_batch_after_the_update(env):
    args, state, rollout = collected(env=env)
    agent, obs = state.agent, state.agent.obs_norm(rollout.obs)  # the scales change only after the update

    def parameters():
        std = None if agent.log_std is None else agent.log_std.detach().double().clone()
        return agent.actor(obs).detach().double(), std

    old = parameters()
    kl = ppo.update(state, rollout, ppo.minibatch_step, args)["losses/kl"]
    new = parameters()
    if env == DISCRETE:
        pair = (torch.distributions.Categorical(logits=logits) for logits, _ in (old, new))
        expected = torch.distributions.kl_divergence(*pair).mean()
    else:
        pair = (torch.distributions.Normal(mean, log_std.exp().expand_as(mean)) for mean, log_std in (old, new))
        expected = torch.distributions.kl_divergence(*pair).sum(-1).mean()
    assert kl.item() == pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.parametrize(
    "share, factor",
    # d/d_targ on either side of 3/2 and 2/3: β doubles, stays, stays, halves
    [(1.6, 2.0), (1.4, 1.0), (0.7, 1.0), (0.6, 0.5)],
)
def test_beta_follows_the_rule_of_section_4(share, factor):
    args, state, rollout = collected(kl_coef=3.0)
    saved = {name: value.clone() for name, value in state.agent.state_dict().items()}
    d = ppo.update(state, rollout, ppo.minibatch_step, args)["losses/kl"].item()
    args.d_targ = d / share
    _, again, rollout = collected(kl_coef=3.0, d_targ=args.d_targ)
    assert all(torch.equal(saved[name], value) for name, value in again.agent.state_dict().items())
    metrics = ppo.update(again, rollout, ppo.minibatch_step, args)
    assert metrics["losses/kl"].item() == d
    assert metrics["losses/kl_coef"].item() == 3.0 and again.adaptive_kl.coef == 3.0 * factor  # the next β


def test_a_larger_beta_holds_the_policy_nearer():
    divergences = []
    for kl_coef in (1e-3, 1e3):
        args, state, rollout = collected(kl_coef=kl_coef, update_epochs=10)
        divergences.append(ppo.update(state, rollout, ppo.minibatch_step, args)["losses/kl"].item())
    assert divergences[1] < 0.1 * divergences[0]


def test_first_learning_rate_is_the_given_one_and_the_last_is_above_zero():
    rates = [m["charts/learning_rate"] for m in train(ppo, args_for(ppo))[1]]
    np.testing.assert_allclose(rates, 3e-4 * np.array([1.0, 0.75, 0.5, 0.25]), rtol=1e-6)
    rates = [m["charts/learning_rate"] for m in train(ppo, args_for(ppo, anneal_lr=False))[1]]
    np.testing.assert_allclose(rates, [3e-4] * 4, rtol=1e-6)


def test_minibatches_of_one_stay_finite():
    """A single advantage whitens to 0, not to NaN: the penalty alone is left, 0 too but for rounding."""
    changes = {"num_envs": 1, "num_steps": 8, "num_minibatches": 8, "total_timesteps": 32, "vf_coef": 0.0}
    state, metrics = train(ppo, args_for(ppo, **changes))
    assert all(abs(m["losses/policy_loss"]) < 1e-4 for m in metrics)
    assert all(value.isfinite().all() for value in state.agent.state_dict().values())


@pytest.mark.parametrize("name", ["kl_penalized_surrogate", "AdaptiveKL", "gae", "normalize", "aggregate"])
def test_the_core_functions_are_the_ones_that_run(monkeypatch, name):
    assert getattr(ppo, name) is getattr(core, name)

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(ppo, name, broken)
    with pytest.raises(ZeroDivisionError):
        train(ppo, args_for(ppo))


@pytest.mark.slow
@both
def test_compiled_equals_eager_over_200_calls(env):
    """All parameters after 25 iterations of 8 minibatches, β doubling and halving."""
    args = args_for(ppo, env=env, total_timesteps=6400)
    eager, eager_metrics = train(ppo, args)
    step = compile_function(ppo.minibatch_step, True)
    compiled, metrics = train(ppo, args, step)
    assert len(metrics) == 25 and len({m["losses/kl_coef"] for m in metrics}) > 2
    initial = ppo.TrainState.create(args, make_vec(args.env, 2, 1, threads=1)).agent.state_dict()
    for name, value in eager.agent.state_dict().items():
        other = compiled.agent.state_dict()[name]
        torch.testing.assert_close(other, value, rtol=2e-3, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")
        assert name in ("low", "high") or not torch.equal(value, initial[name]), f"{name} never moved"
    assert compiled.optimizer.steps.item() == eager.optimizer.steps.item() == 200
    for tag, value in eager_metrics[0].items():
        assert metrics[0][tag] == pytest.approx(value, rel=1e-3, abs=1e-5), tag


# Probes: the right values are known in closed form (cleanrl_zoo/envs/probes.py)

kinds = pytest.mark.parametrize("kind", ["", "Continuous"])


def trained_on_probe(name, **changes):
    settings = {"num_envs": 4, "num_steps": 32, "update_epochs": 4, "learning_rate": 3e-3, "total_timesteps": 8192}
    args = args_for(ppo, env=f"probe/{name}-v0", **{"scale_rewards": False, **settings, **changes})
    return train(ppo, args)[0].agent


@torch.no_grad()
def value(agent, obs):
    return agent.value(agent.obs_norm(torch.tensor([[obs]]))).item()


@torch.no_grad()
def output(agent, obs):
    """The mean action, or the probability of action 1."""
    logits = agent.actor(agent.obs_norm(torch.tensor([[obs]])))
    return logits.item() if agent.log_std is not None else logits.softmax(-1)[0, 1].item()


@kinds
def test_probe_truncation_is_no_termination(kind):
    """Reward 1 for ever, cut after 10 steps: 1/(1 − 0.9) = 10. Taken for termination, at most 6.5."""
    agent = trained_on_probe(f"Loop{kind}", gamma=0.9, total_timesteps=16_384)
    assert value(agent, 0.0) == pytest.approx(10.0, abs=0.5)


@kinds
def test_probe_delayed_reward(kind):
    agent = trained_on_probe(f"Delay{kind}", gamma=0.5)
    assert value(agent, 0.0) == pytest.approx(0.5, abs=0.05) and value(agent, 1.0) == pytest.approx(1.0, abs=0.05)


def test_probe_reward_depends_on_the_observation():
    agent = trained_on_probe("Cue")
    assert value(agent, 1.0) == pytest.approx(1.0, abs=0.05) and value(agent, -1.0) == pytest.approx(-1.0, abs=0.05)


def test_probe_reward_depends_on_both():
    agent = trained_on_probe("Match")
    assert output(agent, 1.0) > 0.95 and output(agent, -1.0) < 0.05
    agent = trained_on_probe("MatchContinuous")
    assert output(agent, 1.0) == pytest.approx(0.5, abs=0.15) and output(agent, -1.0) == pytest.approx(-0.5, abs=0.15)


# Recorded numbers

FINGERPRINT = ROOT / "tests/algos/fingerprints/ppo_penalty.json"


def fingerprint() -> dict[str, dict[str, list[float]]]:
    """What 20 updates of small rollouts report, with discrete and with continuous actions."""
    settings = {"num_envs": 4, "num_steps": 32, "update_epochs": 4, "total_timesteps": 2560}
    found = {}
    for env in (DISCRETE, CONTINUOUS):
        _, metrics = train(ppo, args_for(ppo, env=env, **settings))
        found[env] = {tag: [float(f"{m[tag]:.6g}") for m in metrics] for tag in metrics[0]}
    return found


def write_fingerprint() -> None:
    FINGERPRINT.write_text(json.dumps(fingerprint(), indent=1) + "\n")


def test_fingerprint_of_twenty_updates():
    """Losses and gradient norms as committed. A change needs a reason; this writes the file anew:

    PYTHONPATH=.:tests/algos python -c "import test_ppo_penalty; test_ppo_penalty.write_fingerprint()"
    """
    assert_as_recorded(FINGERPRINT, fingerprint(), rtol=1e-2)


LEARN = ("--env", "InvertedPendulum-v4", "--total-timesteps", "20480", "--no-compile", "--env-threads", "1")
RECORDED = [
    248.65, 336.5, 478.5, 233.3,  # seeds 2–5
    499.9, 386.7, 500.95, 498.3, 403.3, 494.85, 236.45, 470.9, 511.75, 504.0,  # seeds 101–110
    417.6, 209.55, 295.5, 487.15, 276.5, 511.25, 505.5, 534.85, 489.6, 484.25,  # seeds 111–120
]  # fmt: skip
RANDOM = 7.0


@pytest.mark.learn
@pytest.mark.parametrize("seed, recorded", [(1, RECORDED), (101, RECORDED[4:14])])
def test_learns_to_balance_the_pendulum(seed, recorded):
    """InvertedPendulum-v4, 20,480 steps: mean length of the last 20 training episodes.

    The bound is the mean of RECORDED, 417, minus two standard deviations of 107: none of its 24 seeds would fail (the
    lowest is 6 above it). The seed, 1 as in the other files, is not among them; it gave 283. Seed 101 is held to the
    narrower bound of seeds 101–110, 285, of which it is the first. A random policy lasts 7.
    """
    args = parse_args(ppo.Args, ppo.PRESETS, [*LEARN, "--seed", str(seed)])
    lengths = [episode[1] for episode in training_episodes(ppo, args, ppo.minibatch_step)[-20:]]
    assert np.mean(lengths) > np.mean(recorded) - 2 * np.std(recorded) > 10 * RANDOM
