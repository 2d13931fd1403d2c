"""Times a planning step of mbrl-lib; `speed_models.py` starts it with an interpreter that has mbrl.

    ~/mbrl/bin/python benchmarks/peers_mbrl.py '{"horizon": 30, "population": 150, "rounds": 3, "kept": 15, ...}'

PETS on cartpole/SwingUp as mbrl-lib has it: its Gaussian ensemble, SiLU and normalised inputs, fixed models (TS∞) or
random ones (TS-1), its cross-entropy method and its agent, which begins where the last plan goes on. The reward is the
formula of `cleanrl_zoo/envs/model_functions.py`. Weights and the observation are random: the time depends on neither.
Prints JSON: seconds of each of `steps` planning steps.
"""

import json
import sys
import time

try:
    import mbrl.models
    import mbrl.planning
    import mbrl.types
    import numpy as np
    import omegaconf
    import torch
except ImportError as error:
    sys.exit(f"error: {error}; benchmarks/speed_models.py says how to make an environment for this file, and starts it")

OBS, ACTION = 5, 1


class Spaces:
    """What ModelEnv asks an environment for."""

    observation_space = action_space = None


def reward(actions: torch.Tensor, next_obs: torch.Tensor) -> torch.Tensor:
    height = next_obs[:, 3] - 0.05 * next_obs[:, 0].square() - 0.01 * actions[:, 0].clamp(-1.0, 1.0).square()
    return height.unsqueeze(-1)


def no_termination(actions: torch.Tensor, next_obs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(next_obs), 1, dtype=torch.bool)


def main(settings: dict) -> list[float]:
    """Seconds of each planning step, after a few that are not counted."""
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    hidden = settings["hidden"]
    network = mbrl.models.GaussianMLP(
        OBS + ACTION, OBS, "cpu", num_layers=len(hidden), ensemble_size=settings["members"], hid_size=hidden[0],
        propagation_method={"tsinf": "fixed_model", "ts1": "random_model"}[settings["propagation"]],
        learn_logvar_bounds=True, activation_fn_cfg={"_target_": "torch.nn.SiLU"},
    )  # fmt: skip
    dynamics = mbrl.models.OneDTransitionRewardModel(network, normalize=True, learned_rewards=False)
    rows = np.random.default_rng(settings["seed"]).normal(size=(100, OBS + ACTION)).astype(np.float32)
    batch = mbrl.types.TransitionBatch(rows[:, :OBS], rows[:, OBS:], rows[:, :OBS], rows[:, 0], rows[:, 0], rows[:, 0])
    dynamics.update_normalizer(batch)
    env = mbrl.models.ModelEnv(Spaces, dynamics, no_termination, reward, torch.Generator().manual_seed(0))
    optimizer = {
        "_target_": "mbrl.planning.CEMOptimizer", "num_iterations": settings["rounds"],
        "elite_ratio": settings["kept"] / settings["population"], "population_size": settings["population"],
        "alpha": 0.1, "device": "cpu", "lower_bound": "???", "upper_bound": "???", "return_mean_elites": True,
    }  # fmt: skip
    config = omegaconf.OmegaConf.create(optimizer)
    agent = mbrl.planning.TrajectoryOptimizerAgent(config, [-1.0], [1.0], settings["horizon"])
    particles = settings["particles"]
    agent.set_trajectory_eval_fn(lambda state, plans: env.evaluate_action_sequences(plans, state, particles))
    seconds = []
    for _ in range(3 + settings["steps"]):
        started = time.perf_counter()
        agent.act(rows[0, :OBS])
        seconds.append(time.perf_counter() - started)
    return seconds[3:]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
