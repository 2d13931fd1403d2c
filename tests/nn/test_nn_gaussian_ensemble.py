"""The ensemble of Gaussians: what it identifies, its likelihood by hand, its bounds, elites, and how it is trained."""

import numpy as np
import pytest
import torch

from cleanrl_zoo.nn import Adam, GaussianEnsemble, fit, fit_step, load_model, negative_log_likelihood, save_model


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def constant_model(means, raw_logvars, **settings):
    """Members whose networks give these numbers for every input: means and raw log-variances [E, out]."""
    means, raw_logvars = torch.tensor(means), torch.tensor(raw_logvars)
    model = GaussianEnsemble(len(means), 2, means.shape[1], (4,), generator=generator(), **settings)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.zero_()
        model.network.biases[-1].copy_(torch.cat([means, raw_logvars], -1).unsqueeze(1))
    return model


# What it predicts


def test_likelihood_and_bounds_by_hand():
    """Raw 0 between the bounds −10 and ½, by softplus: ½ − log(1 + e^½) = −0.474077, and from there
    −10 + log(1 + e^9.525923) = −0.474004. With that log-variance v and mean 1, the truth 2:
    −log p = ½·1·e^{−v} + ½v + ½ log 2π = 0.803204 − 0.237002 + 0.918939 = 1.485141. The other column's mean is the
    truth: −0.237002 + 0.918939 = 0.681937. Sum 2.167078."""
    model = constant_model([[1.0, -3.0]], [[0.0, 0.0]])
    prediction = model(torch.randn(5, 2, generator=generator()))
    torch.testing.assert_close(2 * prediction.log_std, torch.full((1, 5, 2), -0.474004))
    nll = negative_log_likelihood(prediction, torch.tensor([2.0, -3.0]).expand(1, 5, 2))
    torch.testing.assert_close(nll, torch.full((1, 5), 2.167078))


def test_log_variances_stay_between_the_bounds_however_far_off_the_network_is():
    """The lower softplus adds log(1 + e^{−10.5}) = 2.8e-5 to the upper bound."""
    model = constant_model([[0.0, 0.0]], [[-1e6, 1e6]])
    logvar = 2 * model(torch.zeros(1, 2)).log_std
    torch.testing.assert_close(logvar, torch.tensor([[[-10.0, 0.5 + 2.8e-5]]]), rtol=0, atol=1e-5)
    with torch.no_grad():
        model.max_logvar.fill_(-1.0)
    assert 2 * model(torch.zeros(1, 2)).log_std[0, 0, 1].item() == pytest.approx(-1.0, abs=2e-4)


def test_predict_asks_the_members_it_is_told():
    model = constant_model([[0.0], [1.0], [2.0]], [[0.0], [0.0], [0.0]])
    means = model.predict(torch.zeros(2, 4, 2), torch.tensor([2, 0])).mean
    assert means.flatten(1).tolist() == [[2.0] * 4, [0.0] * 4]


def test_a_linear_gaussian_system_is_identified():
    """y = Ax + b + N(0, σ²): every member finds A, b and σ of each column, from 4,000 rows."""
    a, b = torch.tensor([[1.0, -2.0], [0.5, 0.0], [0.0, 3.0]]), torch.tensor([0.3, -1.0])
    sigma = torch.tensor([0.5, 0.3])
    draw = generator(1)
    inputs = torch.tensor([1.0, 5.0, 1.0]) * torch.randn(5000, 3, generator=draw) + torch.tensor([0.0, 10.0, 0.0])
    targets = inputs @ a + b + sigma * torch.randn(5000, 2, generator=draw)
    model = GaussianEnsemble(3, 3, 2, (), generator=generator(2))
    optimizer = Adam(model.parameters())
    rows, bootstrap = torch.arange(5000), torch.randint(4000, (3, 4000), generator=draw)
    for rate in (0.1, 0.01, 0.001):
        fit(model, optimizer, inputs, targets, bootstrap, rows[4000:], draw, rate, max_epochs=40)
    with torch.no_grad():
        middle = torch.tensor([[0.0, 10.0, 0.0]])
        mean = model(torch.cat([middle, middle + torch.eye(3)])).mean  # [E, 4, 2]
        std = model(inputs[:100]).log_std.exp().mean(1)  # [E, 2]
    # a coefficient's own uncertainty is √2·σ/√n = 0.7/63 = 0.011; rows drawn with replacement give the √2
    assert (mean[:, 1:] - mean[:, :1] - a).abs().max() < 0.05
    assert (mean[:, 0] - middle @ a - b).abs().max() < 0.05
    torch.testing.assert_close(std, sigma.expand(3, 2), rtol=0.1, atol=0)


def test_scaled_targets_are_learned_as_if_they_had_been_scaled_before():
    """The same weights, and predictions in the targets' own unit."""
    draw = generator(3)
    inputs = torch.randn(100, 2, generator=draw)
    targets = torch.stack([0.01 * inputs[:, 0], 5 + 100 * inputs[:, 1]], -1)
    standard = (targets - targets.mean(0)) / targets.std(0, correction=0)
    bootstrap, holdout = torch.randint(80, (2, 80), generator=draw), torch.arange(80, 100)
    models, errors = [], []
    for scaled, learned in ((True, targets), (False, standard)):
        model = GaussianEnsemble(2, 2, 2, (8,), generator=generator(), scale_targets=scaled)
        fitted = fit(model, Adam(model.parameters()), inputs, learned, bootstrap, holdout, generator(4), max_epochs=5)
        models.append(model), errors.append(fitted.holdout_error)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(errors[0], errors[1], rtol=1e-3, atol=1e-6)
    own = models[0](inputs)
    torch.testing.assert_close(own.mean, targets.mean(0) + targets.std(0, correction=0) * models[1](inputs).mean,
                               rtol=1e-3, atol=1e-3)  # fmt: skip
    assert own.log_std[..., 0].exp().max() < 0.02 and own.log_std[..., 1].exp().min() > 1


def test_a_constant_input_is_not_scaled():
    model = GaussianEnsemble(2, 2, 1, (4,), generator=generator())
    model.normalise(torch.tensor([[1.0, 7.0], [3.0, 7.0]]), torch.zeros(2, 1))
    assert model.input_mean.tolist() == [2.0, 7.0] and model.input_std.tolist() == [1.0, 1.0]
    model.normalise(torch.tensor([[0.0, 7.0], [8.0, 7.0]]), torch.zeros(2, 1))
    assert model.input_std.tolist() == [4.0, 1.0]


# How it is trained


def scripted(changes):
    """A step that adds changes[call][member] to that member's last bias, instead of learning."""
    calls = iter(changes)

    def step(model, optimizer, inputs, targets, decay, learning_rate):
        with torch.no_grad():
            model.network.biases[-1][:, 0, 0] += torch.tensor(next(calls))
        return torch.zeros(model.members)

    return step


def fit_constants(model, step, **settings):
    """Targets of 0: a member's error is the square of the number that it predicts. One step per epoch."""
    rows = torch.zeros(20, 2)
    return fit(
        model, Adam(model.parameters()), rows, torch.zeros(20, 1), torch.zeros(model.members, 10, dtype=torch.int64),
        torch.arange(10, 20), generator(), step=step, **settings,
    )  # fmt: skip


def test_elites_are_those_of_the_lowest_holdout_error():
    model = constant_model([[3.0], [-1.0], [2.0], [0.5]], [[0.0]] * 4, elites=2)
    fitted = fit_constants(model, None, max_epochs=0)
    assert fitted.holdout_error.tolist() == [9.0, 1.0, 4.0, 0.25] and fitted.epochs == 0
    assert model.elites.tolist() == [3, 1]


def test_each_member_keeps_the_weights_of_its_own_best_epoch():
    """Predictions by epoch: the first member 4 → 2 → 1 → 3 → 3, best after two; the second 1 → 2 → 3 → 0.5 → 5, best
    after three; the third only gets worse. Two epochs without a better member end it: after five."""
    model = constant_model([[4.0], [1.0], [1.0]], [[0.0]] * 3, elites=1)
    step = scripted([[-2.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [2.0, -2.5, 1.0], [0.0, 4.5, 1.0], [0.0, 0.0, 1.0]])
    fitted = fit_constants(model, step, patience=2)
    assert fitted.epochs == 5 and fitted.holdout_error.tolist() == [1.0, 0.25, 1.0]
    assert model(torch.zeros(1, 2)).mean.flatten().tolist() == [1.0, 0.5, 1.0]
    assert model.elites.tolist() == [1]


def test_an_improvement_of_less_than_one_percent_counts_as_none():
    """Errors 1 → 0.995² = 0.990 (better by 1 %, just not enough) → 0.99² = 0.98 (2 % better than the best)."""
    model = constant_model([[1.0]], [[0.0]])
    fitted = fit_constants(model, scripted([[-0.004], [-0.006], [1.0]]), patience=1)
    assert fitted.epochs == 1 and fitted.holdout_error.tolist() == [1.0]
    model = constant_model([[1.0]], [[0.0]])
    assert fit_constants(model, scripted([[-0.01], [1.0]]), patience=1).epochs == 2


def test_nothing_to_learn_from_or_to_hold_out_is_refused():
    model = GaussianEnsemble(2, 2, 1, (4,), generator=generator())
    optimizer, rows, none = Adam(model.parameters()), torch.zeros(5, 2), torch.zeros(2, 0, dtype=torch.int64)
    some = torch.zeros(2, 4, dtype=torch.int64)
    for bootstrap, holdout in ((none, torch.tensor([0])), (some, torch.tensor([], dtype=torch.int64))):
        with pytest.raises(ValueError, match="rows to learn from"):
            fit(model, optimizer, rows, rows[:, :1], bootstrap, holdout, generator())
    with pytest.raises(ValueError, match="1 weight decays for 2 layers"):
        fit(model, optimizer, rows, rows[:, :1], some, torch.tensor([4]), generator(), decay=[0.1])
    with pytest.raises(ValueError, match="3 elites of 2 members"):
        GaussianEnsemble(2, 2, 1, (4,), elites=3)


def test_members_trained_together_equal_members_trained_alone():
    """The same minibatches in the same order, in float64. The bounds of the variances are shared, so that they are
    put back after each step."""
    together = GaussianEnsemble(3, 3, 2, (8, 8), generator=generator()).double()
    alone = []
    for member in range(3):
        model = GaussianEnsemble(1, 3, 2, (8, 8)).double()
        with torch.no_grad():
            for own, shared in zip(model.network.parameters(), together.network.parameters(), strict=True):
                own.copy_(shared[member : member + 1])
        alone.append(model)
    models = [together, *alone]
    optimizers = [Adam(model.parameters()) for model in models]
    rate, decay = torch.tensor(1e-2, dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    draw = generator(5)
    for _ in range(20):
        inputs = torch.randn(3, 16, 3, generator=draw, dtype=torch.float64)
        targets = torch.randn(3, 16, 2, generator=draw, dtype=torch.float64)
        losses = [fit_step(together, optimizers[0], inputs, targets, decay, rate)]
        for member, (model, optimizer) in enumerate(zip(alone, optimizers[1:], strict=True)):
            rows = slice(member, member + 1)
            losses.append(fit_step(model, optimizer, inputs[rows], targets[rows], decay, rate))
        torch.testing.assert_close(losses[0], torch.cat(losses[1:]))
        with torch.no_grad():
            for model in models:
                model.min_logvar.fill_(-10.0), model.max_logvar.fill_(0.5)
    for name, shared in together.network.named_parameters():
        for member, model in enumerate(alone):
            torch.testing.assert_close(shared[member], model.network.get_parameter(name)[0], rtol=1e-9, atol=1e-12)


# On the disk


def test_a_saved_model_predicts_the_same_and_damage_is_told(tmp_path):
    model = GaussianEnsemble(3, 4, 2, (8, 8), elites=2, generator=generator(), scale_targets=True)
    model.normalise(torch.randn(10, 4), 3 * torch.randn(10, 2))
    model.elites.copy_(torch.tensor([2, 0]))
    played = [(np.arange(6.0).reshape(3, 2), np.ones((3, 1), np.float32)), (np.zeros((2, 2)), np.zeros((2, 1)))]
    save_model(tmp_path, model, played, {"env": "Some-v0"})
    found, episodes, card = load_model(tmp_path)
    inputs = torch.randn(5, 4)
    assert torch.equal(found(inputs).mean, model(inputs).mean) and torch.equal(found.elites, model.elites)
    assert card["env"] == "Some-v0" and not any(p.requires_grad for p in found.parameters())
    assert [[x.shape for x in episode] for episode in episodes] == [[(3, 2), (3, 1)], [(2, 2), (2, 1)]]
    assert torch.equal(episodes[0][0], torch.arange(6.0).view(3, 2))
    other = GaussianEnsemble(3, 4, 2, (8, 8), elites=2, generator=generator(1), scale_targets=True)
    save_model(tmp_path / "other", other, played, {})
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "other/model.safetensors").read_bytes())
    for problem in ("is not the file that model.json was written with", "cannot be read"):
        with pytest.raises(ValueError, match=problem) as error:
            load_model(tmp_path)
        assert "\n" not in str(error.value)
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
