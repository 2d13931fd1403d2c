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


SUITES: dict[str, tuple[Entry, ...]] = {
    "first_light": tuple(
        Entry("ppo_continuous", env, (1, 2, 3, 4, 5), 1_000_000)
        for env in ("Hopper-v4", "Walker2d-v4", "HalfCheetah-v4")
    ),
    # how many environments may PPO step side by side before it learns less from the same number of steps?
    "num_envs": tuple(
        Entry("ppo_continuous", "Hopper-v4", tuple(range(101, 111)), 1_000_000, ("--num-envs", str(n)), f"num_envs_{n}")
        for n in (1, 8, 16)
    ),
}

FRONT_PAGE = "first_light"  # the suite whose table stands in the README

# The name under which published.csv lists each algorithm file.
PUBLISHED_NAMES = {"ppo_continuous": "PPO"}
