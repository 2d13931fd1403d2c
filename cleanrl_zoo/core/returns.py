"""Returns and advantages over time (Sutton & Barto 2018, chapters 3, 7 and 12; Schulman et al. 2016, GAE).

Index t belongs to the transition obs[t] -> next_obs[t]: ``next_values[t]`` is the value of that transition's own next
observation (the true last one where an episode ended), ``terminated`` stops the bootstrap and ``done`` (terminated or
truncated) stops the recursion. The end of the array stops the recursion as a truncation does.

All inputs have the same number of dimensions, size-1 dimensions broadcast, and time is dimension ``dim``. Flags and
masks are bool or 0/1 float. Rewards and values share one unit; so do the results, which have the broadcast shape. Half
precision is computed and returned in float32: γ itself would be rounded, to 0.988 for 0.99.
"""

import torch
from torch import Tensor

from cleanrl_zoo.core.shapes import check_broadcast


def discounted_returns(
    rewards: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, gamma: float, dim: int = 0
) -> Tensor:
    """Discounted sum of the rewards to the episode's end, bootstrapped where it was cut.

    G_t = r_t + γ G_{t+1} inside an episode; r_t where it terminated; r_t + γ V'_t where it was truncated and at the end
    of the array (Sutton & Barto eq. 3.9). Inputs [T, ...] -> [T, ...]. Raises ValueError for different ranks.
    """
    return lambda_returns(rewards, next_values, terminated, done, gamma, 1.0, dim)


def lambda_returns(
    rewards: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, gamma: float, lambda_: float, dim: int = 0
) -> Tensor:
    """λ-return: G_t = r_t + γ[(1 − term_t) V'_t + λ(1 − done_t)(G_{t+1} − V'_t)] (Sutton & Barto eq. 12.2, 12.3).

    A soft continue probability c is passed as terminated = done = 1 − c, which gives r + γc[(1 − λ)V' + λG]
    (DreamerV3, Hafner et al. 2023). Inputs [T, ...] -> [T, ...]; differentiable. Raises ValueError for different ranks.
    """
    rewards, next_values, terminated, done = _time_first(
        dim, rewards=rewards, next_values=next_values, terminated=terminated, done=done
    )
    follows = 1 - done  # [T, ...] 1 where the next row continues this episode
    follows[-1:] = 0
    increment = rewards + gamma * ((1 - terminated) - lambda_ * follows) * next_values
    return _reverse_scan(increment, gamma * lambda_ * follows).movedim(0, dim)


def n_step_returns(
    rewards: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, gamma: float, n: int, dim: int = 0
) -> Tensor:
    """n-step return: Σ_{k<m} γ^k r_{t+k} + γ^m (1 − term) V' after the m-th step (Sutton & Barto eq. 7.1).

    m is n, or less where the episode or the array ends first: the window then shortens and bootstraps there, with γ to
    the number of real steps. Inputs [T, ...] -> [T, ...]. Raises ValueError for n < 1 and for different ranks.
    """
    if n < 1:
        raise ValueError(f"n is {n}; an n-step return needs n >= 1")
    rewards, next_values, terminated, done = _time_first(
        dim, rewards=rewards, next_values=next_values, terminated=terminated, done=done
    )
    follows = 1 - done
    follows[-1:] = 0
    increment = rewards + gamma * (1 - terminated - follows) * next_values  # what a step adds when the window goes on
    decay = gamma * follows
    returns = rewards + gamma * (1 - terminated) * next_values  # the one-step return
    # The other n − 1 steps are put before it by powers of two: log2 n operations on the whole array, not n.
    more, span = min(n, len(rewards)) - 1, 1
    while more > 0:
        if more % 2:
            returns = torch.cat((increment[:-span] + decay[:-span] * returns[span:], increment[-span:]))
        if more > 1:
            increment, decay = _doubled(increment, decay, span)
        more, span = more // 2, 2 * span
    return returns.movedim(0, dim)


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
    mask: Tensor | None = None,
    dim: int = 0,
) -> Tensor:
    """Generalised advantage estimates: A_t = δ_t + γλ(1 − done_t) A_{t+1}, δ_t = r_t + γ(1 − term_t) V'_t − V_t.

    Schulman et al. 2016, eq. 16. A step with mask 0 (a tool's token, padding) gets 0 and is stepped over: the successor
    of the step before it is the next step with mask 1, whose value and advantage are carried across undiscounted. Its
    content never matters, only its flags do: an episode that ends inside a masked stretch ends there for the step
    before, with the next value of a truncation. A masked tail that holds no end is padding, and the step before it
    keeps its own next value.

    Inputs [T, ...] -> advantages [T, ...]. Raises ValueError for different ranks.
    """
    rewards, values, next_values, terminated, done, *masks = _time_first(
        dim, rewards=rewards, values=values, next_values=next_values, terminated=terminated, done=done, mask=mask
    )
    if not masks:
        delta = rewards + gamma * (1 - terminated) * next_values - values
        return _reverse_scan(delta, gamma * gae_lambda * (1 - done)).movedim(0, dim)
    keep = masks[0] != 0
    next_values, terminated, done = _step_over_masked(values, next_values, terminated, done, keep)
    next_values = torch.where(terminated == 1, 0.0, next_values)  # a masked row may hold anything, NaN too
    delta = rewards + gamma * (1 - terminated) * next_values - values
    delta = torch.where(keep, delta, 0.0)
    decay = torch.where(keep, gamma * gae_lambda * (1 - done), 1.0)
    return torch.where(keep, _reverse_scan(delta, decay), 0.0).movedim(0, dim)


def bilevel_gae(
    rewards: Tensor,
    values: Tensor,
    turn: Tensor,
    gamma: float,
    gae_lambda: float,
    turn_gamma: float,
    turn_lambda: float,
    mask: Tensor | None = None,
    dim: int = 0,
) -> Tensor:
    """GAE over turns, and within a turn over its tokens (RAGEN, Wang et al. 2025, arXiv:2504.20073).

    ``turn`` [T, ...] numbers the turns of an episode with integers that do not fall along time; a turn's reward sits on
    its last token. That token's successor is the last token of the next turn, with the turns' own discount and λ;
    every other token's is the next token, so that what a turn was worth flows back from its end:

        A = r + γ_turn V' − V + γ_turn λ_turn A'     the last token of a turn; ' that of the next turn
        A = r + γ V' − V + γ λ A'                    the others; ' the next token

    The last turn ends the episode. A token with mask 0 (a tool's text, padding) gets 0, is stepped over, and what
    stands there never matters. Inputs [T, ...] -> advantages [T, ...]. Raises ValueError for different ranks and turns
    that are no integers.
    """
    check_broadcast(rewards=rewards, values=values, turn=turn, mask=mask)
    if turn.is_floating_point():
        raise ValueError(f"turn is {turn.dtype}; the turns of an episode are numbered with integers")
    keep = torch.ones_like(turn, dtype=torch.bool) if mask is None else mask != 0
    rewards, values, turn, keep = torch.broadcast_tensors(rewards, values, turn, keep)
    rewards, values = torch.where(keep, rewards, 0.0), torch.where(keep, values, 0.0)
    never = 2**62  # a turn that never comes
    turn = torch.where(keep, turn.long(), never)
    coming = torch.nn.functional.pad(turn.movedim(dim, -1), (0, 1), value=never)[..., 1:].movedim(-1, dim)
    coming = coming.flip(dim).cummin(dim).values.flip(dim)  # turn of the next token with mask 1
    last, end = keep & (coming != turn), keep & (coming == never)
    following = values.roll(-1, dim)
    of_turn = gae(rewards, values, following, end, end, turn_gamma, turn_lambda, last, dim)
    # A last token's advantage is that of its turn: what is left of a reward of A + V when the episode ends there.
    rewards = torch.where(last, of_turn + values, rewards)
    return gae(rewards, values, following, last, last, gamma, gae_lambda, keep, dim)


def _time_first(dim: int, **tensors: Tensor | None) -> list[Tensor]:
    """Check ranks, broadcast, move time to the front and make flags numbers of the values' own type."""
    check_broadcast(**tensors)
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    dtype = present["rewards"].dtype
    for name in ("values", "next_values"):
        if name in present:
            dtype = torch.promote_types(dtype, present[name].dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    return [tensor.movedim(dim, 0).to(dtype) for tensor in torch.broadcast_tensors(*present.values())]


def _reverse_scan(increment: Tensor, decay: Tensor) -> Tensor:
    """Solve x_t = increment_t + decay_t x_{t+1}, x_T = 0, along dimension 0.

    By doubling: log2 T operations on the whole array replace a loop over T rows.
    """
    span, steps = 1, len(increment)
    while span < steps:
        increment, decay = _doubled(increment, decay, span)
        span *= 2
    return increment


def _doubled(increment: Tensor, decay: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Sums and decays over windows of 2·span rows, or to the end, from those over windows of `span`."""
    longer = torch.cat((increment[:-span] + decay[:-span] * increment[span:], increment[-span:]))
    return longer, torch.cat((decay[:-span] * decay[span:], decay[-span:]))


def _step_over_masked(
    values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, keep: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Next value and flags of every row as if the masked rows were not there."""
    steps = len(keep)
    row = torch.arange(steps, device=keep.device).view(-1, *[1] * (keep.dim() - 1))
    stop = torch.where(keep | (done != 0), row, steps)  # rows where a masked stretch can end
    stop = stop.flip(0).cummin(0).values.flip(0)[1:]  # [T-1, ...] the first such row after row t
    crosses = ~keep[1:] & (stop < steps) & (done[:-1] == 0)
    stop = stop.clamp(max=steps - 1)

    def carried(at_kept: Tensor | float, at_end: Tensor, own: Tensor) -> Tensor:
        there = torch.where(keep, at_kept, at_end).gather(0, stop)
        return torch.cat((torch.where(crosses, there, own[:-1]), own[-1:]))

    return carried(values, next_values, next_values), carried(0.0, terminated, terminated), carried(0.0, done, done)
