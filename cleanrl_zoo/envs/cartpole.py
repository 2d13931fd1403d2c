"""A pole on a cart that a continuous force pushes: to balance it, and to swing it up from hanging.

Barto, Sutton & Anderson (1983), "Neuronlike adaptive elements that can solve difficult learning control problems", in
the equations of Florian (2007), without friction, as Gymnasium's CartPole has them. The state is (x, ẋ, θ, θ̇): metres,
radians (0 is upright) and seconds; cart 1 kg, pole m = 0.1 kg of half length l = 0.5 m, g = 9.8 m/s², M = 1.1 kg both:

    F  = 10 N · a,   a in [−1, 1]
    h  = (F + m l θ̇² sin θ) / M
    θ̈  = (g sin θ − h cos θ) / (l (4/3 − m cos² θ / M)),   ẍ = h − m l θ̈ cos θ / M

| name                | start            | a step                        | reward of a step            |
|---------------------|------------------|-------------------------------|-----------------------------|
| cartpole/Balance-v0 | upright          | Euler, 0.02 s, as Gymnasium's | 1                           |
| cartpole/SwingUp-v0 | hanging, at rest | Runge–Kutta 4, 0.04 s         | cos θ' − 0.05 x'² − 0.01 a² |

Episodes are cut after 200 steps; `Balance` is terminated beyond x = ±2.4 m or θ = ±12°, where the step still pays 1.
Every number of the start differs by up to 0.05 from that. With actions ±1 `Balance` gives the very numbers of
Gymnasium's CartPole. `SwingUp` observes (x, ẋ, sin θ, cos θ, θ̇); cos θ' is the height of the pole's tip after the step
in lengths of the pole, the rail has no end, and a hanging pole keeps its energy, which Euler's steps would raise.
"""

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

GRAVITY, CART, POLE, HALF_LENGTH, FORCE = 9.8, 1.0, 0.1, 0.5, 10.0
TOTAL, MOMENT = CART + POLE, POLE * HALF_LENGTH
BALANCE_STEP, SWING_STEP = 0.02, 0.04  # s
X_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * math.pi / 360
X_COST, ACTION_COST = 0.05, 0.01
LIMIT = 200  # steps until an episode is truncated


def derivative(state: np.ndarray, force: float) -> np.ndarray:
    """Time derivative [4] of `state` (x, ẋ, θ, θ̇) under `force` in newtons."""
    _, x_dot, theta, theta_dot = state
    cos, sin = np.cos(theta), np.sin(theta)
    temp = (force + MOMENT * np.square(theta_dot) * sin) / TOTAL
    theta_acc = (GRAVITY * sin - cos * temp) / (HALF_LENGTH * (4.0 / 3.0 - POLE * np.square(cos) / TOTAL))
    return np.array([x_dot, temp - MOMENT * theta_acc * cos / TOTAL, theta_dot, theta_acc])


def euler(state: np.ndarray, force: float, seconds: float) -> np.ndarray:
    """The state [4] after one explicit Euler step."""
    return state + seconds * derivative(state, force)


def runge_kutta(state: np.ndarray, force: float, seconds: float) -> np.ndarray:
    """The state [4] after one step of the classical fourth-order Runge–Kutta method."""
    k1 = derivative(state, force)
    k2 = derivative(state + 0.5 * seconds * k1, force)
    k3 = derivative(state + 0.5 * seconds * k2, force)
    k4 = derivative(state + seconds * k3, force)
    return state + seconds / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4)


class CartPole(gymnasium.Env):
    """What both tasks share: one action in [−1, 1], which is cut off there, and a state of four numbers."""

    state_names = ("state",)  # what an exact checkpoint has to hold
    integrate: Callable[[np.ndarray, float, float], np.ndarray]
    seconds: float
    start: float  # θ around which an episode starts

    def __init__(self) -> None:
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)
        self.observation_space = Box(-np.inf, np.inf, self._observe(np.zeros(4)).shape, np.float32)
        self.state = np.zeros(4)  # float64

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.state = self.np_random.uniform(-0.05, 0.05, 4)
        self.state[2] += self.start
        return self._observe(self.state), {}

    def step(self, action):
        push = min(max(float(action[0]), -1.0), 1.0)
        self.state = type(self).integrate(self.state, FORCE * push, self.seconds)
        reward, terminated = self.outcome(push)
        return self._observe(self.state), reward, terminated, False, {}

    def _observe(self, state: np.ndarray) -> np.ndarray:
        return state.astype(np.float32)

    def outcome(self, push: float) -> tuple[float, bool]:
        """Reward of the step to `state` by action `push`, and whether it terminated the episode."""
        raise NotImplementedError


class Balance(CartPole):
    """Keep the pole upright."""

    integrate, seconds, start = euler, BALANCE_STEP, 0.0

    def outcome(self, push):
        x, _, theta, _ = self.state
        return 1.0, bool(abs(x) > X_LIMIT or abs(theta) > ANGLE_LIMIT)


class SwingUp(CartPole):
    """Bring the hanging pole up and hold it there."""

    integrate, seconds, start = runge_kutta, SWING_STEP, math.pi

    def _observe(self, state):
        x, x_dot, theta, theta_dot = state
        return np.array([x, x_dot, np.sin(theta), np.cos(theta), theta_dot], np.float32)

    def outcome(self, push):
        x, _, theta, _ = self.state
        return float(np.cos(theta) - X_COST * x**2 - ACTION_COST * push**2), False


for _task in (Balance, SwingUp):
    gymnasium.register(f"cartpole/{_task.__name__}-v0", f"{__name__}:{_task.__name__}", max_episode_steps=LIMIT)
