"""Running scales against float64 references."""

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from cleanrl_zoo.envs import ObsNormalizer, RewardScaler, make_vec, run_episodes


def test_obs_statistics_are_those_of_all_observations():
    rng = np.random.default_rng(0)
    batches = [rng.normal(1e3, 2.0, (size, 3)) for size in (1, 8, 64, 5)]
    normalizer = ObsNormalizer((3,), clip=1.5)
    for batch in batches:
        normalizer.update(torch.from_numpy(batch))
    seen = np.concatenate(batches)
    assert normalizer.count.tolist() == [78.0]
    assert normalizer.mean.numpy() == pytest.approx(seen.mean(0), rel=1e-12)
    assert normalizer.var.numpy() == pytest.approx(seen.var(0), rel=1e-9)
    expected = np.clip((seen - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), -1.5, 1.5)
    scaled = normalizer(torch.from_numpy(seen))
    assert scaled.dtype == torch.float32 and scaled.abs().max() == 1.5
    assert scaled.numpy() == pytest.approx(expected, abs=1e-6)


def test_obs_normalizer_takes_any_leading_dimensions_and_starts_as_the_identity():
    normalizer = ObsNormalizer((2,))
    obs = torch.tensor([[[1.0, -2.0]], [[3.0, 50.0]]])  # [T, N, 2]
    assert normalizer(obs).flatten().tolist() == pytest.approx([1.0, -2.0, 3.0, 10.0], abs=1e-6)
    normalizer.update(obs)  # means 2 and 24, deviations 1 and 26
    assert normalizer(obs).flatten().tolist() == pytest.approx([-1.0, -1.0, 1.0, 1.0], abs=1e-6)
    with pytest.raises(ValueError, match="at least one dimension"):
        ObsNormalizer(())


def test_obs_normalizer_on_arrays_is_forward_as_it_was_then():
    """Clipping included (10⁶), for float32 and float64; an update in place that follows is not seen."""
    normalizer = ObsNormalizer((3,))
    normalizer.update(
        torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.1]) + 2
    )
    obs = np.array([[0.5, -1.0, 2.0], [1e6, 0.0, -1e6]])
    function, expected = normalizer.on_arrays(), normalizer(torch.from_numpy(obs))
    normalizer.update(torch.full((9, 3), 40.0))
    for dtype in (np.float32, np.float64):
        result = function(obs.astype(dtype))
        assert result.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(result), expected, rtol=1e-6, atol=1e-6)


def test_obs_normalizer_is_the_same_inside_a_compiled_graph():
    @torch.compile(fullgraph=True)
    def observe(normalizer, obs):
        normalizer.update(obs)
        return normalizer(obs)

    eager, compiled = ObsNormalizer((3,)), ObsNormalizer((3,))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        obs = torch.randn(4, 3, generator=generator, dtype=torch.float64) * 3 + 5
        eager.update(obs)
        assert torch.allclose(observe(compiled, obs), eager(obs), atol=1e-6)
    for name, buffer in eager.named_buffers():
        assert torch.allclose(compiled.get_buffer(name), buffer, rtol=1e-12, atol=0), name
    assert compiled.count.tolist() == [80.0]


@pytest.mark.parametrize("vec", ["gymnasium", "mujoco"])
def test_statistics_travel_with_the_policy_and_an_evaluation_leaves_them_alone(vec):
    normalizer = ObsNormalizer((11,))
    train = make_vec("Hopper-v4", 2, seed=0, vec=vec)
    obs = train.reset()
    for _ in range(50):
        normalizer.update(torch.from_numpy(obs))
        obs = train.step(np.stack([train.single_action_space.sample() for _ in range(2)])).obs
    before = {name: buffer.clone() for name, buffer in normalizer.named_buffers()}

    weights = torch.linspace(-1, 1, 33).reshape(11, 3)
    policy = lambda scale: lambda obs: torch.tanh(scale(torch.from_numpy(obs)) @ weights).numpy()  # noqa: E731
    envs = make_vec("Hopper-v4", 2, seed=0, vec=vec, stream=1)
    returns, _ = run_episodes(envs, policy(normalizer))
    assert all(torch.equal(buffer, before[name]) for name, buffer in normalizer.named_buffers())

    restored = ObsNormalizer((11,))
    restored.load_state_dict(load(save(normalizer.state_dict())))
    assert np.array_equal(policy(restored)(obs), policy(normalizer)(obs))
    assert np.array_equal(run_episodes(envs, policy(restored))[0], returns)


def reference_scaler(rewards, done, gamma, eps, clip):
    """The definition, step by step: the deviation of every discounted return seen so far, this step included."""
    running, seen, scaled = np.zeros(rewards.shape[1]), [], np.zeros_like(rewards)
    for t in range(len(rewards)):
        running = running * gamma + rewards[t]
        seen.extend(running)
        scaled[t] = np.clip(rewards[t] / np.sqrt(np.var(seen) + eps), -clip, clip)
        running[done[t]] = 0.0
    return scaled, running, np.mean(seen), np.var(seen), len(seen)


def test_reward_scaler_is_its_definition_by_rollouts_and_by_steps():
    rng = np.random.default_rng(0)
    rewards, done = rng.normal(5.0, 3.0, (90, 4)), rng.random((90, 4)) < 0.1
    scaled, running, mean, var, count = reference_scaler(rewards, done, 0.99, 1e-8, 10.0)

    by_rollout, by_step = RewardScaler(4, 0.99), RewardScaler(4, 0.99)
    rows = zip(rewards, done, strict=True)
    halves = [by_rollout(torch.tensor(rewards[t : t + 45]), torch.tensor(done[t : t + 45])) for t in (0, 45)]
    steps = [by_step(torch.tensor(reward), torch.tensor(ended, dtype=torch.float32)) for reward, ended in rows]
    for scaler, got in ((by_rollout, torch.cat(halves)), (by_step, torch.stack(steps))):
        assert got.dtype == torch.float64
        assert got.numpy() == pytest.approx(scaled, rel=1e-9)
        assert scaler.running_return.numpy() == pytest.approx(running, rel=1e-12)
        assert scaler.mean.item() == pytest.approx(mean, rel=1e-12)
        assert scaler.var.item() == pytest.approx(var, rel=1e-10)
        assert scaler.count.tolist() == [count]


@pytest.mark.parametrize("vec", ["gymnasium", "mujoco"])
def test_the_running_return_starts_again_after_a_truncation(vec):
    # Reward 1, γ = ½, one environment, limit 2: R = 1, 3/2, then reset, 1, 3/2. Variances of the returns so far:
    # {1}: 0 -> clipped to 10; {1, 3/2}: 1/16 -> 4; {1, 3/2, 1}: 1/18 -> √18; {1, 3/2, 1, 3/2}: 1/16 -> 4.
    # Without the reset the third R is 7/4, the variance of {1, 3/2, 7/4} is 7/72, and the third reward √(72/7) = 3.2.
    envs = make_vec("InvertedPendulum-v4", 1, seed=0, vec=vec, env_kwargs={"max_episode_steps": 2})
    envs.reset()
    scaler, scaled = RewardScaler(1, gamma=0.5, eps=0.0), []
    for _ in range(4):
        step = envs.step(np.zeros((1, 1), np.float32))
        assert step.reward[0] == 1.0 and not step.terminated[0]
        done = torch.from_numpy(step.terminated | step.truncated)
        scaled.append(scaler(torch.from_numpy(step.reward), done).item())
    assert scaled == pytest.approx([10.0, 4.0, 18**0.5, 4.0], rel=1e-9)
    assert scaler.running_return.tolist() == [0.0] and scaler.count.tolist() == [4.0]


def test_the_state_of_the_reward_scale_is_saved():
    scaler = RewardScaler(2, 0.9)
    scaler(torch.randn(10, 2), torch.zeros(10, 2))
    before = save(scaler.state_dict())
    restored = RewardScaler(2, 0.9)
    restored.load_state_dict(load(before))
    rewards, done = torch.randn(5, 2), torch.zeros(5, 2)
    assert torch.equal(restored(rewards, done), scaler(rewards, done))
