import pytest
import torch

from cleanrl_zoo.core.returns import bilevel_gae, discounted_returns, gae, lambda_returns, n_step_returns


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def random_inputs(steps, num_envs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn(3, steps, num_envs, generator=generator, dtype=torch.float64)
    ends = torch.rand(2, steps, num_envs, generator=generator) < 0.15
    terminated = ends[0]
    return rewards, values, next_values, terminated, terminated | ends[1]


def test_gae_bootstraps_a_truncation_from_the_final_observation():
    # r = 1, V = 0, gamma .9, lambda 1, V(final) = 10; the reset observation's value, 100, must appear nowhere.
    # Truncated: A2 = 1 + .9*10 = 10, A1 = 1 + .9*10 = 10, A0 = 10. Terminated: A2 = 1, A1 = 1 + .9 = 1.9, A0 = 2.71.
    # Next episode's step has value 100 and its own end; it must not leak backwards.
    rewards, values = column(1, 1, 1, 0), column(0, 0, 0, 100)
    next_values, done = column(0, 0, 10, 0), column(0, 0, 1, 1)
    close(gae(rewards, values, next_values, column(0, 0, 0, 1), done, 0.9, 1.0)[:3], [10, 10, 10])
    close(gae(rewards, values, next_values, column(0, 0, 1, 1), done, 0.9, 1.0)[:3], [2.71, 1.9, 1])


def test_gae_by_hand():
    # gamma = lambda = 1/2. delta = (1 + 5/2 - 4, 2 + 6/2 - 5, 3 + 8/2 - 6) = (-1/2, 0, 1)
    # A2 = 1, A1 = 0 + 1/4, A0 = -1/2 + 1/16
    rewards, values, next_values = column(1, 2, 3), column(4, 5, 6), column(5, 6, 8)
    none = column(0, 0, 0)
    close(gae(rewards, values, next_values, none, none, 0.5, 0.5), [-0.4375, 0.25, 1])
    # truncated after step 1 with V' = 2: delta1 = 2 + 1 - 5 = -2 = A1, A0 = -1/2 - 2/4
    next_values = column(5, 2, 8)
    close(gae(rewards, values, next_values, none, column(0, 1, 0), 0.5, 0.5), [-1, -2, 1])
    # terminated there: delta1 = 2 - 5 = -3 = A1, A0 = -1/2 - 3/4
    close(gae(rewards, values, next_values, column(0, 1, 0), column(0, 1, 0), 0.5, 0.5), [-1.25, -3, 1])


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 64, 100])
def test_gae_equals_the_plain_recursion(steps):
    rewards, values, next_values, terminated, done = random_inputs(steps, 3)
    expected, following = torch.zeros_like(rewards), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(steps)):
        delta = rewards[t] + 0.97 * (~terminated[t]).double() * next_values[t] - values[t]
        following = delta + 0.97 * 0.9 * (~done[t]).double() * following
        expected[t] = following
    close(gae(rewards, values, next_values, terminated, done, 0.97, 0.9), expected)


def test_identities_between_estimators():
    rewards, values, next_values, terminated, done = random_inputs(20, 4)
    args = (next_values, terminated, done, 0.9)
    td = rewards + 0.9 * (~terminated).double() * next_values
    close(gae(rewards, values, *args, 0.0), td - values)
    close(lambda_returns(rewards, *args, 0.0), td)
    close(lambda_returns(rewards, *args, 1.0), discounted_returns(rewards, *args))
    close(n_step_returns(rewards, *args, 1), td)
    close(n_step_returns(rewards, *args, 20), discounted_returns(rewards, *args))
    close(n_step_returns(rewards, *args, 500), discounted_returns(rewards, *args))
    # Where next_values are the shifted values (free where an episode ends), GAE is a return minus the value.
    shifted = torch.cat((values[1:], next_values[-1:]))
    args = (torch.where(done, next_values, shifted), terminated, done, 0.9)
    close(gae(rewards, values, *args, 1.0), discounted_returns(rewards, *args) - values)
    close(gae(rewards, values, *args, 0.7), lambda_returns(rewards, *args, 0.7) - values)


def test_lambda_returns_by_hand_with_gradient_and_soft_continues():
    # gamma = lambda = 1/2: G1 = 2 + 6/2 = 5, G0 = 1 + (4 + (5 - 4)/2)/2 = 3.25
    rewards, next_values = column(1, 2).requires_grad_(), column(4, 6).requires_grad_()
    none = column(0, 0)
    returns = lambda_returns(rewards, next_values, none, none, 0.5, 0.5)
    close(returns.detach(), [3.25, 5])
    # dG0: r0 1, r1 gamma*lambda = 1/4, V'0 gamma(1-lambda) = 1/4, V'1 gamma*lambda*gamma = 1/8
    returns[0].backward()
    close(rewards.grad, [1, 0.25])
    close(next_values.grad, [0.25, 0.125])
    # continue probability 1/2 at step 0: G0 = 1 + 1/2 * 1/2 * 4.5
    soft = column(0.5, 0)
    close(lambda_returns(rewards.detach(), next_values.detach(), soft, soft, 0.5, 0.5), [2.125, 5])
    # and at the last step: G1 = 2 + 1/2 * 1/2 * 6
    soft = column(0, 0.5)
    close(lambda_returns(rewards.detach(), next_values.detach(), soft, soft, 0.5, 0.5)[1], 3.5)
    # r = (1, 1, 1), everything 1, V = 0: three steps to go, two, one
    ones, zeros = column(1, 1, 1), column(0, 0, 0)
    close(lambda_returns(ones, zeros, zeros, zeros, 1.0, 1.0), [3, 2, 1])


def test_discounted_returns_by_hand():
    # gamma 1/2; step 1 truncated with V' = 8, step 3 the end of the array with V' = 4
    # G3 = 4 + 2, G2 = 3 + 3, G1 = 2 + 4, G0 = 1 + 3; values inside an episode (99) have no weight
    rewards, next_values = column(1, 2, 3, 4), column(99, 8, 99, 4)
    none = column(0, 0, 0, 0)
    close(discounted_returns(rewards, next_values, none, column(0, 1, 0, 0), 0.5), [4, 6, 6, 6])
    # step 1 terminated instead: G1 = 2, G0 = 1 + 1
    end = column(0, 1, 0, 0)
    close(discounted_returns(rewards, next_values, end, end, 0.5), [2, 2, 6, 6])


def test_n_step_returns_shorten_at_ends_with_the_right_power_of_gamma():
    # n 2, gamma 1/2: G0 = 1 + 2/2 + 20/4 = 7, G1 = 2 + 3/2 + 30/4 = 11, G2 = 3 + 4/2 + 40/4 = 15, G3 = 4 + 40/2 = 24
    rewards, next_values, none = column(1, 2, 3, 4), column(10, 20, 30, 40), column(0, 0, 0, 0)
    close(n_step_returns(rewards, next_values, none, none, 0.5, 2), [7, 11, 15, 24])
    # step 1 truncated: G1 = 2 + 20/2 = 12, one real step; with n 3, G0 = 7 still: two real steps, never the reset's
    end = column(0, 1, 0, 0)
    close(n_step_returns(rewards, next_values, none, end, 0.5, 2), [7, 12, 15, 24])
    # G2 = 3 + 4/2 + 40/4 = 15 either way
    close(n_step_returns(rewards, next_values, none, end, 0.5, 3), [7, 12, 15, 24])
    # step 1 terminated: G1 = 2, G0 = 1 + 2/2
    close(n_step_returns(rewards, next_values, end, end, 0.5, 3), [2, 2, 15, 24])
    with pytest.raises(ValueError, match="n is 0"):
        n_step_returns(rewards, next_values, none, none, 0.5, 0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 11, 13, 16, 23, 24, 40, 512])
def test_n_step_returns_equal_the_plain_definition(n):
    """Each window by itself: n rewards, or as many as the episode or the array has, then the value there.

    Whichever episodes end inside the windows, and for n below, equal to and beyond the 23 steps that there are.
    """
    rewards, _, next_values, terminated, done = random_inputs(23, 5, seed=3)
    expected = torch.zeros_like(rewards)
    for env in range(5):
        for start in range(23):
            total, discount = 0.0, 1.0
            for t in range(start, min(start + n, 23)):
                total, discount = total + discount * float(rewards[t, env]), discount * 0.9
                if done[t, env]:
                    break
            value = 0.0 if terminated[t, env] else float(next_values[t, env])
            expected[start, env] = total + discount * value
    assert done.any(0).all() and (done & ~terminated).any() and terminated.any()
    found = n_step_returns(rewards, next_values, terminated, done, 0.9, n)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    along_rows = (x.T for x in (rewards, next_values, terminated, done))
    assert torch.equal(n_step_returns(*along_rows, 0.9, n, dim=1), found.T)


def test_the_gradient_of_n_step_returns_by_hand():
    # n 3, gamma 1/2: G0 = r0 + r1/2 + r2/4 + V'2/8, and nothing else
    rewards, next_values = (torch.zeros(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    none = torch.zeros(6)
    n_step_returns(rewards, next_values, none, none, 0.5, 3)[0].backward()
    close(rewards.grad, [1, 0.5, 0.25, 0, 0, 0])
    close(next_values.grad, [0, 0, 0.125, 0, 0, 0])


def test_n_step_returns_of_no_step_are_empty():
    assert n_step_returns(*(torch.zeros(0, 3) for _ in range(4)), 0.9, 4).shape == (0, 3)


def test_masked_steps_are_stepped_over_by_hand():
    # gamma = lambda = 1/2, two tool steps in the middle. A3 = 2 - 6 = -4. The successor of step 0 is step 3, V = 6:
    # delta0 = 1 + 6/2 - 4 = 0, A0 = 0 + (-4)/4 = -1.
    rewards, values = column(1, 99, 99, 2), column(4, 77, 77, 6)
    next_values, end = column(77, 77, 6, 55), column(0, 0, 0, 1)
    close(gae(rewards, values, next_values, end, end, 0.5, 0.5, mask=column(1, 0, 0, 1)), [-1, 0, 0, -4])


def test_masked_gae_equals_gae_of_the_kept_steps():
    rewards, values, next_values, terminated, done = random_inputs(30, 6, seed=1)
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(30, 6, generator=generator) < 0.6
    mask[0] = mask[-1] = True
    terminated, done = terminated & mask, done & mask
    next_values = torch.where(done, next_values, torch.cat((values[1:], next_values[-1:])))
    advantages = gae(rewards, values, next_values, terminated, done, 0.9, 0.8, mask=mask)
    for env in range(6):
        keep = mask[:, env]
        kept = [x[keep, env] for x in (rewards, values, next_values, terminated, done)]
        kept[2] = torch.where(kept[4], kept[2], torch.cat((kept[1][1:], kept[2][-1:])))
        close(advantages[keep, env], gae(*kept, 0.9, 0.8))
        assert (advantages[~keep, env] == 0).all()


def test_content_of_masked_steps_never_matters():
    rewards, values, next_values, _, _ = random_inputs(6, 1)
    mask = torch.tensor([1, 0, 1, 1, 0, 0]).view(6, 1)
    for last_done in (0, 1):  # a finished completion before the padding, and one that was cut by the array
        done = torch.zeros(6, 1)
        done[3] = last_done
        plain = gae(rewards, values, next_values, done, done, 0.9, 0.8, mask=mask)
        spoiled = [torch.where(mask == 0, torch.nan, x) for x in (rewards, values, next_values)]
        assert torch.equal(gae(*spoiled, done, done, 0.9, 0.8, mask=mask), plain)
        assert torch.equal(gae(*(x[:4] for x in (*spoiled, done, done)), 0.9, 0.8, mask=mask[:4]), plain[:4])


def test_content_of_a_masked_step_that_terminates_never_matters():
    rewards, values, next_values = column(1, 99, 3), column(4, 99, 6), column(99, 99, 2)
    mask, end = column(1, 0, 1), column(0, 1, 0)
    spoiled = [torch.where(mask == 0, torch.nan, x) for x in (rewards, values, next_values)]
    close(gae(*spoiled, end, end, 0.5, 0.5, mask=mask), [-3, 0, -2])  # by hand in the next test


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_round_gamma(dtype):
    """Σ 0.99ᵏ over 300 steps is 95.1; with γ rounded to bfloat16, 0.988, it would be 82.5."""
    ones, zeros = torch.ones(300, 1, dtype=dtype), torch.zeros(300, 1, dtype=dtype)
    for returns in (
        discounted_returns(ones, zeros, zeros, zeros, 0.99),
        n_step_returns(ones, zeros, zeros, zeros, 0.99, 300),
        gae(ones, zeros, zeros, zeros, zeros, 0.99, 1.0),
    ):
        assert returns.dtype == torch.float32 and returns[0].item() == pytest.approx((1 - 0.99**300) / 0.01, rel=1e-5)


def test_an_episode_that_ends_inside_a_masked_stretch_ends_for_the_step_before():
    # gamma = lambda = 1/2; step 1 is masked and ends the episode, step 2 belongs to the next one and must not leak.
    rewards, values, next_values = column(1, 99, 3), column(4, 99, 6), column(99, 10, 2)
    mask, end, none = column(1, 0, 1), column(0, 1, 0), column(0, 0, 0)
    # truncated: A0 = 1 + 10/2 - 4 = 2; terminated: A0 = 1 - 4 = -3; A2 = 3 + 2/2 - 6 = -2
    close(gae(rewards, values, next_values, none, end, 0.5, 0.5, mask=mask), [2, 0, -2])
    close(gae(rewards, values, next_values, end, end, 0.5, 0.5, mask=mask), [-3, 0, -2])


def test_dimension_flags_and_broadcasting():
    rewards, values, next_values, terminated, done = random_inputs(9, 4)
    args = (rewards, values, next_values, terminated, done)
    expected = gae(*args, 0.9, 0.8)
    for dim in (1, -1):
        transposed = gae(*(x.T for x in args), 0.9, 0.8, dim=dim)
        assert torch.equal(transposed, expected.T)
    flags = (terminated.float(), done.long())
    assert torch.equal(gae(rewards, values, next_values, *flags, 0.9, 0.8), expected)
    ones = torch.ones(9, 1, dtype=torch.float64)
    assert torch.equal(
        gae(ones, values, next_values, terminated, done, 0.9, 0.8),
        gae(ones.expand(9, 4), values, next_values, terminated, done, 0.9, 0.8),
    )
    assert expected.dtype == torch.float64
    assert gae(*(x.float() for x in args), 0.9, 0.8).dtype == torch.float32


@pytest.mark.parametrize("function", [discounted_returns, lambda_returns, n_step_returns, gae])
def test_different_ranks_raise_one_line(function):
    narrow, wide = torch.zeros(3), torch.zeros(3, 1)
    values = (narrow,) if function is gae else ()
    extra = {discounted_returns: (), lambda_returns: (0.9,), n_step_returns: (2,), gae: (0.9,)}[function]
    with pytest.raises(ValueError, match=r"rewards \[3, 1\]") as caught:
        function(wide, *values, narrow, narrow, narrow, 0.9, *extra)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="do not broadcast"):
        function(torch.zeros(2), *values, narrow, narrow, narrow, 0.9, *extra)


def test_bilevel_gae_by_hand():
    # Two turns of two tokens, rewards 1 and 3 at their ends; values 2, 4, 6, 8. gamma 1/2, lambda 1; of turns 3/4, 1/3.
    # Turns: A3 = 3 - 8 = -5, A1 = 1 + 3/4 * 8 - 4 - 3/4 * 1/3 * 5 = 3 - 5/4 = 1.75.
    # Tokens: A2 = 0 + 8/2 - 6 - 5/2 = -4.5, A0 = 0 + 4/2 - 2 + 1.75/2 = 0.875.
    rewards, values, turn = column(0, 1, 0, 3), column(2, 4, 6, 8), torch.tensor([0, 0, 1, 1])
    close(bilevel_gae(rewards, values, turn, 0.5, 1.0, 0.75, 1 / 3), [0.875, 1.75, -4.5, -5])


def test_bilevel_gae_steps_over_tool_tokens_and_padding():
    """A tool's answer between the turns and inside one, and padding at the end: there is NaN, and any turn number."""
    expected = column(0.875, 0, 1.75, 0, -4.5, -5, 0)
    nan = torch.nan
    mask = torch.tensor([1, 0, 1, 0, 1, 1, 0])
    rewards, values = column(0, nan, 1, nan, 0, 3, nan), column(2, nan, 4, nan, 6, 8, nan)
    turn = torch.tensor([0, 9, 0, 0, 1, 1, 7])
    close(bilevel_gae(rewards, values, turn, 0.5, 1.0, 0.75, 1 / 3, mask), expected)
    batch = [torch.stack([x, x]) for x in (rewards, values, turn, mask)]
    close(bilevel_gae(*batch[:3], 0.5, 1.0, 0.75, 1 / 3, batch[3], dim=1), torch.stack([expected, expected]))
    close(bilevel_gae(*batch[:3], 0.5, 1.0, 0.75, 1 / 3, batch[3], dim=-1), torch.stack([expected, expected]))


def test_bilevel_gae_of_turns_of_one_token_and_of_one_turn_is_gae():
    rewards, values = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    following = torch.cat((values[1:], torch.zeros_like(values[:1])))
    end = torch.zeros_like(values)
    end[-1] = 1
    steps = torch.arange(6).unsqueeze(1)
    close(
        bilevel_gae(rewards, values, steps, 0.1, 0.2, 0.9, 0.8),
        gae(rewards, values, following, end, end, 0.9, 0.8),
    )
    close(
        bilevel_gae(rewards, values, torch.zeros_like(steps), 0.9, 0.8, 0.1, 0.2),
        gae(rewards, values, following, end, end, 0.9, 0.8),
    )


def test_bilevel_gae_of_no_token_is_empty():
    empty = torch.zeros(0, 3)
    assert bilevel_gae(empty, empty, empty.long(), 1.0, 1.0, 1.0, 1.0).shape == (0, 3)


def test_bilevel_gae_refuses_other_ranks_and_fractions_of_turns():
    with pytest.raises(ValueError, match="turn"):
        bilevel_gae(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, dtype=torch.long), 1.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="numbered with integers"):
        bilevel_gae(torch.zeros(3), torch.zeros(3), torch.tensor([0.0, 0.4, 1.0]), 1.0, 1.0, 1.0, 1.0)
