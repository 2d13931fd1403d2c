"""The formulas trace into one graph, built inside the compiled function, and give what eager mode gives."""

import pytest
import torch

from cleanrl_zoo import core


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 8, 3, generator=generator, dtype=torch.float64), torch.rand(8, 3, generator=generator) < 0.2


def credit(x, flag):
    advantages = core.gae(x[0], x[1], x[2], flag, flag, 0.99, 0.95)
    masked = core.gae(x[0], x[1], x[2], flag, flag, 0.99, 0.95, mask=~flag)
    returns = core.lambda_returns(x[0], x[2], flag, flag, 0.99, 0.9)
    return (
        core.normalize(advantages),
        core.normalize(masked, ~flag),
        core.n_step_returns(returns, x[2], flag, flag, 0.9, 3),
    )


def losses(x, flag):
    policy = core.clipped_surrogate(x[0], x[1], x[2], 0.2, 0.28, dual_clip=3.0)
    penalized = core.kl_penalized_surrogate(x[0], x[1], x[2], core.k3(x[1], x[0]), 0.1)
    value = core.squared_value_loss(x[3], x[4]) + core.clipped_value_loss(x[3], x[5], x[4], 0.2)
    target = core.q_target(x[0, :, 0], x[1], flag[:, 0], 0.9)
    return (
        core.aggregate(policy + penalized, ~flag, "sequence_mean"),
        core.aggregate(value + core.policy_gradient(x[0], x[1]), denominator=7),
        core.masked_std(value, ~flag),
        core.explained_variance(x[0], x[1]),
        target,
    )


def distributions(x, flag):
    gaussian, categorical = core.DiagGaussian(x[0], x[1, 0]), core.Categorical(x[2])
    squashed = core.SquashedGaussian(x[0], x[1], -2.0, x[3, 0].abs())
    action, logprob = squashed.sample(noise=x[5])
    draw = categorical.sample(noise=torch.sigmoid(x[4]))
    return (
        gaussian.log_prob(gaussian.sample(noise=x[5]))
        + gaussian.entropy()
        + gaussian.kl(core.DiagGaussian(x[3], x[4])),
        categorical.log_prob(draw) + categorical.entropy() + categorical.kl(core.Categorical(x[3])),
        logprob + squashed.log_prob(action * 0.5),
        squashed.mode(),
        *core.update_moments(x[0, 0], x[1, 0].exp(), torch.ones(1, dtype=torch.float64), x[2]),
    )


@pytest.mark.parametrize("function", [credit, losses, distributions])
def test_one_graph_and_the_eager_result(function):
    x, flag = inputs()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for actual, expected in zip(compiled(x, flag), function(x, flag), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_noise_can_be_drawn_inside_the_graph():
    def draw(mean):
        return core.DiagGaussian(mean, mean).sample(), core.Categorical(mean).sample()

    gaussian, categorical = torch.compile(draw, fullgraph=True, backend="eager")(torch.zeros(5, 3))
    assert gaussian.shape == (5, 3) and categorical.shape == (5,)


def test_polyak_update_inside_the_graph():
    target, online = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    expected = 0.75 * target.weight.detach() + 0.25 * online.weight.detach()
    torch.compile(core.polyak_update, fullgraph=True, backend="eager")(target, online, 0.25)
    torch.testing.assert_close(target.weight.detach(), expected)


def test_a_wrong_shape_still_raises_in_eager_mode_and_when_compiled():
    wrong = torch.zeros(4, 1), torch.zeros(4)
    with pytest.raises(ValueError, match="shapes differ"):
        core.squared_value_loss(*wrong)
    with pytest.raises(Exception, match="shapes differ"):
        torch.compile(core.squared_value_loss, fullgraph=True, backend="eager")(*wrong)
