"""Environments: one vector interface over several engines, running scales, probes and worlds with known values."""

from cleanrl_zoo.envs import cartpole as cartpole  # registers the cart-poles with Gymnasium
from cleanrl_zoo.envs import probes as probes  # the probe environments
from cleanrl_zoo.envs import tabular as tabular  # and the textbook's worlds
from cleanrl_zoo.envs.episodes import run_episodes
from cleanrl_zoo.envs.normalize import ObsNormalizer, RewardScaler
from cleanrl_zoo.envs.spaces import check_spaces, sampled_action
from cleanrl_zoo.envs.vec import EVAL_STREAM, TRAIN_STREAM, VecEnv, VecStep, make_vec

__all__ = [
    "EVAL_STREAM",
    "TRAIN_STREAM",
    "ObsNormalizer",
    "RewardScaler",
    "VecEnv",
    "VecStep",
    "check_spaces",
    "make_vec",
    "run_episodes",
    "sampled_action",
]
