"""The MuJoCo tasks of Gymnasium as array formulas over many environments at once.

A task is Gymnasium's model file, a frame skip, the arrays of `MjData` that it reads, and four functions: how a
state is drawn at a reset, what is observed, where the environment stands (one number, which rewards compare before
and after a step), and what a step earns and whether it ends the episode. Each is written once and gives Gymnasium's
numbers, operation by operation. v4 and v5 of a task differ only where the text below says so. Weights that are 1 in
Gymnasium's defaults are not written out.

A formula reads a `Stack`: arrays whose first dimension is the environment. It uses slices, arithmetic and
reductions only, so that the same lines work on the arrays of another library.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np


class Stack(SimpleNamespace):
    """N simulations of one model: arrays of `MjData` by their names, one row each, and two constants of the model.

    The arrays are live: the next step overwrites them.
    """

    state: np.ndarray  # [N, nq + nv], qpos, then qvel: Gymnasium's state_vector
    qpos: np.ndarray  # [N, nq]
    qvel: np.ndarray  # [N, nv]
    dt: float  # seconds per environment step
    body_mass: np.ndarray  # [bodies], kg


def _x(stack: Stack) -> np.ndarray:
    return stack.qpos[:, 0].copy()


class Task(NamedTuple):
    """One task; `reads` names the arrays of MjData beyond qpos and qvel, `contact_forces` asks for cfrc_ext."""

    model_file: str
    frame_skip: int
    max_episode_steps: int
    draw: Callable  # (rng, qpos0, qvel0) -> qpos, qvel
    observe: Callable  # (stack) -> [N, D], fresh
    outcome: Callable  # (before, after, stack, actions) -> reward float64 [N], terminated bool [N]
    reads: tuple[str, ...] = ()
    position: Callable = _x  # (stack) -> float64 [N], fresh: the `before` and `after` of `outcome`
    contact_forces: bool = False


def _uniform_noise(scale: float) -> Callable:
    def draw(rng, qpos0, qvel0):
        qpos = qpos0 + rng.uniform(low=-scale, high=scale, size=qpos0.size)
        return qpos, qvel0 + rng.uniform(low=-scale, high=scale, size=qvel0.size)

    return draw


def _normal_velocity_noise(scale: float) -> Callable:
    def draw(rng, qpos0, qvel0):
        qpos = qpos0 + rng.uniform(low=-scale, high=scale, size=qpos0.size)
        return qpos, qvel0 + scale * rng.standard_normal(qvel0.size)

    return draw


def _reacher_draw(rng, qpos0, qvel0):
    qpos = rng.uniform(low=-0.1, high=0.1, size=qpos0.size) + qpos0
    while True:  # a goal drawn uniformly from the disc
        goal = rng.uniform(low=-0.2, high=0.2, size=2)
        if np.linalg.norm(goal) < 0.2:
            break
    qpos[-2:] = goal
    qvel = qvel0 + rng.uniform(low=-0.005, high=0.005, size=qvel0.size)
    qvel[-2:] = 0
    return qpos, qvel


def _control_cost(weight: float, actions: np.ndarray) -> np.ndarray:
    return weight * (actions * actions).sum(1)  # in the dtype of the actions, as Gymnasium does


def _nobody_ends(stack: Stack) -> np.ndarray:
    return np.zeros(len(stack.qpos), bool)


# Observations: positions without the ones that the task is invariant to, then velocities.


def _observe_from(skip: int) -> Callable:
    return lambda stack: stack.state[:, skip:].copy()


def _observe_clipped(stack: Stack) -> np.ndarray:
    obs = stack.state[:, 1:].copy()
    velocity = obs[:, stack.qpos.shape[1] - 1 :]
    np.minimum(np.maximum(velocity, -10.0, out=velocity), 10.0, out=velocity)
    return obs


# Runners: forward velocity + healthy bonus - control cost. In v4 the bonus is paid on the terminal step too.


def _hopper_healthy(stack: Stack) -> np.ndarray:
    # MuJoCo resets a simulation beyond 1e10, so Gymnasium's upper bound of infinity on the height always holds
    in_range = abs(stack.state[:, 2:]).max(1) < 100.0
    return in_range & (stack.qpos[:, 1] > 0.7) & (abs(stack.qpos[:, 2]) < 0.2)


def _walker_healthy(stack: Stack) -> np.ndarray:
    z = stack.qpos[:, 1]
    return (z > 0.8) & (z < 2.0) & (abs(stack.qpos[:, 2]) < 1.0)


def _planar_runner(healthy: Callable, bonus_when_unhealthy: bool) -> Callable:
    def outcome(before, after, stack, actions):
        x_velocity = (after - before) / stack.dt
        alive = healthy(stack)
        bonus = 1.0 if bonus_when_unhealthy else alive
        return x_velocity + bonus - _control_cost(1e-3, actions), ~alive

    return outcome


def _no_ending_runner(control_weight: float) -> Callable:
    def outcome(before, after, stack, actions):
        x_velocity = (after - before) / stack.dt
        return x_velocity - _control_cost(control_weight, actions), _nobody_ends(stack)

    return outcome


# Ant: the torso's velocity is taken from xpos, which lags qpos by one substep. v5 adds the contact cost, contact
# forces (without the world's) to the observation, and pays the bonus to the healthy only.


def _ant_x(stack: Stack) -> np.ndarray:
    return stack.xpos[:, 1, 0].copy()


def _ant_healthy(stack: Stack) -> np.ndarray:
    z = stack.qpos[:, 2]
    return np.isfinite(stack.state).all(1) & (z >= 0.2) & (z <= 1.0)


def _ant_v4(before, after, stack, actions):
    x_velocity = (after - before) / stack.dt
    return x_velocity + 1.0 - _control_cost(0.5, actions), ~_ant_healthy(stack)


def _ant_v5(before, after, stack, actions):
    x_velocity = (after - before) / stack.dt
    forces = stack.cfrc_ext.reshape(len(actions), -1).clip(-1.0, 1.0)
    costs = _control_cost(0.5, actions) + 5e-4 * (forces * forces).sum(1)
    alive = _ant_healthy(stack)
    return x_velocity + alive - costs, ~alive


def _ant_v5_observe(stack: Stack) -> np.ndarray:
    forces = stack.cfrc_ext[:, 1:].reshape(len(stack.qpos), -1).clip(-1.0, 1.0)
    return np.concatenate((stack.state[:, 2:], forces), axis=1)


# Humanoid: the velocity of the centre of mass. v5 leaves out the world body and the root's six actuator forces,
# and adds the contact cost.


def _humanoid_x(stack: Stack) -> np.ndarray:
    return np.einsum("b,nbj->nj", stack.body_mass, stack.xipos)[:, 0] / stack.body_mass.sum()


def _humanoid_alive(stack: Stack) -> np.ndarray:
    z = stack.qpos[:, 2]
    return (z > 1.0) & (z < 2.0)


def _humanoid_v4(before, after, stack, actions):
    rewards = 1.25 * ((after - before) / stack.dt) + 5.0
    return rewards - _control_cost(0.1, actions.astype(np.float64)), ~_humanoid_alive(stack)


def _humanoid_v5(before, after, stack, actions):
    forces = stack.cfrc_ext.reshape(len(actions), -1)
    contact_cost = np.minimum(5e-7 * (forces * forces).sum(1), 10.0)
    alive = _humanoid_alive(stack)
    rewards = 1.25 * ((after - before) / stack.dt) + alive * 5.0
    return rewards - (_control_cost(0.1, actions.astype(np.float64)) + contact_cost), ~alive


def _humanoid_observe(first_body: int, first_force: int) -> Callable:
    def observe(stack):
        per_body = (stack.cinert, stack.cvel, stack.cfrc_ext)
        cinert, cvel, cfrc_ext = (array[:, first_body:].reshape(len(stack.qpos), -1) for array in per_body)
        forces = stack.qfrc_actuator[:, first_force:]
        return np.concatenate((stack.state[:, 2:], cinert, cvel, forces, cfrc_ext), axis=1)

    return observe


# Reacher: distance of the fingertip to the target; v4 takes it before the step, v5 after it.

_FINGERTIP, _TARGET = 3, 4  # bodies of reacher.xml


def _reacher_gap(stack: Stack) -> np.ndarray:
    return stack.xpos[:, _FINGERTIP] - stack.xpos[:, _TARGET]  # [N, 3]


def _reacher_distance(stack: Stack) -> np.ndarray:
    gap = _reacher_gap(stack)
    return np.sqrt((gap * gap).sum(1))


def _reacher(distance_after_step: bool) -> Callable:
    def outcome(before, after, stack, actions):
        distance = after if distance_after_step else before
        return -distance - (actions * actions).sum(1), _nobody_ends(stack)

    return outcome


def _reacher_observe(gap_size: int) -> Callable:
    def observe(stack):
        theta = stack.qpos[:, :2]
        gap = _reacher_gap(stack)[:, :gap_size]
        return np.concatenate((np.cos(theta), np.sin(theta), stack.qpos[:, 2:], stack.qvel[:, :2], gap), axis=1)

    return observe


# Inverted pendulums: alive while upright; v5 does not pay the bonus on the terminal step.


def _pendulum(bonus_when_fallen: bool) -> Callable:
    def outcome(before, after, stack, actions):
        alive = np.isfinite(stack.state).all(1) & (abs(stack.qpos[:, 1]) <= 0.2)
        return np.ones(len(alive)) if bonus_when_fallen else alive.astype(np.float64), ~alive

    return outcome


def _double_pendulum(bonus_when_fallen: bool) -> Callable:
    def outcome(before, after, stack, actions):
        x, y = stack.site_xpos[:, 0, 0], stack.site_xpos[:, 0, 2]
        v1, v2 = stack.qvel[:, 1], stack.qvel[:, 2]
        fallen = y <= 1.0
        bonus = 10.0 if bonus_when_fallen else 10.0 * ~fallen
        return bonus - (0.01 * x**2 + (y - 2.0) ** 2) - (1e-3 * v1**2 + 5e-3 * v2**2), fallen

    return outcome


def _double_pendulum_observe(constraint_forces: int) -> Callable:
    def observe(stack):
        angles = stack.qpos[:, 1:]
        forces = stack.qfrc_constraint[:, :constraint_forces].clip(-10.0, 10.0)
        parts = (stack.qpos[:, :1], np.sin(angles), np.cos(angles), stack.qvel.clip(-10.0, 10.0), forces)
        return np.concatenate(parts, axis=1)

    return observe


_HUMANOID = (("xipos", "cinert", "cvel", "qfrc_actuator"), _humanoid_x, True)  # reads, position, contact_forces

TASKS: dict[str, Task] = {
    "Hopper-v4": Task(
        "hopper.xml", 4, 1000, _uniform_noise(5e-3), _observe_clipped, _planar_runner(_hopper_healthy, True)
    ),
    "Hopper-v5": Task(
        "hopper.xml", 4, 1000, _uniform_noise(5e-3), _observe_clipped, _planar_runner(_hopper_healthy, False)
    ),
    "Walker2d-v4": Task(
        "walker2d.xml", 4, 1000, _uniform_noise(5e-3), _observe_clipped, _planar_runner(_walker_healthy, True)
    ),
    "Walker2d-v5": Task(
        "walker2d_v5.xml", 4, 1000, _uniform_noise(5e-3), _observe_clipped, _planar_runner(_walker_healthy, False)
    ),
    "HalfCheetah-v4": Task(
        "half_cheetah.xml", 5, 1000, _normal_velocity_noise(0.1), _observe_from(1), _no_ending_runner(0.1)
    ),
    "HalfCheetah-v5": Task(
        "half_cheetah.xml", 5, 1000, _normal_velocity_noise(0.1), _observe_from(1), _no_ending_runner(0.1)
    ),
    "Swimmer-v4": Task("swimmer.xml", 4, 1000, _uniform_noise(0.1), _observe_from(2), _no_ending_runner(1e-4)),
    "Swimmer-v5": Task("swimmer.xml", 4, 1000, _uniform_noise(0.1), _observe_from(2), _no_ending_runner(1e-4)),
    "Ant-v4": Task("ant.xml", 5, 1000, _normal_velocity_noise(0.1), _observe_from(2), _ant_v4, ("xpos",), _ant_x),
    "Ant-v5": Task("ant.xml", 5, 1000, _normal_velocity_noise(0.1), _ant_v5_observe, _ant_v5, ("xpos",), _ant_x, True),
    "Humanoid-v4": Task(
        "humanoid.xml", 5, 1000, _uniform_noise(1e-2), _humanoid_observe(0, 0), _humanoid_v4, *_HUMANOID
    ),
    "Humanoid-v5": Task(
        "humanoid.xml", 5, 1000, _uniform_noise(1e-2), _humanoid_observe(1, 6), _humanoid_v5, *_HUMANOID
    ),
    "Reacher-v4": Task(
        "reacher.xml", 2, 50, _reacher_draw, _reacher_observe(3), _reacher(False), ("xpos",), _reacher_distance
    ),
    "Reacher-v5": Task(
        "reacher.xml", 2, 50, _reacher_draw, _reacher_observe(2), _reacher(True), ("xpos",), _reacher_distance
    ),
    "InvertedPendulum-v4": Task(
        "inverted_pendulum.xml", 2, 1000, _uniform_noise(0.01), _observe_from(0), _pendulum(True)
    ),
    "InvertedPendulum-v5": Task(
        "inverted_pendulum.xml", 2, 1000, _uniform_noise(0.01), _observe_from(0), _pendulum(False)
    ),
    "InvertedDoublePendulum-v4": Task(
        "inverted_double_pendulum.xml",
        5,
        1000,
        _normal_velocity_noise(0.1),
        _double_pendulum_observe(3),
        _double_pendulum(True),
        ("site_xpos", "qfrc_constraint"),
    ),
    "InvertedDoublePendulum-v5": Task(
        "inverted_double_pendulum.xml",
        5,
        1000,
        _normal_velocity_noise(0.1),
        _double_pendulum_observe(1),
        _double_pendulum(False),
        ("site_xpos", "qfrc_constraint"),
    ),
}
