"""What world_model.py measures of a model, against models whose errors are known, and what it draws."""

import json

import pytest
import torch
import world_model

from cleanrl_zoo.nn import GaussianEnsemble, save_model


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def linear_model(changes, sigma, elites=None):
    """Member e: the observed number changes by `changes[e]` · action, with deviation `sigma`."""
    model = GaussianEnsemble(len(changes), 2, 1, (), elites=elites, generator=generator())
    with torch.no_grad():
        model.network.weights[0].zero_()
        model.network.weights[0][:, 1, 0] = torch.tensor(changes)
        model.min_logvar.fill_(-40.0), model.max_logvar.fill_(40.0)
        model.network.biases[0].copy_(torch.tensor([0.0, 2 * torch.tensor(sigma).log()]))
    return model


def walk(count, length, sigma, seed=1):
    """Episodes of s' = s + a + N(0, σ²)."""
    draw = generator(seed)
    actions = torch.randn(count, length, 1, generator=draw)
    steps = actions + sigma * torch.randn(count, length, 1, generator=draw)
    obs = torch.cat([torch.zeros(count, 1, 1), steps.cumsum(1)[:, :-1]], 1)
    return list(zip(obs, actions, strict=True))


def measured(model, episodes, horizon, particles=50):
    obs, actions = world_model.windows(episodes, horizon, 400)
    return world_model.measure(
        world_model.imagine(model, "test/Walk-v0", obs, actions, particles, generator()), torch.ones(1)
    )


def test_windows_stay_inside_episodes_and_are_spread_evenly():
    """Lengths 4 and 3: windows of 2 steps begin at 0 and 1, and at 0."""
    episodes = [
        (torch.arange(4.0).view(4, 1), torch.zeros(4, 1)),
        (10 + torch.arange(3.0).view(3, 1), torch.ones(3, 1)),
    ]
    obs, actions = world_model.windows(episodes, 2, 100)
    assert obs[..., 0].T.tolist() == [[0, 1, 2], [1, 2, 3], [10, 11, 12]]
    assert actions[..., 0].T.tolist() == [[0, 0], [0, 0], [1, 1]]
    assert world_model.windows(episodes, 2, 2)[0][0].flatten().tolist() == [0, 10]
    with pytest.raises(ValueError, match="--horizon 4: the longest episode has 4 steps; give at most 3"):
        world_model.windows(episodes, 4, 10)


def test_a_model_that_is_right_errs_by_the_noise_and_knows_it():
    """After h steps error and spread are √h·σ: 0.1, 0.2 after four. Its intervals hold their share."""
    errors = measured(linear_model([1.0, 1.0], 0.1), walk(40, 50, 0.1), 4)
    for values in (errors.error, errors.spread):
        assert values[0].item() == pytest.approx(0.1, rel=0.1) and values[3].item() == pytest.approx(0.2, rel=0.12)
    assert errors.members.max() < 0.06  # means of 50 particles each: 0.2/√50
    for step in range(4):
        assert errors.inside[0.5][step].item() == pytest.approx(0.5, abs=0.1)
        assert errors.inside[0.9][step].item() == pytest.approx(0.9, abs=0.06)
    assert errors.still[0].item() == pytest.approx(1.0, abs=0.15)  # √(1 + σ²), of 400 of the steps


def test_a_model_that_is_too_sure_is_found_out():
    """With half of the true deviation the intervals reach to 0.34 and 0.82 deviations: 26 % and 59 % of the truths."""
    errors = measured(linear_model([1.0, 1.0], 0.05), walk(40, 50, 0.1), 1)
    assert errors.inside[0.5].item() == pytest.approx(0.26, abs=0.08)
    assert errors.inside[0.9].item() == pytest.approx(0.59, abs=0.09)


def test_only_the_elites_are_asked_and_their_disagreement_is_told():
    """Elites that move by 1 and 3 times the action, around a truth of 1: the mean errs by |a|, they lie |a| to each
    side of it, and without noise each keeps its way: both grow alike. The third member's 100 is not asked."""
    model = linear_model([1.0, 3.0, 100.0], 1e-9, elites=2)
    episodes = [(torch.arange(30.0).view(30, 1), torch.ones(30, 1))]
    errors = measured(model, episodes, 3)
    expected = torch.tensor([[1.0], [2.0], [3.0]])
    for values in (errors.error, errors.members):
        torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-3)


def folder_of_a_run(tmp_path, **tags):
    save_model(tmp_path / "model", linear_model([1.0, 1.0], 0.1), walk(2, 40, 0.1),
               {"algorithm": "pets", "env": "test/Walk-v0", "seed": 1, "global_step": 80})  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({"algorithm": "pets", "args": {}, "provenance": {}}))
    rows = [{"global_step": step, "model/error_0": 0.1, "model/error_1": 0.2, **tags} for step in (40, 80)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("tags", [{}, {"losses/qf_real": 1.0, "losses/qf_model": 2.0, "charts/model_share": 0.95}])
def test_four_figures_and_a_page(tmp_path, capsys, tags):
    run = folder_of_a_run(tmp_path, **tags)
    assert world_model.main([str(run), "--horizon", "10", "--windows", "20"]) == 0
    out = run / "world_model"
    figures = ("error.png", "calibration.png", "trajectories.png", "training.png")
    assert {path.name for path in out.iterdir()} == {*figures, "README.md"}
    assert all((out / name).stat().st_size > 5000 for name in figures)
    page = (out / "README.md").read_text()
    assert "# The model of pets on test/Walk-v0, seed 1" in page and all(f"({name})" in page for name in figures)
    assert ("losses/qf_real" in page) == bool(tags)
    line = next(line for line in page.splitlines() if line.startswith("| 1 |"))
    assert float(line.split("|")[2]) > 0 and "%" in line
    assert "after 1 step" in capsys.readouterr().out


@pytest.mark.parametrize(
    "spoil, flags, words",
    [
        (None, ["--horizon", "99"], "the longest episode has 40 steps; give at most 39"),
        (None, ["--particles", "0"], "--particles 0: must be at least 1"),
        ("run.json", [], "run.json"),
        ("model/model.json", [], "a run writes it when it ends"),
        ("metrics.jsonl", [], "metrics.jsonl"),
    ],
)
def test_what_cannot_be_looked_at_is_told_in_one_line(tmp_path, capsys, spoil, flags, words):
    run = folder_of_a_run(tmp_path)
    if spoil:
        (run / spoil).unlink()
    with pytest.raises(SystemExit) as stop:
        world_model.main([str(run), *flags])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and words in err
    assert not (run / "world_model").exists()
