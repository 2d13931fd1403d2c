"""What every file that collects rollouts [T, N] does alike at the time limit of an episode."""

import numpy as np
import pytest
import torch
from algo_helpers import args_for, load_algorithm, noted_steps, start

from cleanrl_zoo.core import gae

each_file = pytest.mark.parametrize(
    "name, env",
    [
        ("ppo", "probe/Count-v0"),
        ("ppo_continuous", "probe/CountContinuous-v0"),
        ("ppo_penalty", "probe/Count-v0"),
        ("ppo_penalty", "probe/CountContinuous-v0"),
    ],
)


def collected(name, env, num_steps, scale_rewards=False):
    """One environment's rollout of the untrained policy, rewards in their own unit or divided by the running scale."""
    module = load_algorithm(name)
    flags = {"num_envs": 1, "num_steps": num_steps, "num_minibatches": 1, "gamma": 0.9, "gae_lambda": 1.0}
    flags["normalize" if name == "ppo" else "scale_rewards"] = scale_rewards
    args = args_for(module, env=env, **flags)
    envs, state, rollout = start(module, args)
    module.collect(state, envs, rollout, args)
    return module, args, state, rollout


FILES = ["ppo", "ppo_penalty", "trpo", "a2c", "reinforce", "ppo_continuous"]
SAMPLED = [(name, "CartPole-v1") for name in FILES[:-1]] + [(name, "Humanoid-v4") for name in FILES[1:]]


@pytest.mark.parametrize("name, env", SAMPLED)
def test_collected_actions_are_samples_of_the_policy(name, env):
    """What NumPy's copy of the policy chooses with the run's noise is what `policy(...).sample` gives, rows and stream
    alike, with weights, deviations and scales that are no longer the first; the environment gets it clipped to its box,
    ±0.4 for Humanoid."""
    module, generator = load_algorithm(name), torch.Generator().manual_seed(0)
    flags = {"normalize": True} if name == "ppo" else {}
    args = args_for(module, env=env, num_envs=4, num_steps=32, **flags)
    envs, state, rollout = start(module, args)
    agent, steps, discrete = state.agent, noted_steps(envs), env == "CartPole-v1"
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.mul_(3.0)
        agent.obs_norm.update(torch.randn(500, 4, rollout.obs.shape[-1], generator=generator) * 0.3 + 0.1)
        if not discrete:
            agent.log_std.copy_(torch.linspace(-2.0, 0.5, len(agent.log_std)))
    module.collect(state, envs, rollout, args)

    shape = (32, 4, agent.actor[-1].out_features)
    draw = torch.rand if discrete else torch.randn
    noise = draw(shape, generator=module.torch_generator(args.seed, "noise"))
    with torch.no_grad():
        expected = policy_in(module, agent, rollout.obs).sample(noise)
    torch.testing.assert_close(rollout.actions, expected, rtol=1e-5, atol=1e-5)
    given = torch.as_tensor(np.stack(steps))
    assert torch.equal(given, rollout.actions if discrete else rollout.actions.clamp(-0.4, 0.4))
    assert len(rollout.actions.unique()) > 1 and (discrete or rollout.actions.abs().max() > 0.4)


def policy_in(module, agent, obs):
    if module.__name__.endswith("reinforce"):
        return agent.policy(obs)  # normalises itself
    if module.__name__.endswith("ppo_penalty"):
        return agent.policy(agent.actor(agent.obs_norm(obs)), agent.log_std)
    return agent.policy(agent.obs_norm(obs))


@each_file
def test_rollout_shows_the_true_successor_at_every_truncation(name, env):
    """Count observes 0, 1, 2 and is cut at 3: each of 8 rows is a step of +1, rows 2 and 5 are cut, none terminates."""
    _, _, state, rollout = collected(name, env, 8)
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert torch.equal(rollout.final_obs, rollout.obs + 1)
    assert rollout.truncated[:, 0].nonzero().flatten().tolist() == [2, 5] and not rollout.terminated.any()
    assert state.obs[0, 0] == 2 and state.global_step == 8


@each_file
def test_truncation_bootstraps_from_the_last_observation_and_not_from_the_reset(name, env, monkeypatch):
    """γ = 0.9, λ = 1, r = 1, V(3) = 10 and V(0) = V(1) = V(2) = 0, so that A_2 = 1 + 0.9 · 10 = 10, A_1 = 1 + 0.9 A_2
    = 10 and A_0 = 10. From the reset's observation, as from a termination, they would be 2.71, 1.9 and 1."""
    module, args, state, rollout = collected(name, env, 6)
    state.agent.value = lambda obs: torch.where(obs[..., 0] > 2.5, 10.0, 0.0)
    advantages = []

    def noted_gae(*arguments):
        advantages.append(gae(*arguments))
        return advantages[-1]

    monkeypatch.setattr(module, "gae", noted_gae)
    module.update(state, rollout, lambda *_: torch.zeros(len(module.STATS)), args)
    torch.testing.assert_close(advantages[0], torch.full((6, 1), 10.0))


@each_file
def test_the_reward_scale_sees_the_end_of_a_truncated_episode(name, env):
    """After 8 steps, of which the third and the sixth were cut, the running return is that of the two steps since:
    1 + 0.9 · 1 = 1.9. If only a termination ended it, it would be Σ_{k<8} 0.9ᵏ = 5.7."""
    module, args, state, rollout = collected(name, env, 8, scale_rewards=True)
    module.update(state, rollout, module.minibatch_step, args)
    assert state.reward_scaler.running_return.item() == pytest.approx(1.9)
