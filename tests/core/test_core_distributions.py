import math

import pytest
import torch

from cleanrl_zoo.core.distributions import Categorical, DiagGaussian, SquashedGaussian, policy_noise


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def test_categorical_log_prob_broadcasts_size_1_dimensions():
    """p = (¼, ¾) in every row; one action for all rows, and one row for all actions."""
    logits = tensor([0, math.log(3)])
    close(Categorical(logits.expand(4, 2)).log_prob(torch.tensor([1])), [math.log(0.75)] * 4)
    close(Categorical(logits).log_prob(torch.tensor([1, 0, 1])), [math.log(0.75), math.log(0.25), math.log(0.75)])


def test_diag_gaussian_by_hand():
    # mean (0, 1), std (1, 2), action (1, 1): -1/2 - 0 - log 2 - log 2pi
    gaussian = DiagGaussian(tensor([0, 1]), tensor(0, math.log(2)))  # log_std [A] is shared by the rows
    close(gaussian.log_prob(tensor([1, 1])), [-0.5 - math.log(2) - math.log(2 * math.pi)])
    close(gaussian.entropy(), [math.log(2) + 1 + math.log(2 * math.pi)])  # each log sigma + log(2 pi e)/2
    close(gaussian.sample(noise=tensor([3, -1])), [[3, -1]])
    close(gaussian.mode(), [[0, 1]])
    # KL(N(0, 1)||N(1, 4)) = log 2 + (1 + 1)/8 - 1/2
    narrow, wide = DiagGaussian(tensor(0), tensor(0)), DiagGaussian(tensor(1), tensor(math.log(2)))
    close(narrow.kl(wide), math.log(2) - 0.25)
    close(wide.kl(narrow), -math.log(2) + (4 + 1) / 2 - 0.5)
    assert gaussian.kl(gaussian).item() == 0


def test_diag_gaussian_agrees_with_torch():
    generator = torch.Generator().manual_seed(0)
    mean, log_std, action, other_mean, other_log_std = torch.randn(5, 7, 3, generator=generator, dtype=torch.float64)
    ours, other = DiagGaussian(mean, log_std), DiagGaussian(other_mean, other_log_std)
    theirs = torch.distributions.Normal(mean, log_std.exp())
    their_other = torch.distributions.Normal(other_mean, other_log_std.exp())
    close(ours.log_prob(action), theirs.log_prob(action).sum(-1))
    close(ours.entropy(), theirs.entropy().sum(-1))
    close(ours.kl(other), torch.distributions.kl_divergence(theirs, their_other).sum(-1))


def test_entropy_has_one_value_per_row_with_a_shared_log_std():
    assert DiagGaussian(torch.zeros(5, 3), torch.zeros(3)).entropy().shape == (5,)
    assert DiagGaussian(torch.zeros(5, 3), torch.zeros(1, 3)).log_prob(torch.zeros(5, 3)).shape == (5,)


@pytest.mark.parametrize("mean, log_std", [((4, 1), (4,)), ((3,), (3, 1)), ((4, 1), (4, 3)), ((2, 4, 3), (4, 3))])
def test_a_log_std_that_would_widen_the_mean_is_refused(mean, log_std):
    with pytest.raises(ValueError, match="log_std"):
        DiagGaussian(torch.zeros(mean), torch.zeros(log_std))


def test_bounds_that_would_widen_the_mean_are_refused():
    mean = torch.zeros(2, 1)
    for low, high in ((torch.zeros(3), 1.0), (0.0, torch.ones(3)), (0.0, torch.ones(1, 2, 1))):
        with pytest.raises(ValueError, match="low|high"):
            SquashedGaussian(mean, mean, low, high)
    assert SquashedGaussian(mean, mean, torch.zeros(2, 1), torch.ones(1)).mode().shape == (2, 1)


def test_categorical_by_hand():
    # probabilities (1/2, 1/4, 1/4), logits shifted: entropy = log 2 / 2 + 2 log 4 / 4 = 1.5 log 2
    categorical = Categorical(tensor([0.5, 0.25, 0.25]).log() + 5)
    close(categorical.log_prob(torch.tensor([1])), [-math.log(4)])
    close(categorical.entropy(), [1.5 * math.log(2)])
    assert categorical.mode().tolist() == [0]
    # against the uniform one: KL = log 3 - entropy
    close(categorical.kl(Categorical(torch.zeros(1, 3, dtype=torch.float64))), [math.log(3) - 1.5 * math.log(2)])


def test_categorical_excluded_action():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    categorical = Categorical(logits)
    close(categorical.entropy().detach(), [math.log(2)])
    (categorical.entropy() + categorical.log_prob(torch.tensor([2]))).sum().backward()
    assert logits.grad.isfinite().all()
    many = Categorical(logits.detach().expand(1000, 3)).sample(generator=torch.Generator().manual_seed(0))
    assert set(many.tolist()) == {0, 2}
    assert Categorical(logits.detach()).sample(noise=torch.zeros(1, 3)).tolist() != [1]


def test_sampling_frequencies():
    # 100,000 draws: the standard error of a frequency is at most .0016, of the mean .0032, of the std .0022
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.tensor([0.7, 0.2, 0.1])
    draws = Categorical(probabilities.log().expand(100_000, 3)).sample(generator=generator)
    frequencies = torch.bincount(draws, minlength=3) / 100_000
    torch.testing.assert_close(frequencies, probabilities, rtol=0, atol=0.007)
    draws = DiagGaussian(torch.full((100_000, 1), 3.0), torch.tensor([0.0])).sample(generator=generator)
    assert abs(draws.mean().item() - 3) < 0.014 and abs(draws.std().item() - 1) < 0.01


def test_noise_from_outside_equals_the_generators_own():
    mean, log_std = torch.randn(4, 2), torch.randn(4, 2)
    noise = torch.randn(4, 2, generator=torch.Generator().manual_seed(5))
    uniform = torch.rand(4, 2, generator=torch.Generator().manual_seed(5))
    gaussian, categorical = DiagGaussian(mean, log_std), Categorical(mean)
    squashed = SquashedGaussian(mean, log_std, -1.0, 1.0)

    def again():
        return torch.Generator().manual_seed(5)

    assert torch.equal(gaussian.sample(noise), gaussian.sample(generator=again()))
    assert torch.equal(categorical.sample(uniform), categorical.sample(generator=again()))
    for one, other in zip(squashed.sample(noise), squashed.sample(generator=again()), strict=True):
        assert torch.equal(one, other)


def test_policy_noise_added_to_outputs_samples_from_the_policy():
    """As `sample` does with noise of the same stream; and in 10⁵ draws p = (½, ⅓, ⅙) within 5 standard errors."""
    shape, outputs = (5, 3), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    log_std = torch.tensor([-1.0, 0.0, 0.5], requires_grad=True)
    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(2):
        sample = outputs + policy_noise(shape, log_std, first)
        assert torch.equal(sample, DiagGaussian(outputs, log_std).sample(generator=second)) and not sample.requires_grad
        chosen = (outputs + policy_noise(shape, None, first)).argmax(-1)
        assert torch.equal(chosen, Categorical(outputs).sample(generator=second))
    probability = torch.tensor([1 / 2, 1 / 3, 1 / 6])
    drawn = (probability.log() + 7 + policy_noise((100_000, 3), None, first)).argmax(-1)
    error = drawn.bincount() / 100_000 - probability
    assert (error.abs() < 5 * (probability * (1 - probability) / 100_000).sqrt()).all()


def test_squashed_gaussian_by_hand():
    # Box(0, 4), N(0, 1): u = 0 is action 2, log-prob -log(2 pi)/2 - log 2: the half-width scales the density
    squashed = SquashedGaussian(tensor([0]), tensor([0]), tensor(0), tensor(4))
    expected = -0.5 * math.log(2 * math.pi) - math.log(2)
    action, logprob = squashed.sample(noise=tensor([0]))
    close(action, [[2]])
    close(logprob, [expected])
    close(squashed.log_prob(tensor([2])), [expected])
    close(squashed.mode(), [[2]])
    # KL is that of the normal distributions: mean 1 against 0
    other = SquashedGaussian(tensor([1]), tensor([0]), tensor(0), tensor(4))
    close(other.kl(squashed), [0.5])


def test_squashed_density_integrates_to_one():
    # two bounds and widths per dimension; trapezoids over 20,001 actions of each
    low, high = tensor(-1, 2), tensor(3, 2.5)
    share = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    for dimension in range(2):
        squashed = SquashedGaussian(tensor([0.3]), tensor([-0.5]), low[dimension : dimension + 1], high[dimension])
        actions = low[dimension] + (high - low)[dimension] * share
        density = squashed.log_prob(actions.unsqueeze(-1)).exp()
        assert torch.trapezoid(density, actions).item() == pytest.approx(1, abs=1e-4)


def test_squashed_sample_and_log_prob_agree():
    generator = torch.Generator().manual_seed(3)
    mean, log_std = torch.randn(2, 50, 2, generator=generator, dtype=torch.float64)
    squashed = SquashedGaussian(mean, log_std - 1, tensor(0, -3), tensor(4, 5))
    action, logprob = squashed.sample(generator=generator)
    torch.testing.assert_close(squashed.log_prob(action), logprob, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_out_samples_agree_with_float64(dtype):
    # u = 20, noise 0, bounds +-2: log-prob = -log(2 pi)/2 - log 2 - log(1 - tanh^2 20), and
    # 1 - tanh^2 u = 4 e^{-2u} / (1 + e^{-2u})^2, so its log is log 4 - 40 to 1e-17. Gradient in the mean: 2 tanh u = 2.
    for sign in (1, -1):
        mean = torch.tensor([[20.0 * sign]], dtype=dtype, requires_grad=True)
        squashed = SquashedGaussian(mean, torch.zeros(1, 1, dtype=dtype), -2.0, 2.0)
        action, logprob = squashed.sample(noise=torch.zeros(1, 1, dtype=dtype))
        expected = -0.5 * math.log(2 * math.pi) - math.log(2) - math.log(4) + 40
        assert logprob.item() == pytest.approx(expected, abs=1e-9 if dtype == torch.float64 else 1e-5)
        assert action.item() == 2 * sign
        logprob.sum().backward()
        assert mean.grad.item() == pytest.approx(2 * sign, abs=1e-6)


def test_log_prob_of_actions_at_and_beyond_the_bounds_is_finite():
    mean = torch.zeros(4, 1, requires_grad=True)
    log_std = torch.zeros(4, 1, requires_grad=True)
    action = torch.tensor([[0.1], [-0.3], [5.0], [-5.0]], requires_grad=True)
    logprob = SquashedGaussian(mean, log_std, -0.3, 0.1).log_prob(action)
    logprob.sum().backward()
    for x in (logprob, mean.grad, log_std.grad, action.grad):
        assert x.isfinite().all()


def test_squashed_actions_stay_inside_awkward_bounds():
    # in float32, -1.2 + (0.1 - -1.2) lies above 0.1
    low, high = torch.tensor([-1.2, 0.1]), torch.tensor([0.1, 0.7])
    squashed = SquashedGaussian(torch.tensor([[50.0, 50.0], [-50.0, -50.0]]), torch.zeros(2), low, high)
    action, _ = squashed.sample()
    assert ((action >= low) & (action <= high)).all()


def test_a_column_of_actions_is_refused():
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        Categorical(torch.zeros(4, 3)).log_prob(torch.zeros(4, 1))
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        DiagGaussian(torch.zeros(4, 3), torch.zeros(3)).log_prob(torch.zeros(3))
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        SquashedGaussian(torch.zeros(4, 3), torch.zeros(3), -1.0, 1.0).log_prob(torch.zeros(3))
