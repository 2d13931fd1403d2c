"""A user's mistakes: one line that says what was given and what is right."""

import sys

import gymnasium
import numpy as np
import pytest

from cleanrl_zoo.envs import make_vec


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(env_id="Hoper-v4"), "unknown environment 'Hoper-v4', nearest: Hopper-v4"),
        (dict(env_id="hopper-v4"), "nearest: Hopper-v4"),
        (dict(env_id="Hopper"), "nearest: Hopper-v"),
        (dict(env_id="Hopper-v3"), "unknown environment 'Hopper-v3', nearest: Hopper-v"),
        (dict(env_id="zzzzzzz"), "gymnasium.registry lists the names"),
        (dict(env_id="no_such_module:X-v0"), "cannot be made: No module named 'no_such_module'"),
        (dict(num_envs=0), "num_envs is 0, must be at least 1"),
        (dict(num_envs=-3), "num_envs is -3, must be at least 1"),
        (dict(seed=-1), "seed is -1, must be at least 0"),
        (dict(threads=-1), "threads is -1, must be at least 0"),
        (dict(vec="envpool"), "vec is 'envpool', must be auto, gymnasium, mujoco, atari or tabular"),
        (dict(env_id="CartPole-v1", vec="mujoco"), "vec is mujoco, which has no CartPole-v1, only Hopper-v4"),
        (dict(vec="mujoco", env_kwargs={"ctrl_cost_weight": 1.0}), "which takes no env_kwargs ctrl_cost_weight"),
        (dict(env_kwargs={"max_episode_steps": 0}), "max_episode_steps is 0, must be at least 1"),
        (dict(env_kwargs={"colour": "red"}), "unexpected keyword argument 'colour'"),
        (dict(env_id="CartPole-v1", vec="tabular"), "CartPole-v1 has no model that is known"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError) as caught:
        make_vec(**{"env_id": "Hopper-v4", "num_envs": 2, "seed": 0, **arguments})
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "env_id, module, extra", [("LunarLander-v3", "Box2D", "box2d"), ("ALE/Pong-v5", "ale_py", "atari")]
)
def test_a_missing_package_names_its_extra(env_id, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # importing it now fails, installed or not
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError) as caught:
        make_vec(env_id, 1, 0)
    assert (
        str(caught.value)
        == f"{env_id} needs a package that is not installed: pip install -c constraints.txt -e '.[{extra}]'"
    )


def test_actions_of_a_wrong_shape_are_not_broadcast():
    envs = make_vec("Hopper-v4", 2, seed=0, vec="mujoco")
    envs.reset()
    with pytest.raises(ValueError, match=r"actions have shape \(2, 1\), Hopper-v4 takes \(2, 3\)"):
        envs.step(np.zeros((2, 1), np.float32))


class Broken(gymnasium.Env):
    def __init__(self):
        raise TypeError("a fault of its own")


def test_a_fault_inside_an_environment_is_named_and_keeps_its_cause():
    gymnasium.register("test/Broken-v0", Broken)
    try:
        with pytest.raises(ValueError, match="test/Broken-v0 cannot be made: TypeError: a fault of its own") as caught:
            make_vec("test/Broken-v0", 1, 0)
        assert isinstance(caught.value.__cause__, TypeError)
    finally:
        del gymnasium.registry["test/Broken-v0"]
