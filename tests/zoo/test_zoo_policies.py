"""Trained policies: saving, loading, evaluating, recording, and every way a folder can be wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from cleanrl_zoo import zoo
from cleanrl_zoo.envs import EVAL_STREAM, ObsNormalizer, make_vec, run_episodes
from cleanrl_zoo.nn.mlp import mlp

ROOT = Path(__file__).resolve().parents[2]
SPEC = {
    "builder": "mlp",
    "sizes": [4, 8, 1],
    "activation": "tanh",
    "distribution": "diag_gaussian",
    "action_low": [-3.0],
    "action_high": [3.0],
}


def make_policy(spec: dict = SPEC, normalise: bool = True) -> zoo.Policy:
    torch.manual_seed(0)
    obs_norm = None
    if normalise:
        obs_norm = ObsNormalizer((spec["sizes"][0],))
        obs_norm.update(torch.randn(100, spec["sizes"][0], dtype=torch.float64) * 3 + 1)
    log_std = torch.full((spec["sizes"][-1],), -0.5) if spec["distribution"] == "diag_gaussian" else None
    return zoo.Policy(spec, mlp(spec["sizes"], spec["activation"]), log_std, obs_norm)


def make_folder(folder: Path, spec: dict = SPEC, env: str = "InvertedPendulum-v4", **card) -> Path:
    zoo.save(folder, policy=make_policy(spec), card={"env": env, "policy": spec, **card})
    return folder


def command(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    try:
        code = zoo.main(list(words))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_saved_and_loaded_policy_acts_identically_in_a_new_process(tmp_path):
    policy, obs = make_policy(), np.random.default_rng(0).normal(size=(5, 4)) * 4
    zoo.save(tmp_path / "p", policy=policy, card={"env": "InvertedPendulum-v4", "policy": SPEC})
    code = (
        "import sys, json, numpy as np; from cleanrl_zoo import zoo; policy = zoo.load(sys.argv[1]);"
        "print(json.dumps(policy.act(np.array(json.loads(sys.argv[2]))).tolist()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "p", json.dumps(obs.tolist())], capture_output=True, text=True, cwd=ROOT
    )
    assert json.loads(done.stdout) == policy.act(obs).tolist()
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["card.json", "policy.safetensors"]


def test_deterministic_action_is_the_clipped_mean_of_normalised_observations():
    policy = make_policy({**SPEC, "action_low": [-0.01], "action_high": [0.01]})
    obs = np.random.default_rng(1).normal(size=(6, 4))
    scale = policy.obs_norm
    by_hand = (torch.as_tensor(obs, dtype=torch.float32).double() - scale.mean) / torch.sqrt(scale.var + 1e-8)
    mean = policy.network(by_hand.float()).detach().numpy()
    assert np.abs(mean).max() > 0.01
    np.testing.assert_allclose(policy.act(obs), np.clip(mean, -0.01, 0.01), atol=1e-7)


def test_categorical_policy_takes_the_most_likely_action_and_samples_by_probability():
    spec = {"builder": "mlp", "sizes": [4, 2], "activation": "tanh", "distribution": "categorical"}
    policy = make_policy(spec, normalise=False)
    obs = np.repeat(np.random.default_rng(0).normal(size=(1, 4)), 20_000, axis=0)
    probability = policy.network(torch.as_tensor(obs[:1], dtype=torch.float32)).softmax(-1)[0, 1].item()
    assert (policy.act(obs) == int(probability > 0.5)).all()
    samples = policy.act(obs, torch.Generator().manual_seed(0))
    # four standard errors of a share of 20,000 draws: 4·√(¼ / 20,000) = 0.014
    assert samples.mean() == pytest.approx(probability, abs=0.015)


def test_samples_have_the_policys_standard_deviation_and_stay_in_the_box():
    policy = make_policy()
    obs = np.zeros((50_000, 4))
    samples = policy.act(obs, torch.Generator().manual_seed(0))
    assert samples.std() == pytest.approx(np.exp(-0.5), rel=0.02)
    assert np.abs(samples).max() <= 3.0


SQUASHED = {**SPEC, "sizes": [4, 8, 2], "distribution": "squashed_gaussian", "log_std_bounds": [-5.0, 2.0]}


def test_squashed_policy_scales_its_mean_into_the_box(tmp_path):
    """Bounds [0, 4]: 2 + 2 tanh(mean), the mean being the first of the network's two numbers per action."""
    spec = {**SQUASHED, "action_low": [0.0], "action_high": [4.0]}
    policy = zoo.load(make_folder(tmp_path, spec))
    obs = np.random.default_rng(1).normal(size=(6, 4)) * 5
    normalised = policy.obs_norm(torch.as_tensor(obs, dtype=torch.float32))
    mean = policy.network(normalised)[:, :1].numpy()
    np.testing.assert_allclose(policy.act(obs), 2 + 2 * np.tanh(mean), rtol=1e-5)
    assert np.ptp(policy.act(obs)) > 0.5


def test_squashed_samples_have_the_policys_deviation_before_squashing():
    policy, obs = make_policy(SQUASHED, normalise=False), np.full((50_000, 4), 0.3)
    samples = policy.act(obs, torch.Generator().manual_seed(0))
    assert samples.shape == (50_000, 1) and np.abs(samples).max() <= 3.0
    before, output = np.arctanh(samples.astype(float) / 3.0), policy.network(torch.full((1, 4), 0.3))[0]
    log_std = -5.0 + 3.5 * (1 + np.tanh(output[1].item()))
    assert before.std() == pytest.approx(np.exp(log_std), rel=0.02)
    assert before.mean() == pytest.approx(output[0].item(), abs=4 * np.exp(log_std) / np.sqrt(50_000))
    again = policy.act(obs, torch.Generator().manual_seed(0))
    assert np.array_equal(samples, again) and not np.array_equal(samples, policy.act(obs))


def test_squashed_policy_is_evaluated_on_its_own_environment(tmp_path):
    policy = zoo.load(make_folder(tmp_path, SQUASHED))
    assert len(zoo.evaluate(policy, episodes=2)) == 2
    with pytest.raises(ValueError, match="and 3 actions, the policy .* and 1: it was trained on another"):
        policy.card["env"] = "Hopper-v4"
        zoo.evaluate(policy, episodes=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"log_std_bounds": [2.0]}, "lowest and the highest"),
        ({"log_std_bounds": None}, "card and tensors do not describe one policy"),
        ({"action_low": [-3.0, -3.0]}, "one bound per action"),
        ({"sizes": [4, 8, 4]}, "one bound per action"),
    ],
)
def test_a_squashed_policys_card_must_fit(tmp_path, change, told):
    folder = make_folder(tmp_path, SQUASHED)
    edit_card(folder, policy={**SQUASHED, **change})
    with pytest.raises(ValueError, match=told) as error:
        zoo.load(folder)
    assert "\n" not in str(error.value)


def test_a_squashed_policys_card_needs_the_bounds_of_its_deviation(tmp_path):
    with pytest.raises(ValueError, match="lacks 'log_std_bounds'"):
        make_folder(tmp_path, {k: v for k, v in SQUASHED.items() if k != "log_std_bounds"})


def test_the_card_of_each_distribution():
    box, discrete = gymnasium.spaces.Box(-2.0, 3.0, (1,)), gymnasium.spaces.Discrete(2)
    bounds = {"action_low": [-2.0], "action_high": [3.0]}
    common = {"builder": "mlp", "sizes": [4, 8, 2], "activation": "relu"}
    assert zoo.policy_spec([4, 8, 2], "relu", discrete) == {**common, "distribution": "categorical"}
    assert zoo.policy_spec((4, 8, 2), "relu", box) == {**common, **bounds, "distribution": "diag_gaussian"}
    squashed = {"distribution": "squashed_gaussian", "log_std_bounds": [-5.0, 2.0]}
    assert zoo.policy_spec([4, 8, 2], "relu", box, (-5.0, 2.0)) == {**common, **bounds, **squashed}


def test_loaded_policy_is_frozen_and_saving_does_not_freeze_the_trainer(tmp_path):
    trained = make_policy()
    zoo.save(tmp_path, policy=trained, card={"env": "InvertedPendulum-v4", "policy": SPEC})
    assert all(parameter.requires_grad for parameter in trained.parameters())
    policy = zoo.load(tmp_path)
    assert not any(parameter.requires_grad for parameter in policy.parameters())
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    zoo.evaluate(policy, episodes=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_evaluate_runs_one_seeded_episode_per_environment(tmp_path):
    policy = zoo.load(make_folder(tmp_path))
    returns = zoo.evaluate(policy, episodes=3, seed=7)
    envs = make_vec("InvertedPendulum-v4", 3, 7, stream=EVAL_STREAM)
    np.testing.assert_array_equal(returns, run_episodes(envs, policy.act)[0])
    envs.close()


def test_evaluate_command_prints_its_own_number_and_the_cards(tmp_path, capsys):
    make_folder(tmp_path, seed=3, final_eval={"mean": 12.0, "returns": [11.0, 13.0]})
    code, out, err = command(capsys, "evaluate", str(tmp_path), "--episodes", "2", "--seed", "1")
    returns = zoo.evaluate(zoo.load(tmp_path), 2, 1)
    assert (code, err) == (0, "")
    assert f"InvertedPendulum-v4: {returns.mean():.1f} ± {returns.std():.1f} over 2 episodes (seed 1)" in out
    assert "the card says: 12.0 ± 1.0 (2 episodes, seed 3)" in out


def test_names_run_folders_policy_folders_and_zoo_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    committed = make_folder(Path("results/zoo/ppo_continuous/InvertedPendulum-v4"), global_step=1000, seed=2)
    run = make_folder(Path("runs/one/policy")).parent
    assert zoo.find("ppo_continuous/InvertedPendulum-v4") == zoo.find(str(committed)) == committed
    assert zoo.find(str(run)) == zoo.find(str(run / "policy")) == run / "policy"

    code, out, _ = command(capsys, "list")
    assert code == 0 and re.search(r"ppo_continuous/InvertedPendulum-v4 +1000 +2 ", out)
    damaged = make_folder(Path("results/zoo/ppo_continuous/Hopper-v4"))
    (damaged / "policy.safetensors").write_bytes(b"x")
    code, out, _ = command(capsys, "list")
    assert code == 0 and "policy.safetensors is damaged" in out and "InvertedPendulum-v4" in out

    code, _, err = command(capsys, "evaluate", "ppo_continuous/Hoper-v4")
    assert code == 2 and "ppo_continuous/Hopper-v4" in err and err.count("\n") == 1
    (run.parent / "cut").mkdir()
    (run.parent / "cut" / "run.json").write_text("{}")
    code, _, err = command(capsys, "evaluate", "runs/cut")
    assert code == 2 and "--resume" in err and err.count("\n") == 1


def edit_card(folder: Path, **changes) -> None:
    card = json.loads((folder / "card.json").read_text())
    (folder / "card.json").write_text(json.dumps({**card, **changes}))


def swap_tensors(folder: Path) -> None:
    other = make_folder(folder.with_name("other"), {**SPEC, "sizes": [4, 9, 1]})
    (other / "policy.safetensors").replace(folder / "policy.safetensors")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "card.json").unlink(), "no policy here"),
        (lambda f: (f / "card.json").write_text('{"env": '), "card.json is damaged"),
        (lambda f: (f / "card.json").write_text("[]"), "not a policy's card"),
        (lambda f: (f / "policy.safetensors").unlink(), "policy.safetensors cannot be read"),
        (lambda f: (f / "policy.safetensors").write_bytes((f / "policy.safetensors").read_bytes()[:-9]), "is damaged"),
        (swap_tensors, "is not the file that card.json was written with"),
        (lambda f: edit_card(f, policy={**SPEC, "builder": "os.system"}), "known here are mlp"),
        (lambda f: edit_card(f, policy={**SPEC, "sizes": [4, 9, 1]}), "do not describe one policy"),
        (lambda f: edit_card(f, policy={k: v for k, v in SPEC.items() if k != "sizes"}), "lacks 'sizes'"),
        (lambda f: edit_card(f, policy={**SPEC, "action_low": []}), "one bound per action"),
        (lambda f: edit_card(f, env="Hopper-v4"), "trained on another environment"),
        (lambda f: edit_card(f, env="Nowhere-v0"), "Nowhere-v0"),
        (lambda f: edit_card(f, env_kwargs=[1]), '"env_kwargs" is of another form'),
        (lambda f: edit_card(f, provenance=[]), '"provenance" is of another form'),
        (lambda f: edit_card(f, provenance={"env": 1}), '"provenance" is of another form'),
        (lambda f: edit_card(f, final_eval={}), '"final_eval" is of another form'),
        (lambda f: edit_card(f, final_eval={"mean": 1.0, "returns": ["1"]}), '"final_eval" is of another form'),
        (lambda f: edit_card(f, policy={**SPEC, "builder": ["mlp"]}), "known here are mlp"),
    ],
)
def test_damaged_and_foreign_folders_are_told_in_one_line(tmp_path, capsys, damage, told):
    folder = make_folder(tmp_path / "policy")
    damage(folder)
    code, out, err = command(capsys, "evaluate", str(folder), "--episodes", "1")
    assert code == 2 and told in err and err.count("\n") == 1 and out == ""


def test_a_card_may_leave_its_score_open(tmp_path, capsys):
    edit_card(make_folder(tmp_path), final_eval=None, env_kwargs=None)
    code, out, err = command(capsys, "evaluate", str(tmp_path), "--episodes", "1")
    assert (code, err) == (0, "") and "the card says" not in out


MODULE = """
import pathlib
import gymnasium, numpy
pathlib.Path("executed").touch()

class Endless(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), numpy.float32)
    action_space = gymnasium.spaces.Box(-3, 3, (1,), numpy.float32)
    def __init__(self, render_mode=None):
        self.render_mode = render_mode
    def reset(self, *, seed=None, options=None):
        return numpy.zeros(4, numpy.float32), {}
    def step(self, action):
        return numpy.zeros(4, numpy.float32), 1.0, False, False, {}
    def render(self):
        return numpy.zeros((16, 16, 3), numpy.uint8)

gymnasium.register("Endless-v0", Endless)
"""


def test_a_card_runs_no_module_that_was_not_imported_and_a_video_of_an_endless_episode_ends(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(zoo, "LONGEST_VIDEO", 7)
    Path("zoo_test_module.py").write_text(MODULE)
    folder = make_folder(Path("policy"), env="zoo_test_module:Endless-v0")
    video = ("video", str(folder), "--out", "film.gif")
    for words in (("evaluate", str(folder)), video):
        code, _, err = command(capsys, *words)
        assert code == 2 and "--import zoo_test_module" in err and err.count("\n") == 1
    code, _, err = command(capsys, *video, "--import", "no_such_module")
    assert code == 2 and "--import no_such_module: ModuleNotFoundError" in err and err.count("\n") == 1
    assert not Path("executed").exists()
    monkeypatch.setattr(zoo, "find_renderer", lambda env_id: {})
    code, out, _ = command(capsys, *video, "--import", "zoo_test_module")
    assert code == 0 and Path("executed").exists() and "return 7.0" in out
    monkeypatch.delitem(sys.modules, "zoo_test_module")
    gymnasium.registry.pop("Endless-v0")


def test_a_card_that_does_not_fit_the_policy_is_refused_at_saving(tmp_path):
    with pytest.raises(ValueError, match="do not describe one policy"):
        zoo.save(tmp_path / "p", policy=make_policy(), card={"env": "X", "policy": {**SPEC, "sizes": [4, 8, 2]}})
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["evaluate", "{}", "--episodes", "0"], "--episodes must be at least 1"),
        (["evaluate", "{}", "--seed", "-1"], "--seed at least 0"),
        (["video", "{}", "--out", "film.avi"], ".mp4 or .gif"),
        (["video", "{}", "--out", "/nowhere/film.gif"], "does not exist"),
        (["video", "{}"], "--out"),
        (["play", "{}"], "play"),
        (["evaluate", "{}", "--episodes", "many"], "many"),
    ],
)
def test_bad_command_lines_are_one_line_and_exit_code_2(tmp_path, capsys, words, told):
    make_folder(tmp_path)
    code, _, err = command(capsys, *(word.format(tmp_path) for word in words))
    assert code == 2 and told in err and err.count("\n") == 1


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_video_shows_the_first_evaluation_episode_off_screen(tmp_path, capsys, monkeypatch, suffix):
    if suffix == ".mp4":
        pytest.importorskip("imageio_ffmpeg")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    folder, out = make_folder(tmp_path / "policy"), tmp_path / f"film{suffix}"
    code, text, err = command(capsys, "video", str(folder), "--out", str(out), "--seed", "5")
    if code == 2 and "libegl1" in err:
        pytest.skip(err)
    assert code == 0 and err.count("\n") == 1 and err.startswith("recording 1 episode")
    assert float(text.split("return ")[1]) == zoo.evaluate(zoo.load(folder), 1, seed=5)[0]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [out.name]
    assert out.stat().st_size > 1000


def test_without_a_renderer_one_line_names_what_was_tried_and_the_packages(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(zoo, "PROBE", "raise RuntimeError('no display here')")
    code, _, err = command(capsys, "video", str(make_folder(tmp_path / "p")), "--out", str(tmp_path / "film.gif"))
    assert code == 2 and err.count("\n") == 1
    assert all(text in err for text in ("MUJOCO_GL=glfw", "no display here", "libegl1 libgl1", "libosmesa6"))
    assert not (tmp_path / "film.gif").exists()


def test_a_textbook_world_has_no_picture_and_says_so(tmp_path, capsys):
    policy = zoo.table_policy(torch.zeros(48, 4))
    card = {"env": "textbook/CliffWalking-v0", "engine": "tabular", "seed": 1, "policy": policy.spec}
    zoo.save(tmp_path / "p", policy=policy, card=card)
    code, _, err = command(capsys, "video", str(tmp_path / "p"), "--out", str(tmp_path / "film.gif"))
    assert code == 2 and err.count("\n") == 1 and "has no picture to film" in err


def test_a_language_model_is_named_as_one(tmp_path):
    (tmp_path / "policy").mkdir()
    for name in ("run.json", "policy/config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="a language model; transformers loads it"):
        zoo.find(str(tmp_path))
