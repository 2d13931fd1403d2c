"""SAC: its accounting of steps and updates, one update against a textbook version, probes, its own recorded numbers."""

import copy
import functools
import json
import shutil

import algo_helpers
import gymnasium
import numpy as np
import pytest
import torch
from algo_helpers import ROOT, assert_as_recorded, assert_same_run, load_algorithm
from torch import distributions as D
from torch import nn

from cleanrl_zoo import core
from cleanrl_zoo.data.replay import Batch
from cleanrl_zoo.envs import EVAL_STREAM, make_vec, run_episodes
from cleanrl_zoo.run import compile_function, parse_args
from cleanrl_zoo.run.checkpoint import load_checkpoint

sac = load_algorithm("sac")
DEBUG = ("--preset", "debug")
args_for, start, train = (
    functools.partial(f, sac)
    for f in (algo_helpers.args_for, algo_helpers.start_off_policy, algo_helpers.train_off_policy)
)


class Wide(gymnasium.Env):
    """Observes 0; two actions in boxes of unlike sizes; one step is an episode, its reward the second action."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Box(np.array([0.0, -0.4], np.float32), np.array([4.0, 0.4], np.float32))

    def __init__(self, bounded=True):
        if not bounded:
            self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action)), action
        return np.zeros(1, np.float32), float(action[1]), True, False, {}


for _name, _bounded in (("test/Wide-v0", True), ("test/Unbounded-v0", False)):
    if _name not in gymnasium.registry:
        gymnasium.register(_name, Wide, kwargs={"bounded": _bounded})


# The command line


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--env", "CartPole-v1"], ["CartPole-v1", "Discrete(2)", "flat Box"]),
        (["--env", "FrozenLake-v1"], ["FrozenLake-v1", "flat vectors"]),
        (["--env", "test/Unbounded-v0"], ["test/Unbounded-v0", "must be finite"]),
        (["--alpha", "0"], ["--alpha 0", "above 0"]),
        (["--tau", "0"], ["--tau 0", "above 0"]),
        (["--tau", "1.5"], ["--tau 1.5", "at most 1"]),
        (["--updates-per-step", "0"], ["--updates-per-step 0", "above 0"]),
        (["--batch-size", "0"], ["--batch-size 0", "at least 1"]),
        (["--buffer-size", "1"], ["--buffer-size 1", "at least 4"]),  # fewer than the environments
        (["--learning-starts", "1024"], ["--learning-starts 1024", "below --total-timesteps 1024"]),
        (["--q-learning-rate", "-1"], ["--q-learning-rate -1", "above 0"]),
        (["--hidden", "0"], ["--hidden", "at least 1"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(in_tmp, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        sac.main(parse_args(sac.Args, sac.PRESETS, [*DEBUG, *flags]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "Traceback" not in err
    assert all(word in err for word in words), err


def test_nan_from_the_environment_is_told_apart(in_tmp, monkeypatch, capsys):
    real = sac.collect

    def poisoned(state, *rest):
        step = real(state, *rest)
        if state.global_step > 300:
            step.reward[1] = float("nan")
        return step

    monkeypatch.setattr(sac, "collect", poisoned)
    with pytest.raises(SystemExit) as stop:
        sac.main(args_for(run_dir="a"))
    err = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and "rewards holds NaN" in err and "--learning-rate" not in err


def test_a_critic_that_diverges_is_told_with_both_learning_rates(in_tmp, monkeypatch, capsys):
    monkeypatch.setattr(sac, "update", lambda *_: {"losses/qf_loss": torch.tensor(torch.inf)})
    with pytest.raises(SystemExit) as stop:
        sac.main(args_for(run_dir="a"))
    err = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and err.endswith("try a smaller --learning-rate or --q-learning-rate"), err


# Resume


def test_a_checkpoint_holds_the_replay_and_resuming_reruns_no_warm_up(in_tmp):
    """Killed after 256 of 512 steps, 128 of them warm-up: what the replay held is there, and the run ends the same."""
    flags = {"total_timesteps": 512, "checkpoint_every": 256, "updates_per_step": 0.25}
    sac.main(args_for(run_dir="a", **flags))
    shutil.copytree(in_tmp / "a", in_tmp / "b")
    (in_tmp / "b/summary.json").unlink()
    shutil.rmtree(sorted((in_tmp / "b/checkpoints").iterdir())[-1])
    saved = load_checkpoint(sorted((in_tmp / "b/checkpoints").iterdir())[-1])
    assert saved["state"]["global_step"] == 256 and saved["state"]["updates"] == 32
    _, state = start(args_for(**flags))
    state.replay.load_state_dict(saved["state"]["replay"])
    assert len(state.replay) == 256
    sac.main(parse_args(sac.Args, sac.PRESETS, ["--resume", "b"]))
    assert_same_run(in_tmp / "a", in_tmp / "b")


def test_an_engine_without_exact_state_resumes_bit_equal_too(in_tmp):
    """Gymnasium's own MuJoCo cannot be saved here: its episodes are cut at every checkpoint, in every run."""
    flags = {"env": "Reacher-v4", "vec": "gymnasium", "checkpoint_every": 1024, "total_timesteps": 2048,
             "updates_per_step": 0.02, "num_envs": 2}  # fmt: skip
    sac.main(args_for(run_dir="a", **flags))
    sac.main(args_for(run_dir="b", **flags))
    assert json.loads((in_tmp / "a/summary.json").read_text())["cut_episodes"] > 0
    (in_tmp / "b/summary.json").unlink()
    shutil.rmtree(sorted((in_tmp / "b/checkpoints").iterdir())[-1])
    sac.main(parse_args(sac.Args, sac.PRESETS, ["--resume", "b"]))
    assert_same_run(in_tmp / "a", in_tmp / "b")


# Steps and updates


@pytest.mark.parametrize("num_envs", [1, 3, 4])
@pytest.mark.parametrize("updates_per_step", [1.0, 0.25, 2.0])
def test_as_many_updates_with_one_as_with_four_environments(num_envs, updates_per_step):
    """After s steps, ⌊(s − 100) × updates_per_step⌋ updates, made at the first vector step at or past each of them."""
    args = args_for(
        env="test/Wide-v0", num_envs=num_envs, updates_per_step=updates_per_step, learning_starts=100,
        total_timesteps=300,
    )  # fmt: skip
    envs, state = start(args)
    calls = []
    while state.global_step < args.total_timesteps:
        sac.collect(state, envs, sac.act, args)
        sac.update(state, lambda *_: calls.append(1) or torch.zeros(len(sac.STATS)), args)
        assert len(calls) == state.updates == max(0, int((state.global_step - 100) * updates_per_step))
    assert len(state.replay) == state.global_step


def test_warm_up_is_uniform_in_the_box_and_ends_at_its_step():
    """Box [0, 4] × [−0.4, 0.4]: means 2 and 0, deviations width/√12. The policy acts from step 3,000 on."""
    args = args_for(env="test/Wide-v0", num_envs=3, learning_starts=3000, total_timesteps=3003)
    envs, state = start(args)
    acted = []

    def act(agent, obs, noise):
        acted.append(state.global_step)
        return sac.act(agent, obs, noise)

    while state.global_step < args.total_timesteps:
        sac.collect(state, envs, act, args)  # the environment refuses actions outside its box
    assert acted == [3000]
    actions = state.replay.sample(20_000, torch.Generator().manual_seed(0)).action
    torch.testing.assert_close(actions.mean(0), torch.tensor([2.0, 0.0]), atol=0.06, rtol=0)
    torch.testing.assert_close(actions.std(0), torch.tensor([4.0, 0.8]) / 12**0.5, atol=0.03, rtol=0)


def test_noise_differs_between_environments_and_dimensions_and_actions_stay_inside():
    """Every environment observes 0: what differs is the noise. Actions are 2 + 2 tanh u and 0.4 tanh u."""
    args = args_for(env="test/Wide-v0", num_envs=64, learning_starts=0, total_timesteps=64)
    envs, state = start(args)
    sac.collect(state, envs, sac.act, args)
    actions = state.replay.sample(4096, torch.Generator().manual_seed(0)).action.unique(dim=0)
    assert len(actions) == 64
    middle, half = torch.tensor([2.0, 0.0]), torch.tensor([2.0, 0.4])
    pre_squash = torch.atanh((actions - middle) / half)  # a warning-free finite number: strictly inside the box
    assert pre_squash.isfinite().all()
    with torch.no_grad():
        policy = state.agent.policy(torch.zeros(1, 1))
    noise = (pre_squash - policy.base.mean) / policy.base.log_std.exp()  # standard normal [64, A]
    assert (noise.mean(0).abs() < 0.5).all() and ((noise.std(0) - 1).abs() < 0.35).all()  # four standard errors
    assert torch.corrcoef(noise.T)[0, 1].abs() < 0.5
    torch.testing.assert_close(policy.mode(), middle + half * torch.tanh(policy.base.mean))


# One update


def textbook_update(agent, optimizers, batch, noise, gamma, tau, target_entropy):
    """Algorithm 1 by torch's own layers, distributions, autograd and optimizers, on a copy of the agent."""
    actor, critics, targets, log_alpha = agent
    half, middle = (HIGH - LOW) / 2, (HIGH + LOW) / 2

    def policy(obs, noise):
        mean, y = actor(obs).chunk(2, -1)
        normal = D.Normal(mean, torch.exp(-5 + 3.5 * (1 + torch.tanh(y))))
        squashed = D.TransformedDistribution(normal, [D.TanhTransform(cache_size=1), D.AffineTransform(middle, half)])
        action = middle + half * torch.tanh(normal.mean + normal.stddev * noise)
        return action, squashed.log_prob(action).sum(-1)

    def q(networks, obs, action):
        return [network(torch.cat([obs, action], -1)).squeeze(-1) for network in networks]

    alpha = log_alpha.exp().detach()
    with torch.no_grad():
        next_action, next_logprob = policy(batch.next_obs, noise[0])
        next_q = torch.min(*q(targets, batch.next_obs, next_action))
        target = batch.reward + gamma * (1 - batch.terminated) * (next_q - alpha * next_logprob)
    q_loss = sum(((value - target) ** 2).mean() / 2 for value in q(critics, batch.obs, batch.action))
    step(optimizers[1], q_loss)
    action, logprob = policy(batch.obs, noise[1])
    step(optimizers[0], (alpha * logprob - torch.min(*q(critics, batch.obs, action))).mean())
    step(optimizers[2], -(log_alpha.exp() * (logprob.detach() + target_entropy)).mean())
    with torch.no_grad():
        for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
            slow.copy_((1 - tau) * slow + tau * fast)


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


LOW, HIGH = torch.tensor([0.0, -0.4], dtype=torch.float64), torch.tensor([4.0, 0.4], dtype=torch.float64)


def made_agent(seed=0, alpha=0.7):
    generator = torch.Generator().manual_seed(seed)
    return sac.Agent(3, LOW.float(), HIGH.float(), (16, 16), alpha, generator)


def made_batch(seed=0, size=12):
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    action = LOW + (HIGH - LOW) * torch.rand(size, 2, generator=generator, dtype=torch.float64)
    terminated = (torch.arange(size) % 3 == 0).double()
    truncated = (torch.arange(size) % 3 == 1).double()  # must make no difference
    rest = torch.full((size,), 0.99, dtype=torch.float64)
    return Batch(draw(size, 3), action, draw(size), draw(size, 3), terminated, truncated, rest), draw(2, size, 2)


def optimizers_of(agent):
    return sac.Adam(agent.actor.parameters()), sac.Adam(agent.critics.parameters()), sac.Adam([agent.log_alpha])


def rates(policy=3e-4, q=1e-3, dtype=torch.float64):
    return torch.tensor(policy, dtype=dtype), torch.tensor(q, dtype=dtype)


def test_five_updates_equal_the_textbooks():
    """In float64, to rounding: batched critics, own Adam, squashed log-prob, target, temperature, slow copies."""
    agent = made_agent().double()
    agent.low.copy_(LOW), agent.high.copy_(HIGH)  # 0.4 in float64, too

    def network(ensemble, member):
        layers = []
        for weight, bias in zip(ensemble.weights, ensemble.biases, strict=True):
            linear = nn.Linear(*weight.shape[1:], dtype=torch.float64)
            linear.load_state_dict({"weight": weight[member].T.detach(), "bias": bias[member, 0].detach()})
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    critics, targets = (
        nn.ModuleList(network(ensemble, member) for member in range(2))
        for ensemble in (agent.critics, agent.target_critics)
    )
    log_alpha = nn.Parameter(agent.log_alpha.detach()[0].clone())
    textbook = (copy.deepcopy(agent.actor), critics, targets, log_alpha)
    theirs = [
        torch.optim.Adam(parameters, lr)
        for parameters, lr in ((textbook[0].parameters(), 3e-4), (critics.parameters(), 1e-3), ([log_alpha], 1e-3))
    ]
    ours = optimizers_of(agent)
    for seed in range(5):
        batch, noise = made_batch(seed)
        sac.update_step(agent, *ours, batch, noise, *rates(), 0.99, 0.005, -2.0)
        textbook_update(textbook, theirs, batch, noise, 0.99, 0.005, -2.0)
    close = functools.partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9)
    for own, other in zip(agent.actor.parameters(), textbook[0].parameters(), strict=True):
        close(own, other)
    for ensemble, networks in ((agent.critics, critics), (agent.target_critics, targets)):
        for member in range(2):
            layers = [layer for layer in networks[member] if isinstance(layer, nn.Linear)]
            for index, layer in enumerate(layers):
                close(ensemble.weights[index][member].T, layer.weight)
                close(ensemble.biases[index][member, 0], layer.bias)
    close(agent.log_alpha[0], log_alpha)
    assert agent.log_alpha.item() != pytest.approx(np.log(0.7), abs=1e-3)  # and has moved


@pytest.mark.parametrize("ended, target", [("truncated", 5.95), ("terminated", 1.0), (None, 5.95)])
def test_truncation_bootstraps_and_termination_does_not(ended, target):
    """r = 1, γ = 0.99, slow critics that say 5 everywhere, hardly any entropy bonus: y = 1 + 0.99 · 5 = 5.95, or 1.

    The critics say 0, so that the loss of the two is 2 · ½ y².
    """
    agent = made_agent(alpha=1e-9)
    with torch.no_grad():
        for ensemble, constant in ((agent.critics, 0.0), (agent.target_critics, 5.0)):
            ensemble.weights[-1].zero_()
            ensemble.biases[-1].fill_(constant)
    batch, noise = made_batch()
    flags = {name: torch.full((12,), float(name == ended)) for name in ("terminated", "truncated")}
    batch = Batch(*(x.float() for x in batch))._replace(reward=torch.ones(12), **flags)
    optimizers = optimizers_of(agent)
    stats = sac.update_step(agent, *optimizers, batch, noise.float(), *rates(dtype=torch.float32), 0.99, 0.005, None)
    assert stats[sac.STATS.index("losses/qf_loss")].item() == pytest.approx(target**2, rel=1e-5)


def test_the_replay_shows_the_true_last_observation_of_a_cut_episode():
    """Count observes 0, 1, 2, its successor 3 is never acted on: next_obs of 2 is 3 and not the reset's 0."""
    args = args_for(env="probe/CountContinuous-v0", num_envs=2, learning_starts=0, total_timesteps=20)
    envs, state = start(args)
    while state.global_step < args.total_timesteps:
        sac.collect(state, envs, sac.act, args)
    batch = state.replay.sample(500, torch.Generator().manual_seed(0))
    assert set(batch.obs.flatten().tolist()) == {0.0, 1.0, 2.0}
    assert torch.equal(batch.next_obs, batch.obs + 1)
    assert torch.equal(batch.truncated, (batch.obs[:, 0] == 2).float()) and not batch.terminated.any()


def test_after_a_cut_episode_the_next_ones_first_observation_is_acted_on():
    """Count shows 0, 1, 2 and then 0 again, never its last successor 3."""
    shown = algo_helpers.acted_on(sac, args_for(env="probe/CountContinuous-v0", num_envs=2), lambda obs: obs[0])
    assert shown == [1, 2, 0, 1, 2]


def test_episodes_that_were_dropped_do_not_run_into_the_new_ones():
    """Cut after two steps in observation 2, and going on in 0: the successor of 1 stays 2, and is a truncation."""
    args = args_for(env="probe/CountContinuous-v0", num_envs=2, learning_starts=0, total_timesteps=20)
    envs, state = start(args)
    for _ in range(2):
        sac.collect(state, envs, sac.act, args)
    state.cut(envs.cut(state.global_step))
    assert (state.obs == 0).all()
    sac.collect(state, envs, sac.act, args)
    batch = state.replay.sample(100, torch.Generator().manual_seed(0))
    assert torch.equal(batch.next_obs, batch.obs + 1) and set(batch.obs.flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(batch.truncated, (batch.obs[:, 0] == 1).float())


def test_the_temperatures_step_leaves_the_policy_alone():
    """Two target entropies move α two ways, by Adam's first step of the learning rate; the policy cannot tell."""
    agents, batch_and_noise = [made_agent(), made_agent()], made_batch()
    batch, noise = Batch(*(x.float() for x in batch_and_noise[0])), batch_and_noise[1].float()
    for agent, target_entropy in zip(agents, (-50.0, 50.0), strict=True):
        optimizers = optimizers_of(agent)
        sac.update_step(agent, *optimizers, batch, noise, *rates(dtype=torch.float32), 0.99, 0.005, target_entropy)
        assert agent.log_alpha.grad is None and all(p.grad is None for p in agent.actor.parameters())
    moved = [agent.log_alpha.item() - np.log(0.7) for agent in agents]
    np.testing.assert_allclose(moved, [-1e-3, 1e-3], rtol=1e-3)  # more entropy than wanted: a lower price
    for one, two in zip(agents[0].actor.parameters(), agents[1].actor.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_fixed_temperature_stays():
    state, metrics = train(args_for(alpha=0.2, total_timesteps=256, updates_per_step=0.25))
    assert all(row["losses/alpha"] == pytest.approx(0.2, rel=1e-6) for row in metrics) and state.updates == 32
    assert state.agent.log_alpha.exp().item() == pytest.approx(0.2, rel=1e-6)


def test_the_core_functions_are_the_ones_that_run(monkeypatch):
    assert sac.soft_q_target is core.soft_q_target and sac.polyak_update is core.polyak_update

    def broken(*_, **__):
        raise ZeroDivisionError

    for name in ("soft_q_target", "polyak_update", "squared_value_loss"):
        monkeypatch.setattr(core, name, broken)
        with pytest.raises(ZeroDivisionError):
            module = load_algorithm("sac")
            args = algo_helpers.args_for(module, total_timesteps=256)
            envs = make_vec(args.env, args.num_envs, args.seed, threads=1)
            state = module.TrainState.create(args, envs)
            while state.global_step < 256:
                module.collect(state, envs, module.act, args)
                module.update(state, module.update_step, args)
        monkeypatch.undo()
    load_algorithm("sac")


@pytest.mark.slow
def test_compiled_equals_eager_over_200_calls():
    """All parameters, all buffers and all optimizers, after 200 updates and the steps between them."""
    args = args_for(total_timesteps=328, updates_per_step=1.0, num_envs=1)
    eager, eager_metrics = train(args)
    compiled, metrics = train(args, compile_function(sac.act, True), compile_function(sac.update_step, True))
    assert len(metrics) == compiled.updates == eager.updates == 200
    initial = start(args)[1].agent.state_dict()
    for name, value in eager.agent.state_dict().items():
        other = compiled.agent.state_dict()[name]
        torch.testing.assert_close(other, value, rtol=2e-3, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")
        assert name in ("low", "high") or not torch.equal(value, initial[name]), f"{name} never moved"
    for name in ("actor_optimizer", "critic_optimizer", "alpha_optimizer"):
        assert getattr(compiled, name).steps.item() == getattr(eager, name).steps.item() == 200
    first, second = eager_metrics[0], metrics[0]
    assert first.keys() == second.keys()
    for tag in first:
        assert second[tag] == pytest.approx(first[tag], rel=1e-3, abs=1e-5), tag


# Probes: the right values are known in closed form (cleanrl_zoo/envs/probes.py)


def trained_on_probe(name, **changes):
    """A small agent after 500 updates at a low price of entropy, whose bonus the values then hardly hold."""
    settings = {"num_envs": 4, "learning_starts": 200, "total_timesteps": 700, "updates_per_step": 1.0, "alpha": 0.01}
    settings |= {"learning_rate": 5e-3, "q_learning_rate": 5e-3, "tau": 0.1, "batch_size": 64}
    return train(args_for(env=f"probe/{name}Continuous-v0", **{**settings, **changes}))[0].agent


@torch.no_grad()
def q_values(agent, obs, action=0.0):
    return agent.critics(torch.tensor([[obs, action]])).flatten().tolist()


@torch.no_grad()
def mean_action(agent, obs):
    return agent.policy(torch.tensor([[obs]])).mode().item()


def test_probe_truncation_is_no_termination():
    """Reward 1 for ever, cut after 10 steps: 1/(1 − 0.9) = 10. Taken for termination, at most 6.5."""
    agent = trained_on_probe("Loop", gamma=0.9)
    assert q_values(agent, 0.0) == pytest.approx([10.0, 10.0], abs=0.5)


def test_probe_delayed_reward():
    agent = trained_on_probe("Delay", gamma=0.5)
    assert q_values(agent, 0.0) == pytest.approx([0.5, 0.5], abs=0.05)
    assert q_values(agent, 1.0) == pytest.approx([1.0, 1.0], abs=0.05)


def test_probe_reward_depends_on_the_observation():
    agent = trained_on_probe("Cue")
    assert q_values(agent, 1.0) == pytest.approx([1.0, 1.0], abs=0.05)
    assert q_values(agent, -1.0) == pytest.approx([-1.0, -1.0], abs=0.05)


def test_probe_reward_depends_on_the_action():
    assert mean_action(trained_on_probe("Choice"), 0.0) == pytest.approx(0.5, abs=0.1)


def test_probe_reward_depends_on_both():
    agent = trained_on_probe("Match")
    assert mean_action(agent, 1.0) == pytest.approx(0.5, abs=0.15)
    assert mean_action(agent, -1.0) == pytest.approx(-0.5, abs=0.15)


def test_the_learned_temperature_brings_the_entropy_to_its_target():
    """From α = 1, which makes the policy nearly uniform (log 2 = 0.69 nats), to −dim A = −1 nat.

    Where the reward is 1 − (a − ½)², a normal policy of that entropy has σ = e^{−1}/√(2πe) = 0.089.
    """
    args = args_for(
        env="probe/ChoiceContinuous-v0", num_envs=4, learning_starts=200, total_timesteps=1000, updates_per_step=1.0,
        learning_rate=5e-3, q_learning_rate=5e-2, batch_size=64,
    )  # fmt: skip
    _, metrics = train(args)
    entropies, alphas = ([row[tag] for row in metrics] for tag in ("losses/entropy", "losses/alpha"))
    assert max(entropies[:20]) > 0 and np.mean(entropies[-40:]) == pytest.approx(-1.0, abs=0.15)
    assert alphas[0] > 0.9 and alphas[-1] < 0.05


# Fingerprint and learning


def test_fingerprint_of_twenty_updates():
    """What 20 updates report. A change needs a reason; this writes the file anew:

    python -c "import sys; sys.path[:0] = ['.', 'tests/algos']; import test_sac as t; t.write_fingerprint()"
    """
    assert_as_recorded(FINGERPRINT, fingerprint(), rtol=2e-3, atol=2e-5)


FINGERPRINT = ROOT / "tests/algos/fingerprints/sac.json"


def fingerprint() -> dict[str, list[float]]:
    rows = []

    def noted(*arguments):
        rows.append(sac.update_step(*arguments))
        return rows[-1]

    train(args_for(num_envs=2, total_timesteps=208, updates_per_step=0.25), update_step=noted)
    table = torch.stack(rows)
    assert len(table) == 20
    return {tag: [round(v, 7) for v in table[:, i].tolist()] for i, tag in enumerate(sac.STATS)}


def write_fingerprint() -> None:
    FINGERPRINT.write_text(json.dumps(fingerprint(), indent=1) + "\n")


LEARN = ("--hidden", "64", "64", "--batch-size", "128", "--total-timesteps", "3500", "--learning-starts", "500",
         "--learning-rate", "3e-3", "--q-learning-rate", "3e-3", "--no-compile")  # fmt: skip
RECORDED = [-232.5, -153.3, -129.7, -303.0, -529.5, -119.8, -531.0, -471.5, -226.0, -263.1]
RANDOM = -1200.0


@pytest.mark.learn
def test_learns_to_swing_the_pendulum_up():
    """Pendulum-v1, 3,500 steps: mean return of ten episodes of the deterministic policy.

    Seeds 101–110 gave RECORDED; the bound is their mean minus two standard deviations. Random actions give −1,200.
    """
    assert learned(seed=1) > np.mean(RECORDED) - 2 * np.std(RECORDED) > 0.5 * RANDOM


def learned(seed: int) -> float:
    args = parse_args(sac.Args, sac.PRESETS, ["--preset", "pendulum", "--seed", str(seed), *LEARN])
    state, _ = train(args)
    mean_action = torch.no_grad()(lambda obs: state.agent.policy(torch.as_tensor(obs)).mode().numpy())
    return float(run_episodes(make_vec(args.env, 10, seed, stream=EVAL_STREAM), mean_action)[0].mean())
