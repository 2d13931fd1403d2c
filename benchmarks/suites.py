"""What is measured: suites of runs. Seeds are fixed here before the first run and none is replaced afterwards."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One algorithm on one environment over several seeds; its runs live in `<suite>/<label>/<env>/seed_<k>`."""

    algorithm: str  # file in algos/, without .py
    env: str
    seeds: tuple[int, ...]
    steps: int  # environment steps of each run
    flags: tuple[str, ...] = ()  # further flags of the algorithm's command line
    label: str = ""  # folder and row name; the algorithm where one suite has no second setting of it

    @property
    def name(self) -> str:
        return self.label or self.algorithm


EVERY_100K = ("--eval-every", "100000")  # more points for the curve than a run needs by itself

SUITES: dict[str, tuple[Entry, ...]] = {
    "first_light": tuple(
        Entry("ppo_continuous", env, (1, 2, 3, 4, 5), 1_000_000, EVERY_100K)
        for env in ("Hopper-v4", "Walker2d-v4", "HalfCheetah-v4")
    ),
    # How many environments may PPO step side by side before it learns less? One batch is 2048 transitions in all of
    # them; wide_32 also has larger minibatches, 128 transitions instead of 64.
    "num_envs": tuple(
        Entry("ppo_continuous", "Hopper-v4", tuple(range(101, 111)), 1_000_000, (*flags, *EVERY_100K), label)
        for label, flags in (
            ("num_envs_8", ("--num-envs", "8", "--num-steps", "256")),
            ("num_envs_16", ("--num-envs", "16", "--num-steps", "128")),
            ("num_envs_1", ("--num-envs", "1", "--num-steps", "2048")),
            ("wide_32", ("--num-envs", "32", "--num-steps", "64", "--num-minibatches", "16")),
        )
    ),
    "classic": tuple(Entry("ppo", env, (1, 2, 3, 4, 5), 500_000, EVERY_100K) for env in ("CartPole-v1", "Acrobot-v1")),
}

FRONT_PAGE = "first_light"  # the suite whose table stands in the README

# The name under which published.csv lists each algorithm file.
PUBLISHED_NAMES = {"ppo": "PPO", "ppo_continuous": "PPO"}
