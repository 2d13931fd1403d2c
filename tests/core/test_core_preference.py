import math

import pytest
import torch

from cleanrl_zoo import core
from cleanrl_zoo.core.preference import bradley_terry, dpo, hinge, ipo, kto, orpo, preference_accuracy, simpo

PAIRED = {
    "dpo": lambda *x: dpo(*x, beta=0.1),
    "ipo": lambda *x: ipo(*x, beta=0.1),
    "hinge": lambda *x: hinge(*x, beta=0.1),
}


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def close(actual, expected, atol=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def evaluated(function, *inputs, **settings):
    """What `function` gives, and the gradient of the loss's sum in each of the inputs (None: it has none)."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, **settings)
    loss = out[0] if isinstance(out, tuple) else out
    gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    rewards = out[1:] if isinstance(out, tuple) else ()
    assert not any(reward.requires_grad for reward in rewards)
    return loss.detach(), list(rewards), list(gradients)


# Two pairs. The policy's log-probs −4, −7 | −2, −3, the reference's −5, −6 | −2, −3: h = (1 − −1) = 2 | 0
CHOSEN, REJECTED = vector(-4, -2), vector(-7, -3)
REF_CHOSEN, REF_REJECTED = vector(-5, -2), vector(-6, -3)
FOUR = (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)


def test_dpo_by_hand():
    """β ½: z = 1 | 0, −log σ; the slope in the chosen log-prob is −β σ(−z), in the rejected one the opposite."""
    loss, rewards, gradients = evaluated(dpo, *FOUR, beta=0.5)
    close(loss, [math.log(1 + math.exp(-1)), math.log(2)])
    close(rewards[0], [0.5, 0])
    close(rewards[1], [-0.5, 0])
    slope = vector(-0.5 * sigmoid(-1), -0.25)
    for gradient, expected in zip(gradients, (slope, -slope, -slope, slope), strict=True):
        close(gradient, expected)


def test_dpo_at_zero_margin_is_log_2_whatever_the_log_probs():
    for level in (0.0, -3.0, -1e4):
        same = torch.full((3,), level)
        loss, chosen, rejected = dpo(same, same - 5, same, same - 5, beta=0.1)
        assert loss.tolist() == pytest.approx([0.693147180559945] * 3, rel=1e-6)
        assert chosen.tolist() == rejected.tolist() == [0, 0, 0]


def test_label_smoothing_by_hand():
    """ε .2, z 1: −.8 log σ(1) − .2 log σ(−1); slope in z: −.8 σ(−1) + .2 σ(1). ε ½ at z 0: log 2, slope 0."""
    loss, _, gradients = evaluated(dpo, *FOUR, beta=0.5, label_smoothing=0.2)
    close(loss, [-0.8 * log_sigmoid(1) - 0.2 * log_sigmoid(-1), math.log(2)])
    close(gradients[0], [0.5 * (-0.8 * sigmoid(-1) + 0.2 * sigmoid(1)), 0.5 * (-0.8 + 0.2) / 2])
    mirrored, *_ = dpo(*FOUR, beta=0.5, label_smoothing=1.0)
    swapped, *_ = dpo(REJECTED, CHOSEN, REF_REJECTED, REF_CHOSEN, beta=0.5)
    close(mirrored, swapped)
    with pytest.raises(ValueError, match="label_smoothing is 1.5"):
        dpo(*FOUR, beta=0.5, label_smoothing=1.5)


def test_offset_is_taken_from_the_margin():
    """β ½, offset ¼ | 2: z = ¾ | −2; one number for both: z = ¾ | −¼. The rewards do not know of it."""
    loss, rewards, gradients = evaluated(dpo, *FOUR, beta=0.5, offset=vector(0.25, 2))
    close(loss, [-log_sigmoid(0.75), -log_sigmoid(-2)])
    close(gradients[0], [-0.5 * sigmoid(-0.75), -0.5 * sigmoid(2)])
    close(rewards[0], [0.5, 0])
    for offset in (0.25, torch.tensor(0.25, dtype=torch.float64)):
        close(dpo(*FOUR, beta=0.5, offset=offset)[0], [-log_sigmoid(0.75), -log_sigmoid(-0.25)])


def test_ipo_by_hand():
    """β ¼, so that h is pulled to 2: (2 − 2)², (0 − 2)²; slope 2(h − 2). β 1: to ½: 2.25, ¼."""
    loss, rewards, gradients = evaluated(ipo, *FOUR, beta=0.25)
    close(loss, [0, 4])
    close(gradients[0], [0, -4])
    close(gradients[1], [0, 4])
    close(rewards[0] - rewards[1], [0.5, 0])
    close(ipo(*FOUR, beta=1.0)[0], [2.25, 0.25])
    with pytest.raises(ValueError, match="beta is 0"):
        ipo(*FOUR, beta=0.0)


def test_hinge_by_hand():
    """β ¼: 1 − ½, 1; slope −β. β 1: 1 − 2 < 0, so 0 without a slope, and 1."""
    loss, _, gradients = evaluated(hinge, *FOUR, beta=0.25)
    close(loss, [0.5, 1])
    close(gradients[0], [-0.25, -0.25])
    loss, _, gradients = evaluated(hinge, *FOUR, beta=1.0)
    close(loss, [0, 1])
    close(gradients[0], [0, -1])


def test_simpo_by_hand():
    """−4 over 2 tokens, −7 over 7: means −2, −1; −2 over 2, −3 over 1: −1, −3. β 2, γ ½: z = 2·(−1) − ½ | 2·2 − ½."""
    lengths = vector(2, 2), vector(7, 1)
    loss, rewards, gradients = evaluated(
        lambda w, lose: simpo(w, lose, *lengths, beta=2.0, gamma=0.5), CHOSEN, REJECTED
    )
    close(loss, [-log_sigmoid(-2.5), -log_sigmoid(3.5)])
    close(rewards[0], [-4, -2])
    close(rewards[1], [-2, -6])
    close(gradients[0], [-sigmoid(2.5) * 2 / 2, -sigmoid(-3.5) * 2 / 2])
    close(gradients[1], [sigmoid(2.5) * 2 / 7, sigmoid(-3.5) * 2])
    whole = simpo(CHOSEN, REJECTED, torch.tensor([2, 2]), torch.tensor([7, 1]), 2.0, 0.5)  # lengths as counts
    close(whole[0], loss)
    assert simpo(vector(0), vector(-1), vector(0), vector(1), 1.0, 0.0)[0].isfinite().all()  # an empty completion


def test_orpo_by_hand():
    """p ½ against ¼: odds 1 and 1/3, log odds ratio log 3, −log σ(log 3) = log(4/3). λ ½.

    The slope in ℓ_w is −λ σ(−log 3)/(1 − p_w) = −½ · ¼ · 2, in ℓ_l ½ · ¼ · 4/3."""
    loss, rewards, gradients = evaluated(orpo, vector(0.5).log(), vector(0.25).log(), lambda_=0.5)
    close(loss, [0.5 * math.log(4 / 3)])
    close(gradients[0], [-0.25])
    close(gradients[1], [1 / 6])
    close(rewards[0] - rewards[1], [0.5 * math.log(2)])
    # not the ratio of the probabilities, which would give −log σ(log 2) = log(3/2)
    assert abs(loss.item() - 0.5 * math.log(1.5)) > 0.05


def test_orpo_near_and_at_probability_one():
    """ℓ = −1e-12: log odds = −log(1e-12) = 27.631; both at 1: no difference."""
    loss, _, gradients = evaluated(orpo, vector(math.log(0.5)), vector(-1e-12), lambda_=1.0)
    close(loss, [12 * math.log(10)])
    close(gradients[0], [-2])  # −σ(27.6)/(1 − ½)
    for dtype in (torch.float32, torch.float64):
        zero, low = torch.zeros(1, dtype=dtype), torch.full((1,), -1e4, dtype=dtype)
        for one, two in ((zero, zero), (zero, low), (low, zero), (low, low)):
            loss, _, gradients = evaluated(orpo, one, two, lambda_=1.0)
            assert loss.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
        assert orpo(zero, zero, 1.0)[0].item() == pytest.approx(math.log(2))
        assert orpo(low, zero, 1.0)[0].item() > 1e4 and orpo(zero, low, 1.0)[0].item() == 0


def test_kto_by_hand():
    """t = 1 | −1 | 1 | −1, z0 ½, β 2. Good ones: 1 − σ(2(t − ½)) = σ(−1), σ(3); bad: 1 − σ(2(½ − t)) = σ(1), σ(−3).

    λ_D 3, λ_U ½; the slope of λσ(∓β(t − z0)) is ∓λβ σ'(…), σ' = σ(1 − σ)."""
    logprob, ref = vector(-4, -6, -4, -6), vector(-5, -5, -5, -5)
    settings = {"desirable": torch.tensor([1, 1, 0, 0]).bool(), "kl": 0.5, "beta": 2.0}
    weights = {"desirable_weight": 3.0, "undesirable_weight": 0.1}
    loss, (reward,), gradients = evaluated(kto, logprob, ref, **settings, **weights)
    close(loss, [3 * sigmoid(-1), 3 * sigmoid(3), 0.1 * sigmoid(1), 0.1 * sigmoid(-3)])
    close(reward, [2, -2, 2, -2])
    one, three = 2 * sigmoid(1) * sigmoid(-1), 2 * sigmoid(3) * sigmoid(-3)
    close(gradients[0], [-3 * one, -3 * three, 0.1 * one, 0.1 * three])
    as_numbers = kto(logprob, ref, **{**settings, "desirable": vector(1, 1, 0, 0)}, **weights)
    close(as_numbers[0], loss)
    # no −log σ(β log-ratio): that would grow without end where the loss here ends at λ
    far = kto(vector(-1e4), vector(0), torch.tensor([True]), 0.0, 1.0)
    close(far[0], [1])


def test_the_baseline_of_kto_is_never_negative_and_has_no_gradient():
    kl = vector(0.5).sum().requires_grad_()
    logprob = vector(0.0).requires_grad_()
    good = torch.tensor([True])
    loss, _ = kto(logprob, vector(0), good, kl, 1.0)
    close(loss.detach(), [sigmoid(0.5)])
    loss.sum().backward()
    assert kl.grad is None and logprob.grad is not None
    for below in (-3.0, torch.tensor(-3.0, dtype=torch.float64), vector(-3)):
        close(kto(vector(0), vector(0), good, below, 1.0)[0], [0.5])


def test_bradley_terry_by_hand():
    """Scores 2, 1 | 0, 0: −log σ(1), log 2; margin 3: −log σ(−2), −log σ(−3). c .01: + .01 · 3², slope −σ(−1) + .06."""
    chosen, rejected = vector(2, 0), vector(1, 0)
    loss, _, gradients = evaluated(bradley_terry, chosen, rejected)
    close(loss, [-log_sigmoid(1), math.log(2)])
    close(gradients[0], [-sigmoid(-1), -0.5])
    close(gradients[1], [sigmoid(-1), 0.5])
    close(bradley_terry(chosen, rejected, margin=3.0), [-log_sigmoid(-2), -log_sigmoid(-3)])
    close(bradley_terry(chosen, rejected, margin=vector(3, 0)), [-log_sigmoid(-2), math.log(2)])
    loss, _, gradients = evaluated(bradley_terry, chosen, rejected, center_coef=0.01)
    close(loss, [-log_sigmoid(1) + 0.09, math.log(2)])
    close(gradients[0], [-sigmoid(-1) + 0.06, -0.5])
    close(gradients[1], [sigmoid(-1) + 0.06, 0.5])


def test_accuracy_counts_a_tie_as_half():
    chosen, rejected = vector(1, 0, 2, 2), vector(0, 1, 2, 2 + 1e-7)
    close(preference_accuracy(chosen, rejected), [1, 0, 0.5, 0])
    close(preference_accuracy(chosen, rejected, tolerance=1e-6), [1, 0, 0.5, 0.5])
    close(preference_accuracy(chosen, rejected, tolerance=vector(2, 0, 0, 0)), [0.5, 0, 0.5, 0])
    assert preference_accuracy(torch.zeros(3), torch.zeros(3)).tolist() == [0.5] * 3


@pytest.mark.parametrize("name", PAIRED)
def test_very_unlikely_completions_stay_exact(name):
    """A policy that is its reference up to ±1: at −10⁴, in float32, the same as near 0. ±10⁴ apart all is finite."""
    function = PAIRED[name]
    shift = torch.full((2,), -1e4)
    chosen, rejected = torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 2.0])
    zero = torch.zeros(2)
    far = function(shift + chosen, shift + rejected, shift, shift)
    near = function(chosen, rejected, zero, zero)
    for one, two in zip(far, near, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=0)
    for one, two in ((zero, shift), (shift, zero)):
        loss, _, gradients = evaluated(function, one, two, zero, zero)
        assert loss.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
    if name == "dpo":  # −log σ(−1000) = 1000, slope −β
        loss, _, gradients = evaluated(function, shift, zero, zero, zero)
        assert loss.tolist() == [1000, 1000] and gradients[0].tolist() == pytest.approx([-0.1, -0.1])


@pytest.mark.parametrize("name", PAIRED)
def test_shapes_that_do_not_fit_are_refused(name):
    row, column = torch.zeros(2), torch.zeros(2, 1)
    for place in range(4):
        inputs = [row] * 4
        inputs[place] = column
        with pytest.raises(ValueError, match="different numbers of dimensions") as caught:
            PAIRED[name](*inputs)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="do not broadcast"):
        PAIRED[name](row, row, row, torch.zeros(3))


def test_the_other_losses_refuse_shapes_that_do_not_fit():
    row, column = torch.zeros(2), torch.zeros(2, 1)
    for call in (
        lambda: dpo(row, row, row, row, 0.1, offset=column),
        lambda: simpo(row, row, row + 1, column + 1, 2.0, 0.5),
        lambda: orpo(row, column, 0.1),
        lambda: kto(row, row, column, 0.0, 0.1),
        lambda: kto(row, row, row, column, 0.1),
        lambda: bradley_terry(row, column),
        lambda: bradley_terry(row, row, margin=column),
        lambda: preference_accuracy(row, column),
    ):
        with pytest.raises(ValueError, match="different numbers of dimensions"):
            call()


def test_they_are_public():
    names = ("bradley_terry", "dpo", "hinge", "ipo", "kto", "orpo", "preference_accuracy", "simpo")
    assert all(getattr(core, name).__module__ == "cleanrl_zoo.core.preference" for name in names)
    assert set(names) <= set(core.__all__)
