"""MBPO: what it imagines and from where, its schedule, its batches, its updates, and what it recorded."""

import functools
import json
import shutil

import algo_helpers
import pytest
import torch
from algo_helpers import ROOT, assert_as_recorded, assert_same_run, final_checkpoint, load_algorithm

from cleanrl_zoo.data.replay import Batch
from cleanrl_zoo.nn import load_model
from cleanrl_zoo.run import compile_function, parse_args

mbpo = load_algorithm("mbpo")
args_for, start = (functools.partial(f, mbpo) for f in (algo_helpers.args_for, algo_helpers.start_off_policy))
ENV = "cartpole/Balance-v0"


def never(obs):
    return torch.zeros(obs.shape[:-1], dtype=torch.bool)


def speak_constants(model, changes, reward=5.0):
    """Member e predicts the reward and the change `changes[e]` of every observed number, almost without noise."""
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.zero_()
        outputs = len(model.min_logvar)
        model.network.biases[-1][:, 0, 0] = reward
        model.network.biases[-1][:, 0, 1:outputs] = torch.tensor(changes).unsqueeze(1)
        model.network.biases[-1][:, 0, outputs:] = -1e6
        model.min_logvar.fill_(-40.0)


def collected(steps=40, changes=(0.0, 0.0, 0.0), **settings):
    """The state after random steps, with a model that speaks constants."""
    args = args_for(env=ENV, learning_starts=150, total_timesteps=192, **settings)
    envs, state = start(args)
    for _ in range(steps):
        mbpo.collect(state, envs, mbpo.act, args)
    speak_constants(state.model, changes)
    return args, envs, state


def imagined_rows(state):
    """obs, action, reward, next_obs, terminated of all imagined rows."""
    dims, actions = state.obs.shape[-1], len(state.agent.low)
    return state.imagined.rows.split([dims, actions, 1, dims, 1], -1)


# What is imagined


@pytest.mark.parametrize("rows_at_once", [2048, 40, 7])
def test_rows_are_dealt_to_the_elites_alone_in_equal_shares(monkeypatch, rows_at_once):
    """Three members, of which 2 and 0 are elites: they change the observation by 2 and by 0, half of the rows each,
    also where they do not fill the last chunk; the rows start in states that were really seen."""
    monkeypatch.setattr(mbpo, "ROWS", rows_at_once)
    args, _, state = collected(changes=(0.0, 1.0, 2.0), rollouts_per_step=2, rollout_length=(0, 1, 3, 3))
    state.model.elites.copy_(torch.tensor([2, 0]))
    mbpo.imagine(state, mbpo.imagine_step, never, args)
    obs, _, reward, next_obs, terminated = imagined_rows(state)
    changes = (next_obs - obs).round()
    assert len(obs) == 3 * 128 and (reward - 5.0).abs().max() < 1e-3 and not terminated.any()
    for step in changes.view(3, 128, -1):
        assert [(step == change).all(-1).sum().item() for change in (0.0, 1.0, 2.0)] == [64, 0, 64]
    seen = state.replay.sample(2000, torch.Generator().manual_seed(0)).obs
    assert {tuple(row) for row in obs[:128].tolist()} <= {tuple(row) for row in seen.tolist()}
    torch.testing.assert_close(
        next_obs[:256].sort(0).values, obs[128:].sort(0).values
    )  # each step begins where one ended
    met = ((next_obs[256:, 0] - obs[:128, 0].mean()) / 2).round()  # how often member 2 led here, of three steps
    assert {1.0, 2.0} <= set(met.tolist())  # a row does not stay with its member


def test_a_row_that_ended_is_not_continued():
    """Every step adds 1 to the angle; above 2.5 it has ended: after three steps, of which the last is a termination."""
    args, _, state = collected(changes=(1.0, 1.0, 1.0), rollouts_per_step=1, rollout_length=(0, 1, 5, 5))
    metrics = mbpo.imagine(state, mbpo.imagine_step, lambda obs: obs[..., 2] > 2.5, args)
    *_, terminated = imagined_rows(state)
    assert len(terminated) == 3 * 64 and terminated.view(3, 64).mean(1).tolist() == [0.0, 0.0, 1.0]
    assert metrics["charts/rollout_length"] == 5 and metrics["charts/rollout_survival"] == 0.0


def test_half_of_the_rows_end_and_half_go_on():
    args, _, state = collected(changes=(0.0, 1.0, 0.0), rollouts_per_step=1, rollout_length=(0, 1, 2, 2))
    state.model.elites.copy_(torch.tensor([0, 1]))
    metrics = mbpo.imagine(state, mbpo.imagine_step, lambda obs: obs[..., 2] > 0.5, args)
    *_, terminated = imagined_rows(state)
    assert len(terminated) == 64 + 32 and terminated[:64].sum() == 32
    assert metrics["charts/rollout_survival"] == (32 - terminated[64:].sum()) / 64


@pytest.mark.parametrize(
    "step, length",
    [(0, 1), (20_000, 1), (25_000, 1), (25_999, 2), (30_000, 2), (60_000, 8), (99_999, 14), (100_000, 15), (10**6, 15)],
)
def test_the_rollouts_grow_as_the_schedule_says(step, length):
    """20 100 1 15: 1 + (epoch − 20)/80 · 14, rounded down, epochs of 1000 steps: at 25 1.875, at 25.999 2.05, at 30
    2.75, at 60 8, at 99.999 14.9998."""
    assert mbpo.horizon(step, (20, 100, 1, 15)) == length


def test_rollouts_really_have_the_length_of_their_time():
    args, _, state = collected(rollouts_per_step=1, rollout_length=(0, 1, 1, 11))
    for step, length in ((0, 1), (100, 2), (550, 6)):
        state.global_step = step
        assert mbpo.imagine(state, mbpo.imagine_step, never, args)["charts/rollout_length"] == length
        assert state.imagined.sizes[-1] == 64 * length


def test_imagined_transitions_are_kept_for_so_many_steps():
    args, _, state = collected(rollouts_per_step=1, model_retain=130)
    for _ in range(5):
        mbpo.imagine(state, mbpo.imagine_step, never, args)
    assert state.imagined.sizes == [64, 64]  # 130 real steps are two fits of 64 each


# Batches


@pytest.mark.parametrize("share, real", [(0.05, 12), (0.0, 0), (1.0, 256), (0.5, 128)])
def test_the_first_rows_of_a_batch_are_real(share, real):
    """0.05 · 256 = 12.8, rounded down. The model pays 5, the environment 1."""
    args, _, state = collected(real_share=share, batch_size=256)
    mbpo.imagine(state, mbpo.imagine_step, never, args)
    batches = mbpo.mixed_batches(state, 3, args)
    assert len(batches) == 3
    for batch in batches:
        torch.testing.assert_close(batch.reward, torch.tensor([1.0] * real + [5.0] * (256 - real)), rtol=0, atol=1e-3)
        assert (batch.discount == args.gamma).all() and not batch.truncated.any()
        for name, width in (("obs", (4,)), ("action", (1,)), ("reward", ()), ("next_obs", (4,)), ("terminated", ())):
            assert getattr(batch, name).shape == (256, *width)


def test_after_a_cut_episode_the_next_ones_first_observation_is_acted_on():
    """Count shows 0, 1, 2 and then 0 again, never its last successor 3."""
    shown = algo_helpers.acted_on(mbpo, args_for(env="probe/CountContinuous-v0", num_envs=2), lambda obs: obs[0])
    assert shown == [1, 2, 0, 1, 2]


def test_a_truncation_is_not_a_termination():
    """Count shows 0, 1, 2 and is cut after 3: the successor of 2 is 3, not the reset's 0, and goes on."""
    args = args_for(env="probe/CountContinuous-v0", real_share=1.0, batch_size=64, learning_starts=50, num_envs=2)
    envs, state = start(args)
    for _ in range(15):
        mbpo.collect(state, envs, mbpo.act, args)
    (batch,) = mbpo.mixed_batches(state, 1, args)
    assert set(batch.obs.flatten().tolist()) == {0.0, 1.0, 2.0} and not batch.terminated.any()
    assert torch.equal(batch.next_obs, batch.obs + 1)
    state.model_data.commit(torch.Generator())
    assert (state.model_data.targets[:, 1] == 1.0).all()  # the model learns the true change as well


def made_agent(seed=0):
    low, high = torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0])
    return mbpo.Agent(3, low, high, (16, 16), torch.Generator().manual_seed(seed))


def made_batch(terminated=0.0, truncated=0.0, size=12):
    draw = torch.Generator().manual_seed(0)
    numbers = [torch.randn(size, width, generator=draw) for width in (3, 2, 3)]
    flags = (torch.full((size,), terminated), torch.full((size,), truncated), torch.full((size,), 0.99))
    batch = Batch(numbers[0], numbers[1].tanh(), torch.ones(size), numbers[2], *flags)
    return batch, torch.randn(2, size, 2, generator=draw)


def updated(agent, batch, noise, target_entropy=-1.0, real=3):
    optimizers = (
        mbpo.Adam(agent.actor.parameters()),
        mbpo.Adam(agent.critics.parameters()),
        mbpo.Adam([agent.log_alpha]),
    )
    rate = torch.tensor(1e-3)
    stats = mbpo.update_step(agent, *optimizers, batch, noise, rate, 0.99, 0.005, target_entropy, real)
    return dict(zip(mbpo.STATS, stats.tolist(), strict=True))


@pytest.mark.parametrize("ended, target", [("truncated", 5.95), ("terminated", 1.0), (None, 5.95)])
def test_only_a_termination_stops_the_bootstrap(ended, target):
    """r = 1, γ = 0.99, slow critics that say 5, no bonus: y = 1 + 0.99 · 5 = 5.95, or 1. The critics say 0: loss y²."""
    agent = made_agent()
    with torch.no_grad():
        agent.log_alpha.fill_(-20.0)
        for ensemble, constant in ((agent.critics, 0.0), (agent.target_critics, 5.0)):
            ensemble.weights[-1].zero_(), ensemble.biases[-1].fill_(constant)
    batch, noise = made_batch(**({ended: 1.0} if ended else {}))
    assert updated(agent, batch, noise)["losses/qf_loss"] == pytest.approx(target**2, rel=1e-5)


def test_values_of_real_and_imagined_transitions_are_told_apart():
    """Critics that say the observation's first number: the mean of the first three rows, and that of the other nine."""
    agent = made_agent()
    batch, noise = made_batch()
    with torch.no_grad():
        q_value = agent.critics(torch.cat([batch.obs, batch.action], -1)).squeeze(-1)  # [2, B]
    stats = updated(agent, batch, noise, real=3)
    assert stats["losses/qf_real"] == pytest.approx(q_value[:, :3].mean().item(), rel=1e-5)
    assert stats["losses/qf_model"] == pytest.approx(q_value[:, 3:].mean().item(), rel=1e-5)


def test_the_temperatures_step_leaves_the_policy_alone():
    """Two target entropies move α two ways; the policy cannot tell, and holds no gradient."""
    agents, (batch, noise) = [made_agent(), made_agent()], made_batch()
    for agent, target_entropy in zip(agents, (-50.0, 50.0), strict=True):
        updated(agent, batch, noise, target_entropy)
        assert all(parameter.grad is None for parameter in agent.actor.parameters())
    assert agents[0].log_alpha.item() == pytest.approx(-1e-3, rel=1e-3)  # more entropy than wanted: a lower price
    assert agents[1].log_alpha.item() == pytest.approx(1e-3, rel=1e-3)
    for one, two in zip(agents[0].actor.parameters(), agents[1].actor.parameters(), strict=True):
        assert torch.equal(one, two)


def test_updates_fall_due_with_real_steps():
    """From step 150 on, 2.5 per step: none before, then 25 after ten steps."""
    args, envs, state = collected(updates_per_step=2.5)
    state.fits = 1
    mbpo.imagine(state, mbpo.imagine_step, never, args)
    counts = []
    while state.global_step < 160:
        mbpo.collect(state, envs, mbpo.act, args)
        mbpo.update(state, mbpo.update_step, args)
        counts.append(state.updates)
    assert counts[-11:] == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22, 25]


@pytest.mark.slow
def test_compiled_equals_eager():
    """Fits, imagination and updates of a whole run."""
    states = []
    for compiled in (False, True):
        args, envs, state = collected(steps=0, updates_per_step=1.0)
        functions = (mbpo.act, mbpo.update_step, mbpo.fit_step, mbpo.imagine_step)
        act, update_step, fit_step, imagine_step = (compile_function(function, compiled) for function in functions)
        while state.global_step < 192:
            mbpo.collect(state, envs, act, args)
            if state.global_step in (150, 170):
                mbpo.fit_model(state, fit_step, args)
                mbpo.imagine(state, imagine_step, never, args)
            mbpo.update(state, update_step, args)
        states.append(state)
    assert states[0].updates == states[1].updates == 42
    for name in ("agent", "model"):
        one, other = (getattr(state, name).state_dict() for state in states)
        for key in one:
            torch.testing.assert_close(other[key], one[key], rtol=2e-3, atol=2e-4, msg=lambda m, key=key: f"{key}: {m}")


# Whole runs


def run_main(*flags):
    mbpo.main(parse_args(mbpo.Args, mbpo.PRESETS, ["--preset", "debug", "--env", ENV, *flags]))


def test_a_run_that_was_cut_goes_on_with_both_buffers_and_the_ensemble(in_tmp):
    run_main("--run-dir", "whole")
    saved = final_checkpoint(in_tmp / "whole")
    for part in (
        "imagined/rows",
        "model_data/bootstrap",
        "model_data/holdout",
        "model/elites",
        "model_optimizer/steps",
    ):
        assert f"/state/{part}" in saved
    assert any(key.startswith("/state/replay/") for key in saved)
    # as if killed after the last checkpoint but one
    shutil.copytree(in_tmp / "whole", in_tmp / "cut")
    (in_tmp / "cut/summary.json").unlink()
    for name in ("policy", "model"):
        shutil.rmtree(in_tmp / "cut" / name)
    shutil.rmtree(sorted((in_tmp / "cut/checkpoints").iterdir())[-1])
    mbpo.main(parse_args(mbpo.Args, mbpo.PRESETS, ["--resume", "cut"]))
    assert_same_run(in_tmp / "whole", in_tmp / "cut")
    for name in ("model.safetensors", "episodes.safetensors"):
        assert (in_tmp / "whole/model" / name).read_bytes() == (in_tmp / "cut/model" / name).read_bytes()
    saved = load_model(in_tmp / "whole/model")
    returns = json.loads((in_tmp / "whole/summary.json").read_text())["final_eval"]["returns"]
    assert [len(obs) for obs, _ in saved.episodes] == returns  # 1 per step
    assert saved.card["model"]["members"] == 3 and len(saved.model.elites) == 2


def test_nan_in_a_prediction_stops_the_run_and_names_the_step(in_tmp, capsys, monkeypatch):
    """The second fit, at step 128, gives every member a NaN."""

    def spoiled(model, *arguments, **named):
        found = mbpo_fit(model, *arguments, **named)
        calls.append(1)
        if len(calls) == 2:
            with torch.no_grad():
                model.network.biases[-1][:, 0, 0] = torch.nan
        return found

    mbpo_fit, calls = mbpo.fit, []
    monkeypatch.setattr(mbpo, "fit", spoiled)
    with pytest.raises(SystemExit) as stop:
        run_main("--run-dir", "run")
    err = capsys.readouterr().err
    assert stop.value.code == 1 and "Traceback" not in err
    assert "a prediction of the model holds NaN or Inf at step 127" in err
    assert not (in_tmp / "run/summary.json").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--elites", "4"], ["--elites 4", "at most --members 3"]),
        (["--rollout-length", "5", "5", "1", "1"], ["--rollout-length 5 5 1 1", "a < b"]),
        (["--rollout-length", "0", "5", "3", "1"], ["--rollout-length 0 5 3 1", "x <= y"]),
        (["--model-retain", "10"], ["--model-retain 10", "at least --model-every 64"]),
        (["--learning-starts", "5"], ["--learning-starts 5", "at least 10"]),
        (["--real-share", "1.5"], ["--real-share 1.5", "at most 1"]),
        (["--env", "CartPole-v1"], ["CartPole-v1", "actions must be a flat Box"]),
        (["--env", "probe/LoopContinuous-v0"], ["its termination is not known"]),
    ],
    ids=" ".join,
)
def test_refused_in_one_line(in_tmp, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        run_main(*flags)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and all(word in err for word in words), err
    assert list(in_tmp.iterdir()) == []


# Fingerprint


def test_fingerprint_of_two_fits_and_twenty_updates():
    """What they report. A change needs a reason; this writes the file anew:

    python -c "import sys; sys.path[:0] = ['.', 'tests/algos']; import test_mbpo as t; t.write_fingerprint()"
    """
    assert_as_recorded(FINGERPRINT, fingerprint(), rtol=2e-3, atol=2e-4)


FINGERPRINT = ROOT / "tests/algos/fingerprints/mbpo.json"


def fingerprint() -> dict[str, list[float]]:
    args = args_for(env=ENV, updates_per_step=1.0, learning_starts=64, total_timesteps=84, model_every=10)
    envs, state = start(args)
    ended, table = mbpo.termination(ENV), {}

    def note(values):
        for tag, value in values.items():
            table.setdefault(tag, []).append(round(float(value), 6))

    while state.global_step < args.total_timesteps:
        mbpo.collect(state, envs, mbpo.act, args)
        if state.global_step in (64, 74):
            note(mbpo.fit_model(state, mbpo.fit_step, args))
            note(mbpo.imagine(state, mbpo.imagine_step, ended, args))
        note(mbpo.update(state, mbpo.update_step, args))
    assert state.updates == 20
    return table


def write_fingerprint() -> None:
    FINGERPRINT.write_text(json.dumps(fingerprint(), indent=1) + "\n")
