"""Policies of Stable-Baselines3 as policies of this zoo.

    python -m cleanrl_zoo.sb3 model.zip folder --env Hopper-v4
    python -m cleanrl_zoo.sb3 model.zip folder --env Hopper-v4 --obs-stats stats.npz
    python -m cleanrl_zoo.zoo evaluate folder

`model.zip` is what `model.save` wrote: of PPO, A2C, TRPO, SAC or DQN with "MlpPolicy", without state-dependent noise.
Its weights are read as tensors only and its settings as JSON; what is pickled in it is never opened, and SB3 need not
be installed. The file does not name the environment, so `--env` does.

`--obs-stats` are VecNormalize's statistics of the observations, written where the pickle that holds them is trusted:

    scales = VecNormalize.load("vecnormalize.pkl", make_vec_env("Hopper-v4"))
    numpy.savez("stats.npz", mean=scales.obs_rms.mean, var=scales.obs_rms.var, count=scales.obs_rms.count,
                epsilon=scales.epsilon, clip_obs=scales.clip_obs)

The other way needs no file: SB3's `evaluate_policy(zoo.load(folder), env)` takes a policy of this zoo as it is.
"""

import argparse
import io
import json
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo import zoo
from cleanrl_zoo.envs import ObsNormalizer, check_spaces, make_vec
from cleanrl_zoo.nn.mlp import ACTIVATIONS, mlp


@dataclass(frozen=True)
class Kind:
    """One of SB3's policies: how its tensors are named."""

    hidden: str  # the chain of hidden layers, or of all
    heads: tuple[str, ...]  # the last layers, whose outputs stand side by side
    others: str  # pattern of those that do not make the action
    activation: str  # where none is stated
    squashed: bool = False
    on_policy: bool = False


# By the module in which SB3 defines them; the first is that of PPO, A2C and TRPO.
KINDS = {
    "stable_baselines3.common.policies": Kind(
        "mlp_extractor.policy_net",
        ("action_net",),
        r"mlp_extractor\.value_net\..*|value_net\..*|log_std",
        "tanh",
        on_policy=True,
    ),
    "stable_baselines3.sac.policies": Kind(
        "actor.latent_pi", ("actor.mu", "actor.log_std"), r"critic(_target)?\..*", "relu", squashed=True
    ),
    "stable_baselines3.dqn.policies": Kind("q_net.q_net", (), r"q_net_target\..*", "relu"),
}
# Settings of a policy that leave its action as it is.
HARMLESS = ("net_arch", "activation_fn", "ortho_init", "log_std_init", "n_critics", "share_features_extractor",
            "optimizer_class", "optimizer_kwargs", "full_std", "use_expln", "clip_mean",
            "normalize_images")  # fmt: skip
LOG_STD_BOUNDS = (-20.0, 2.0)  # where SB3's SAC cuts log σ off
CLIP, EPSILON = 10.0, 1e-8  # of this zoo's observation statistics, and VecNormalize's defaults


def import_policy(model: Path, folder: Path, env_id: str, obs_stats: Path | None = None) -> zoo.Policy:
    """Writes the policy that SB3 saved in `model` into `folder` and returns it.

    Args:
        model: the .zip file of `model.save`.
        folder: a new or empty one.
        env_id: the environment that it was trained on, whose spaces must be the policy's.
        obs_stats: .npz file with `mean` and `var` [D], and optionally `count`, `epsilon`, `clip_obs`; or "none" for a
            policy that was trained with VecNormalize but sees raw observations.

    Raises:
        ValueError: one line that names what differs, if the policy is not one that this zoo can build.
    """
    if (folder / "card.json").exists():
        raise ValueError(f"{folder}: holds a policy already; give another folder")
    data, weights, version = _read(model)
    module = _item(data.get("policy_class"), "__module__")
    if module not in KINDS:
        raise ValueError(f"{model}: its policy is defined in {module}, supported are those of {', '.join(KINDS)}")
    kind = KINDS[module]
    layers, activation = _layers(model, weights, kind), _activation(model, data, kind.activation)
    obs_space, action_space = _spaces(model, data, env_id)
    sizes = [layers[0][0].shape[1], *(len(bias) for _, bias in layers)]
    spec = zoo.policy_spec(sizes, activation, action_space, LOG_STD_BOUNDS if kind.squashed else None)
    spec |= {"log_std": "clipped"} if kind.squashed else {}
    actions = int(action_space.n) if isinstance(action_space, gymnasium.spaces.Discrete) else action_space.shape[0]
    outputs = sizes[-1] // 2 if kind.squashed else sizes[-1]
    if (sizes[0], outputs) != (obs_space.shape[0], actions):
        raise ValueError(
            f"--env {env_id}: has {obs_space.shape[0]} observations and {actions} actions, the policy of {model} "
            f"{sizes[0]} and {outputs}: give the environment it was trained on"
        )
    network = mlp(sizes, activation)
    linear = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        for layer, (weight, bias) in zip(linear, layers, strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    obs_norm = _obs_norm(model, data, obs_stats, sizes[0], kind.on_policy)
    policy = zoo.Policy(spec, network, weights.get("log_std"), obs_norm)
    card = {"algorithm": f"sb3_{_algorithm(data, module)}", "env": env_id, "policy": spec}
    card |= {ours: data[name] for ours, name in (("global_step", "num_timesteps"), ("seed", "seed")) if data.get(name)}
    card |= {"imported": {"stable-baselines3": version, "file": model.name}}
    zoo.save(folder, policy=policy, card=card)
    return zoo.load(folder)


def _read(model: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """The settings, the policy's tensors and SB3's version in a saved model."""
    try:
        with zipfile.ZipFile(model) as archive:
            data = json.loads(archive.read("data"))
            content = archive.read("policy.pth")
            name = "_stable_baselines3_version"
            version = archive.read(name).decode().strip() if name in archive.namelist() else "not stated"
    except OSError as error:
        raise ValueError(f"{model}: cannot be read ({error.strerror or error})") from None
    except (zipfile.BadZipFile, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"{model}: not a model saved by Stable-Baselines3, or damaged ({error})") from None
    try:
        weights = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # the kinds are torch's affair; with weights_only nothing but tensors comes in
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{model}: policy.pth holds more than tensors, or is damaged ({first})") from None
    tensors = isinstance(weights, dict) and all(isinstance(value, Tensor) for value in weights.values())
    if not tensors or not isinstance(data, dict):
        raise ValueError(f"{model}: not a model saved by Stable-Baselines3 (policy.pth must hold named tensors)")
    return data, dict(weights), version


def _item(value: Any, name: str) -> Any:
    """An attribute that SB3 wrote beside a pickled value, as text or number; None where there is none."""
    return value.get(name) if isinstance(value, dict) else None


def _layers(model: Path, weights: dict[str, Tensor], kind: Kind) -> list[tuple[Tensor, Tensor]]:
    """Weight [out, in] and bias [out] of each linear layer, from the observation to the action."""
    pattern = re.compile(rf"{re.escape(kind.hidden)}\.(\d+)\.(weight|bias)")
    numbers = sorted({int(match[1]) for match in map(pattern.fullmatch, weights) if match})
    own = {f"{kind.hidden}.{number}" for number in numbers} | set(kind.heads)
    odd = [name for name in weights if name.rpartition(".")[0] not in own and not re.fullmatch(kind.others, name)]
    missing = [f"{name}.{part}" for name in own for part in ("weight", "bias") if f"{name}.{part}" not in weights]
    if odd or missing or not own:
        what = f"has {odd[0]}" if odd else f"lacks {(missing or [kind.hidden])[0]}"
        raise ValueError(f"{model}: its network {what}; supported are chains of linear layers, as MlpPolicy makes them")
    matrices = all(weights[f"{name}.weight"].ndim == 2 for name in own)
    if numbers != list(range(0, 2 * len(numbers), 2)) or not matrices:
        raise ValueError(f"{model}: its layers {numbers} are no chain of linear layers with activations between them")
    layers = [(weights[f"{kind.hidden}.{n}.weight"], weights[f"{kind.hidden}.{n}.bias"]) for n in numbers]
    if kind.heads:
        both = [torch.cat([weights[f"{name}.{part}"] for name in kind.heads]) for part in ("weight", "bias")]
        layers.append((both[0], both[1]))
    return layers


def _activation(model: Path, data: dict[str, Any], default: str) -> str:
    """The activation's name in this zoo; every other setting of the policy must leave its action as it is."""
    settings = data.get("policy_kwargs") or {}
    flatten = "FlattenExtractor" in str(settings.get("features_extractor_class", "FlattenExtractor"))
    for name, value in settings.items():
        fine = name in HARMLESS or name.startswith(":") or value is None or value is False or value == {}
        if not fine and not (name.startswith("features_extractor") and flatten):
            raise ValueError(f"{model}: its policy_kwargs have {name} {value}, which this zoo's networks have not")
    if data.get("use_sde"):
        raise ValueError(f"{model}: was trained with state-dependent noise (use_sde), which is not supported")
    if "activation_fn" not in settings:
        return default
    found = re.search(r"(\w+)'>$", str(settings["activation_fn"]))
    names = {kind.__name__: name for name, kind in ACTIVATIONS.items()}
    if found is None or found[1] not in names:
        raise ValueError(f"{model}: its activation is {settings['activation_fn']}, supported are {', '.join(names)}")
    return names[found[1]]


def _spaces(model: Path, data: dict[str, Any], env_id: str) -> tuple[gymnasium.Space, gymnasium.Space]:
    """The spaces of the environment; the bounds of its actions must be those that the model was trained with."""
    kind, shape = str(_item(data.get("observation_space"), ":type:")), _item(data.get("observation_space"), "_shape")
    if ".box.Box" not in kind or shape is None or len(shape) != 1:
        raise ValueError(f"{model}: its observations are {kind} of shape {shape}, supported is a Box of one dimension")
    envs = make_vec(env_id, 1, 0)
    try:
        check_spaces(envs, "any")
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
    finally:
        envs.close()
    stated, name = str(_item(data.get("action_space"), ":type:")), type(action_space).__name__
    if not stated.endswith(f".{name}'>"):
        raise ValueError(f"--env {env_id}: its actions are a {name}, those of {model} a {stated}: give its environment")
    for name in ("low", "high") if isinstance(action_space, gymnasium.spaces.Box) else ():
        own, text = getattr(action_space, name), str(_item(data["action_space"], name))  # "[-1. -1.]"
        bounds = np.asarray(re.findall(r"[-+]?(?:inf|[\d.]+(?:e[-+]?\d+)?)", text), float)
        if bounds.shape == own.shape and not np.allclose(bounds, own, rtol=1e-4):
            raise ValueError(
                f"--env {env_id}: its actions' {name} is {own.tolist()}, that of {model} {bounds.tolist()}: "
                "give the environment it was trained on"
            )
    return obs_space, action_space


def _obs_norm(
    model: Path, data: dict[str, Any], stats: Path | None, size: int, on_policy: bool
) -> ObsNormalizer | None:
    """The statistics in the file `stats`; without one the model must have been trained on raw observations."""
    if stats is None:
        # what VecNormalize leaves in an on-policy model; an off-policy one has it in any case
        if on_policy and data.get("_last_original_obs") is not None:
            raise ValueError(
                f"{model}: was trained with VecNormalize: give --obs-stats stats.npz (see --help), or --obs-stats none "
                "if that scaled rewards only"
            )
        return None
    if str(stats) == "none":
        return None
    if stats.suffix != ".npz":
        raise ValueError(f"--obs-stats {stats}: must be a .npz file, no pickle (--help says how to write it)")
    try:
        with np.load(stats) as arrays:
            values = {name: np.asarray(arrays[name], np.float64) for name in arrays.files}
        mean, var = values["mean"], values["var"]
        clip, epsilon = float(values.get("clip_obs", CLIP)), float(values.get("epsilon", EPSILON))
        count = float(values.get("count", 1.0))
    except (OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"--obs-stats {stats}: needs the arrays mean and var, other numbers single ({error})"
        ) from None
    if mean.shape != (size,) or var.shape != (size,):
        raise ValueError(f"--obs-stats {stats}: mean {mean.shape} and var {var.shape}, the policy observes ({size},)")
    if clip != CLIP:
        raise ValueError(f"--obs-stats {stats}: clip_obs is {clip:g}, supported is {CLIP:g}, VecNormalize's default")
    obs_norm = ObsNormalizer((size,), CLIP, EPSILON)
    obs_norm.mean.copy_(torch.from_numpy(mean))
    obs_norm.var.copy_(torch.from_numpy(var + (epsilon - EPSILON)))
    obs_norm.count.fill_(count)
    return obs_norm


def _algorithm(data: dict[str, Any], module: str) -> str:
    """Which of the algorithms with this kind of policy it was, by a setting that only this one has."""
    if module != "stable_baselines3.common.policies":
        return module.split(".")[1]
    return "ppo" if "clip_range" in data else "trpo" if "cg_max_steps" in data else "a2c"


def main(argv: list[str] | None = None) -> int:
    """The command line; a user's mistake is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m cleanrl_zoo.sb3",
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="what model.save wrote, a .zip file")
    parser.add_argument("folder", type=Path, help="where the policy goes")
    parser.add_argument("--env", required=True, help="the environment that it was trained on")
    parser.add_argument("--obs-stats", type=Path, help="VecNormalize's, as .npz; none: it saw raw observations")
    args = parser.parse_args(argv)
    try:
        policy = import_policy(args.model, args.folder, args.env, args.obs_stats)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    sizes = " × ".join(map(str, policy.spec["sizes"]))
    print(f"{args.folder}: {policy.card['algorithm']}, {sizes}; python -m cleanrl_zoo.zoo evaluate {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
