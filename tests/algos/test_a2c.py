"""A2C: its step against a second way to compute it, time limits, probes, its own recorded numbers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from algo_helpers import args_for, assert_as_recorded, load_algorithm, start, training_episodes

from cleanrl_zoo import core
from cleanrl_zoo.run import compile_function, parse_args

a2c = load_algorithm("a2c")
each_kind = pytest.mark.parametrize("env", ["CartPole-v1", "Hopper-v4"])
COEFS = (0.9, 0.8, 0.7, 0.1, 0.3)  # γ, λ, weight of the value loss, weight of the entropy, norm


def collected(**changes):
    """State and rollout [T, N] of the untrained policy."""
    args = args_for(a2c, **changes)
    envs, state, rollout = start(a2c, args)
    a2c.collect(state, envs, rollout, args)
    return args, state, rollout


def batch_of(rollout):
    return tuple(getattr(rollout, n) for n in ("obs", "final_obs", "actions", "rewards", "terminated", "truncated"))


def train(args, gradient_step=a2c.gradient_step):
    """A whole run without its log: the state at the end, and what each update reported."""
    envs, state, rollout = start(a2c, args)
    metrics = []
    while state.global_step < args.total_timesteps:
        a2c.collect(state, envs, rollout, args)
        metrics.append({tag: float(v) for tag, v in a2c.update(state, rollout, gradient_step, args).items()})
    return state, metrics


# The command line


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--env", "CliffWalking-v1"], ["CliffWalking-v1", "Discrete(48)", "FlattenObservation"]),
        (["--env", "CartPole-v1", "--vec", "mujoco"], ["CartPole-v1", "mujoco"]),
        (["--num-steps", "0"], ["--num-steps 0", "at least 1"]),
        (["--rmsprop-eps", "0"], ["--rmsprop-eps 0", "above 0"]),
        (["--rmsprop-alpha", "1.1"], ["--rmsprop-alpha 1.1", "at most 1"]),
        (["--rmsprop-alpha", "1"], ["--rmsprop-alpha 1.0", "below 1"]),
        (["--gae-lambda", "-0.1"], ["--gae-lambda -0.1", "at least 0"]),
        (["--ent-coef", "-1"], ["--ent-coef -1", "at least 0"]),
        (["--max-grad-norm", "0"], ["--max-grad-norm 0", "above 0"]),
        (["--hidden", "64", "0"], ["--hidden 64 0", "at least 1"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(in_tmp, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        a2c.main(parse_args(a2c.Args, a2c.PRESETS, ["--preset", "debug", *flags]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert all(word in err for word in words), err


# The algorithm


@each_kind
def test_one_step_equals_the_textbook_with_torchs_own_optimizer(env):
    """Returns by a loop over time, distributions, RMSprop and norm clip from torch, in float64, from the second step on
    so that the running squares and scales have moved."""
    args, state, rollout = collected(env=env, num_steps=32)
    a2c.update(state, rollout, a2c.gradient_step, args)
    agent = state.agent.double()
    agent.obs_norm.forward = lambda obs: ((obs - agent.obs_norm.mean) / (agent.obs_norm.var + 1e-8).sqrt()).clamp(-9, 9)
    mean, var = agent.obs_norm.mean.clone(), agent.obs_norm.var.clone()
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    batch = batch_of(rollout)
    rate = torch.tensor(0.01, dtype=torch.float64)
    optimizer = a2c.RMSprop(agent.parameters(), 0.9, 1e-5, eps_inside_root=False)
    stats = a2c.gradient_step(agent, optimizer, batch, rate, *COEFS)
    after = {name: value.clone() for name, value in agent.state_dict().items()}
    agent.load_state_dict(before)

    raw, raw_final, actions, rewards, terminated, truncated = batch
    obs, final_obs = (((x.double() - mean) / (var + 1e-8).sqrt()).clamp(-9, 9) for x in (raw, raw_final))
    value, next_value = agent.critic(obs)[..., 0], agent.critic(final_obs)[..., 0].detach()
    advantage, following = torch.zeros_like(rewards), torch.zeros(2, dtype=torch.float64)
    goes_on, same_episode = (~terminated).double(), (~(terminated | truncated)).double()
    for t in reversed(range(32)):
        delta = rewards[t] + 0.9 * goes_on[t] * next_value[t] - value[t].detach()
        following = delta + 0.9 * 0.8 * same_episode[t] * following
        advantage[t] = following
    output = agent.actor(obs)
    if env == "Hopper-v4":
        policy = torch.distributions.Independent(torch.distributions.Normal(output, agent.log_std.exp()), 1)
    else:
        policy = torch.distributions.Categorical(logits=output)
    policy_loss = -(policy.log_prob(actions) * advantage).mean()
    value_loss = 0.5 * ((value - (advantage + value.detach())) ** 2).mean()
    entropy = policy.entropy().mean()
    reference = torch.optim.RMSprop(agent.parameters(), lr=0.01, alpha=0.9, eps=1e-5)
    (policy_loss + 0.7 * value_loss - 0.1 * entropy).backward()
    norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.3)
    reference.step()

    assert norm > 0.3 and terminated.any() and not terminated.all()  # the clip and the ends are at work
    reported = dict(zip(a2c.STATS, stats.tolist(), strict=True))
    assert reported["losses/policy_loss"] == pytest.approx(policy_loss.item(), abs=1e-9)
    assert reported["losses/value_loss"] == pytest.approx(value_loss.item(), rel=1e-9)
    assert reported["losses/entropy"] == pytest.approx(entropy.item(), rel=1e-9)
    assert reported["losses/grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
    for name, expected in agent.named_parameters():
        torch.testing.assert_close(after[name], expected.detach(), rtol=0, atol=1e-8)
        assert not torch.equal(after[name], before[name])


def test_the_optimizer_is_the_papers():
    optimizer = collected(rmsprop_alpha=0.9, rmsprop_eps=1e-3)[1].optimizer
    assert (optimizer.alpha, optimizer.eps, optimizer.eps_inside_root) == (0.9, 1e-3, True)


def test_lambda_one_gives_the_k_step_return(monkeypatch):
    """γ = ½, three steps of reward 1 in Count, V(3) = 8 at the cut: R_0 = 1 + ½ + ¼ + ⅛·8 = 2.75 and A_0 = R_0 − V(0),
    R_1 = 1 + ½ + ¼·8 = 3.5, R_2 = 1 + ½·8 = 5; V = 2 elsewhere."""
    advantages = advantages_in_count(monkeypatch, 0.5, 1.0, at_the_cut=8.0, elsewhere=2.0, num_steps=3)
    assert advantages[:, 0].tolist() == [0.75, 1.5, 3.0]


def test_truncation_bootstraps_from_the_last_observation_and_not_from_the_reset(monkeypatch):
    """γ = 0.9, λ = 1, r = 1, V(3) = 10 and V(0) = V(1) = V(2) = 0, so that A_2 = 1 + 0.9 · 10 = 10, A_1 = 1 + 0.9 A_2
    = 10 and A_0 = 10. From the reset's observation, as from a termination, they would be 2.71, 1.9 and 1."""
    advantages = advantages_in_count(monkeypatch, 0.9, 1.0, at_the_cut=10.0, elsewhere=0.0, num_steps=6)
    torch.testing.assert_close(advantages, torch.full((6, 1), 10.0))


def advantages_in_count(monkeypatch, gamma, gae_lambda, at_the_cut, elsewhere, num_steps):
    """Of a rollout in probe/Count (observes 0, 1, 2, cut at 3; reward 1) with V as given."""
    args, state, rollout = collected(env="probe/Count-v0", num_envs=1, num_steps=num_steps)
    assert rollout.obs[:3, 0, 0].tolist() == [0, 1, 2] and torch.equal(rollout.final_obs, rollout.obs + 1)
    assert rollout.truncated[2::3].all() and not rollout.terminated.any()
    critic = state.agent.critic
    state.agent.value = lambda obs: torch.where(obs[..., 0] > 2.5, at_the_cut, elsewhere) + 0 * critic(obs).squeeze(-1)
    found = []

    def noted_gae(*arguments):
        found.append(core.gae(*arguments))
        return found[-1]

    monkeypatch.setattr(a2c, "gae", noted_gae)
    args.gamma, args.gae_lambda, args.scale_rewards = gamma, gae_lambda, False
    a2c.update(state, rollout, a2c.gradient_step, args)
    return found[0].detach()


def test_actions_are_learned_from_as_sampled():
    """Stored unclipped, with the log-prob of their own noise z, Σ −½z² − log σ − ½ log 2π; the scales that the
    actions were chosen with are those of the step."""
    args, state, rollout = collected(env="Hopper-v4", num_steps=64)
    agent, noise = state.agent, torch.randn(64, 2, 3, generator=a2c.torch_generator(args.seed, "noise"))
    assert (rollout.actions.abs() > 1).float().mean() > 0.05  # N(0, 0.61²) leaves [−1, 1] for 10 % of its mass
    logprob = agent.policy(agent.obs_norm(rollout.obs)).log_prob(rollout.actions)
    expected = (-0.5 * noise**2 + 0.5 - 0.5 * math.log(2 * math.pi)).sum(-1)
    torch.testing.assert_close(logprob, expected, rtol=0, atol=1e-5)


def test_rewards_of_another_episode_do_not_enter_the_running_return():
    """Reward 1, cut after 3 steps: after 5 steps R = 1 + γ, after 6 the episode has ended and R = 0."""
    for num_steps, expected in ((5, 1.9), (6, 0.0)):
        args, state, rollout = collected(env="probe/Count-v0", num_envs=1, num_steps=num_steps, gamma=0.9)
        a2c.update(state, rollout, a2c.gradient_step, args)
        assert state.reward_scaler.running_return.item() == pytest.approx(expected)
    state.reward_scaler.running_return.fill_(7.0)
    state.cut(np.array([[5.0]]))
    assert state.reward_scaler.running_return.item() == 0.0 and state.obs.item() == 5.0


def test_first_learning_rate_is_the_given_one_and_the_last_is_above_zero():
    args = args_for(a2c, total_timesteps=128, learning_rate=0.01)
    np.testing.assert_allclose([m["charts/learning_rate"] for m in train(args)[1]], [0.01, 0.0075, 0.005, 0.0025])
    args = args_for(a2c, total_timesteps=128, learning_rate=0.01, anneal_lr=False)
    np.testing.assert_allclose([m["charts/learning_rate"] for m in train(args)[1]], [0.01] * 4, rtol=1e-6)


def test_the_compiled_step_does_not_grow_with_the_rollout(monkeypatch):
    """A loop over time inside it would be written out, at least one node for each of 56 more steps: with the reward
    scale's, 260 nodes more, `--num-steps 256` took 34 s to start instead of 12. GAE's rounds of doubling add a few."""
    monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", True)
    nodes = []

    def counting(graph, _):
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    step = torch.compile(a2c.gradient_step, backend=counting, fullgraph=True, dynamic=False)
    for num_steps in (8, 64):
        args, state, rollout = collected(num_steps=num_steps)
        a2c.update(state, rollout, step, args)
    assert len(nodes) == 2 and nodes[0] > 100 and nodes[1] - nodes[0] < 56


@each_kind
def test_a_batch_of_one_stays_finite(env):
    state, metrics = train(args_for(a2c, env=env, num_envs=1, num_steps=1, total_timesteps=16))
    assert len(metrics) == 16 and all(np.isfinite(list(m.values())).all() for m in metrics)
    assert all(value.isfinite().all() for value in state.agent.state_dict().values())


@pytest.mark.parametrize("name", ["gae", "policy_gradient", "squared_value_loss", "aggregate"])
def test_the_core_functions_are_the_ones_that_run(monkeypatch, name):
    assert getattr(a2c, name) is getattr(core, name)

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(a2c, name, broken)
    args, state, rollout = collected()
    with pytest.raises(ZeroDivisionError):
        a2c.update(state, rollout, a2c.gradient_step, args)


@pytest.mark.slow
@pytest.mark.parametrize("env", ["Hopper-v4", "CartPole-v1"])
def test_compiled_equals_eager_over_200_calls(env):
    """All parameters, squares, scales and running returns after 200 updates on the same rollouts: left to itself, each
    would soon play other episodes, since a simulation blows up the rounding of an action."""
    args = args_for(a2c, env=env, num_steps=4, learning_rate=3e-4, total_timesteps=1600)
    envs, eager, rollout = start(a2c, args)
    _, compiled, _ = start(a2c, args)
    step = compile_function(a2c.gradient_step, True)
    before = {name: value.clone() for name, value in tensors(eager).items()}
    for call in range(200):
        a2c.collect(eager, envs, rollout, args)
        first = a2c.update(eager, rollout, a2c.gradient_step, args)
        second = a2c.update(compiled, rollout, step, args)
        if call == 0:
            # a loss is a mean of terms of order 1 and both signs: its rounding does not shrink with it
            expected = [float(v) for v in first.values()]
            assert [float(v) for v in second.values()] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    after = tensors(compiled)
    for name, value in tensors(eager).items():
        torch.testing.assert_close(after[name], value, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")
        assert name in ("low", "high") or not torch.equal(value, before[name]), f"{name} never moved"


def tensors(state):
    scaler = {f"scaler.{name}": value for name, value in state.reward_scaler.state_dict().items()}
    squares = {f"square_{i}": value for i, value in enumerate(state.optimizer.square_avg)}
    return {**state.agent.state_dict(), **scaler, **squares}


# Probes: the right values are known in closed form (cleanrl_zoo/envs/probes.py)

each_suffix = pytest.mark.parametrize("suffix", ["", "Continuous"])


def trained_on_probe(name, **changes):
    settings = {"num_envs": 8, "num_steps": 5, "learning_rate": 3e-3, "ent_coef": 0.0, "total_timesteps": 16_000}
    args = args_for(a2c, env=f"probe/{name}-v0", **{**settings, **changes})
    args.scale_rewards = False  # values in the reward's own unit
    return train(args)[0].agent


@torch.no_grad()
def value(agent, obs):
    return agent.value(agent.obs_norm(torch.tensor([[obs]]))).item()


@torch.no_grad()
def choice(agent, obs):
    """The mean action, or the probability of action 1."""
    policy = agent.policy(agent.obs_norm(torch.tensor([[obs]])))
    return policy.mode().item() if agent.log_std is not None else policy.log_prob(torch.tensor([1])).exp().item()


@each_suffix
def test_probe_truncation_is_no_termination(suffix):
    """Reward 1 for ever, cut after 10 steps: 1/(1 − 0.9) = 10. Taken for termination, at most 6.5."""
    assert value(trained_on_probe("Loop" + suffix, gamma=0.9), 0.0) == pytest.approx(10.0, abs=0.3)


@each_suffix
def test_probe_delayed_reward(suffix):
    agent = trained_on_probe("Delay" + suffix, gamma=0.5)
    assert value(agent, 0.0) == pytest.approx(0.5, abs=0.05) and value(agent, 1.0) == pytest.approx(1.0, abs=0.05)


@each_suffix
def test_probe_reward_depends_on_the_observation(suffix):
    agent = trained_on_probe("Cue" + suffix)
    assert value(agent, 1.0) == pytest.approx(1.0, abs=0.05) and value(agent, -1.0) == pytest.approx(-1.0, abs=0.05)


@each_suffix
def test_probe_reward_depends_on_observation_and_action(suffix):
    agent = trained_on_probe("Match" + suffix)
    for cue in (1.0, -1.0):
        if suffix:
            assert choice(agent, cue) == pytest.approx(0.5 * cue, abs=0.15)
        else:
            assert choice(agent, cue) == pytest.approx(float(cue == 1.0), abs=0.02)


# Recorded numbers

FINGERPRINT = Path(__file__).parent / "fingerprints/a2c.json"


def fingerprint() -> dict[str, dict[str, list[float]]]:
    """What 20 updates report, for both kinds of actions."""
    found = {}
    for env in ("CartPole-v1", "Hopper-v4"):
        metrics = train(args_for(a2c, env=env, num_envs=4, num_steps=5, total_timesteps=400))[1]
        found[env] = {tag: [float(f"{m[tag]:.6g}") for m in metrics] for tag in metrics[0]}
    return found


def write_fingerprint() -> None:
    FINGERPRINT.write_text(json.dumps(fingerprint(), indent=1) + "\n")


def test_fingerprint_of_twenty_updates():
    """Losses and gradient norms as committed. A change needs a reason; this writes the file anew:

    PYTHONPATH=.:tests/algos python -c "import test_a2c; test_a2c.write_fingerprint()"
    """
    assert_as_recorded(FINGERPRINT, fingerprint(), rtol=5e-3)


# Learning

RECORDED = [500.0, 500.0, 500.0, 500.0, 256.85, 500.0, 500.0, 500.0, 196.5, 491.45]
RANDOM = 22.0


def last20(*flags):
    """Mean return of the last 20 training episodes of a run with seed 1."""
    args = parse_args(a2c.Args, a2c.PRESETS, [*flags, "--no-compile", "--seed", "1"])
    return np.mean([episode[0] for episode in training_episodes(a2c, args, a2c.gradient_step)[-20:]])


@pytest.mark.learn
def test_learns_to_balance_the_pole():
    """CartPole-v1, 61,440 steps in rollouts of 5: mean return of the last 20 training episodes.

    Seeds 101–110 gave RECORDED; the bound is their mean minus two standard deviations. Random actions give 22.
    """
    reached = last20("--env", "CartPole-v1", "--total-timesteps", "61440", "--num-steps", "5")
    assert reached > np.mean(RECORDED) - 2 * np.std(RECORDED) > 9 * RANDOM


@pytest.mark.learn
def test_learns_to_balance_the_pendulum():
    """InvertedPendulum-v4, 163,840 steps with the defaults: mean return of the last 20 training episodes.

    A reward of 1 a step until the pole tilts by 0.2 rad, at most 1,000. The bound is half of that, far from what can be
    had without an answer to the tilt: with no force at all an episode lasts 25 steps and the longest of 6,330 lasted
    71, with the untrained policy's noise it lasts 11. Seeds 1–5 and 101–103 all gave 1,000.
    """
    assert last20("--env", "InvertedPendulum-v4", "--total-timesteps", "163840") > 500
