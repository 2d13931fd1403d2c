"""What a file's networks can take in and give out, checked before anything is built."""

from typing import Literal

import gymnasium
import numpy as np

from cleanrl_zoo.envs.vec import VecEnv


def check_spaces(
    envs: VecEnv, actions: Literal["box", "discrete", "any"], other: str = "", frames: bool = False
) -> None:
    """Raises ValueError, one line, unless observations are flat vectors and actions are of the named kind.

    actions: "box" for a flat Box of floating numbers, "discrete" for a Discrete counted from 0, "any" for either.
    other: the file for the other kind, for the message.
    frames: observations must be bytes [channels, height, width], at least 36 pixels a side, instead of vectors.
    """
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    given = f"--env {envs.env_id}: observations {obs_space}, actions {action_space}"
    shape = obs_space.shape or ()
    pixels = len(shape) == 3 and obs_space.dtype == "uint8" and min(shape[1:]) >= 36
    if frames and not pixels:
        raise ValueError(
            f"{given}: observations must be frames of bytes [channels, height, width], at least 36 pixels a side, as "
            "those of ALE/… names with --vec atari; for flat vectors: algos/ppo.py, algos/dqn.py"
        )
    if not frames and len(shape) != 1:
        if pixels:
            raise ValueError(
                f"{given}: observations must be flat vectors; for frames: algos/ppo_atari.py, algos/dqn_atari.py"
            )
        if isinstance(obs_space, gymnasium.spaces.Discrete):
            raise ValueError(
                f"{given}: observations must be flat vectors; for numbered states: algos/q_learning.py, or "
                "gymnasium.wrappers.FlattenObservation in a registered environment of your own"
            )
        raise ValueError(
            f"{given}: observations must be flat vectors; flatten them with gymnasium.wrappers.FlattenObservation in a "
            "registered environment of your own"
        )
    advice = f"; for these: {other}" if other and _kind(action_space) in ("box", "discrete") else ""
    if _kind(action_space) not in (("box", "discrete") if actions == "any" else (actions,)):
        allowed = {"box": "a flat Box of floating numbers", "discrete": "Discrete, counted from 0"}
        allowed["any"] = f"{allowed['box']} or {allowed['discrete']}"
        raise ValueError(f"{given}: actions must be {allowed[actions]}{advice}")


def sampled_action(perturbed: np.ndarray, space: gymnasium.Space) -> tuple[np.ndarray, np.ndarray]:
    """Of a policy's outputs with `core.distributions.policy_noise` added, [N, A]: the actions to learn from, and what
    the environment gets of them.

    Discrete: the largest logit, [N], for both. A box: the actions as they are, [N, A], and a copy clipped to the box.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        action = perturbed.argmax(-1)
        return action, action
    return perturbed, perturbed.clip(space.low, space.high)


def _kind(space: gymnasium.Space) -> str:
    if isinstance(space, gymnasium.spaces.Box) and space.dtype.kind == "f" and len(space.shape) == 1:
        return "box"
    if isinstance(space, gymnasium.spaces.Discrete) and space.start == 0:
        return "discrete"
    return "neither"
