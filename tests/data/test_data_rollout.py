from collections import namedtuple

import numpy as np
import torch

from cleanrl_zoo.data.rollout import Rollout

Step = namedtuple("Step", "final_obs reward terminated truncated")


def test_rows_are_stored_where_they_belong():
    rollout = Rollout.allocate(num_steps=2, num_envs=3, obs_shape=(1,), action_shape=(2,))
    for t in range(2):
        obs = np.array([[0.0], [1.0], [2.0]]) + 10 * t
        assert rollout.put_obs(t, obs).tolist() == obs.tolist()
        step = Step(
            obs + 1, np.array([t, 0.5, -1.0]), np.array([t == 1, False, False]), np.array([False, t == 0, False])
        )
        rollout.put_step(t, np.full((3, 2), 7.0 + t), step)
    rollout = rollout.to("cpu")
    obs, final_obs, actions, rewards = rollout.obs, rollout.final_obs, rollout.actions, rollout.rewards
    terminated, truncated = rollout.terminated, rollout.truncated
    assert torch.equal(final_obs, obs + 1)
    assert rewards.tolist() == [[0.0, 0.5, -1.0], [1.0, 0.5, -1.0]]
    assert terminated.tolist() == [[False] * 3, [True, False, False]]
    assert truncated.tolist() == [[False, True, False], [False] * 3]
    assert rollout.done.tolist() == [[False, True, False], [True, False, False]]
    assert actions[1].eq(8.0).all() and actions.shape == (2, 3, 2)


def test_numpy_views_share_the_memory_and_the_cpu_gets_no_copy():
    rollout = Rollout.allocate(4, 2, (3,), (1,))
    rollout.numpy["rewards"][3, 1] = 5.0
    assert rollout.rewards[3, 1] == 5.0
    assert rollout.to("cpu").obs.data_ptr() == rollout.obs.data_ptr()
