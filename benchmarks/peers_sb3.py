"""Trains Stable-Baselines3's PPO through its own public entry point, with its own defaults, and saves the model.

Measured by `speed.py` as a process, from start to exit. The last line printed is the number of environment steps taken
(SB3 completes its last rollout).
"""

import argparse

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="Hopper-v4")
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument(
    "--num-envs", type=int, default=1, help="more than 1: DummyVecEnv, with the same 2048 steps per rollout"
)
parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: torch's default")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--out", required=True)
args = parser.parse_args()

if args.threads:
    torch.set_num_threads(args.threads)
if args.num_envs == 1:
    model = PPO("MlpPolicy", args.env, seed=args.seed)
else:
    model = PPO("MlpPolicy", make_vec_env(args.env, args.num_envs), n_steps=2048 // args.num_envs, seed=args.seed)
model.learn(args.steps)
model.save(args.out)
print(model.num_timesteps)
