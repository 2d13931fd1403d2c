"""What a sweep draws from: one function per algorithm, named as its file in algos/ is.

`space(trial)` returns settings by the names of the fields of `Args`; `trial` is Optuna's. A combination that the
algorithm's file refuses is drawn again; where sizes must divide each other they are powers of two, so that none is.
"""

from typing import Any

from optuna.trial import Trial


def ppo(trial: Trial) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "num_steps": trial.suggest_categorical("num_steps", [32, 64, 128, 256]),
        "num_minibatches": trial.suggest_categorical("num_minibatches", [1, 2, 4, 8]),
        "update_epochs": trial.suggest_int("update_epochs", 2, 16),
        "gamma": 1 - trial.suggest_float("one_minus_gamma", 1e-3, 1e-1, log=True),
        "gae_lambda": trial.suggest_float("gae_lambda", 0.8, 1.0),
        "clip_coef": trial.suggest_float("clip_coef", 0.1, 0.4),
        "clip_value_loss": trial.suggest_categorical("clip_value_loss", [True, False]),
        "ent_coef": trial.suggest_float("ent_coef", 1e-4, 1e-1, log=True),
    }


def ppo_continuous(trial: Trial) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 3e-3, log=True),
        "num_steps": trial.suggest_categorical("num_steps", [64, 128, 256, 512]),
        "num_minibatches": trial.suggest_categorical("num_minibatches", [8, 16, 32]),
        "update_epochs": trial.suggest_int("update_epochs", 3, 20),
        "gamma": 1 - trial.suggest_float("one_minus_gamma", 1e-3, 1e-1, log=True),
        "gae_lambda": trial.suggest_float("gae_lambda", 0.8, 1.0),
        "clip_coef": trial.suggest_float("clip_coef", 0.1, 0.4),
        "ent_coef": trial.suggest_float("ent_coef", 1e-6, 1e-2, log=True),
        "vf_coef": trial.suggest_float("vf_coef", 0.2, 2.0, log=True),
    }


def a2c(trial: Trial) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "num_envs": trial.suggest_categorical("num_envs", [4, 8, 16, 32]),
        "num_steps": trial.suggest_categorical("num_steps", [4, 8, 16, 32]),
        "gamma": 1 - trial.suggest_float("one_minus_gamma", 1e-3, 1e-1, log=True),
        "gae_lambda": trial.suggest_float("gae_lambda", 0.8, 1.0),
        "vf_coef": trial.suggest_float("vf_coef", 0.2, 2.0, log=True),
        "ent_coef": trial.suggest_float("ent_coef", 1e-6, 1e-2, log=True),
        "max_grad_norm": trial.suggest_float("max_grad_norm", 0.2, 5.0, log=True),
    }


def dqn(trial: Trial) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "gamma": 1 - trial.suggest_float("one_minus_gamma", 1e-3, 1e-1, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [32, 64, 128, 256]),
        "updates_per_step": trial.suggest_categorical("updates_per_step", [0.125, 0.25, 0.5, 1.0]),
        "target_update_every": trial.suggest_int("target_update_every", 50, 2000, log=True),
        "exploration_fraction": trial.suggest_float("exploration_fraction", 0.05, 0.5),
        "end_epsilon": trial.suggest_float("end_epsilon", 0.01, 0.1),
        "double": trial.suggest_categorical("double", [False, True]),
        "dueling": trial.suggest_categorical("dueling", [False, True]),
        "n_step": trial.suggest_categorical("n_step", [1, 3, 5]),
    }


def sac(trial: Trial) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 3e-3, log=True),
        "q_learning_rate": trial.suggest_float("q_learning_rate", 1e-4, 3e-3, log=True),
        "gamma": 1 - trial.suggest_float("one_minus_gamma", 1e-3, 1e-1, log=True),
        "tau": trial.suggest_float("tau", 1e-3, 5e-2, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [64, 128, 256]),
        "updates_per_step": trial.suggest_categorical("updates_per_step", [0.25, 0.5, 1.0]),
    }
