"""PPO of a language model: credit worked by hand, the kinds of bugs that others had, and a run that can be resumed."""

import math
import shutil

import pytest
import torch
from algo_helpers import final_checkpoint, load_algorithm, rows_without_clock

from cleanrl_zoo import core
from cleanrl_zoo.core import clipped_surrogate
from cleanrl_zoo.llm import Completions, PromptSource, load_language_model, make_task
from cleanrl_zoo.llm.pairs import save_reward_model
from cleanrl_zoo.run import parse_args
from cleanrl_zoo.run.distributed import World

PPO = load_algorithm("llm_ppo")
DEBUG = ["--preset", "debug"]
RATE = torch.tensor(1e-3)
SIZES = {"width": 16, "layers": 1, "heads": 2}


def flags(*words):
    return parse_args(PPO.Args, PPO.PRESETS, [*DEBUG, *map(str, words)])


def tiny(value_head=True, lora_rank=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return load_language_model("tiny", lora_rank=lora_rank, value_head=value_head, generator=generator, **SIZES)


def start(args, agent=None, critic=None):
    """State and source of prompts as main makes them, with a smaller model."""
    own, tokenizer, stop_ids = tiny(not args.separate_critic)
    agent = own if agent is None else agent
    generator = torch.Generator().manual_seed(1)
    task = make_task("addition")
    source = PromptSource(task, tokenizer, generator, args.max_length, agent.context, stop_ids, World())
    return PPO.TrainState.create(args, agent, critic), source


def rollout_of(args, state, source, reference=None):
    completions, scores, metrics = PPO.collect(state, source, None, args, World())
    rollout, more = PPO.prepare(state, completions, scores, reference, args, World(), source.tokenizer.pad_token_id)
    return rollout, {**metrics, **more}


def uneven(agent, count=6, dtype=torch.float64):
    """A rollout of completions with 1 to 4 tokens after prompts of 2 to 4, with credit of any kind."""
    generator = torch.Generator().manual_seed(3)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=dtype)

    lengths, prompts = torch.arange(count) % 4 + 1, torch.arange(count) % 3 + 2
    mask = torch.arange(4) < lengths.unsqueeze(1)
    prompt_mask = torch.arange(4) >= 4 - prompts.unsqueeze(1)
    prompt_ids, ids = (torch.randint(256, (count, 4), generator=generator) for _ in range(2))
    zeros, truncated = torch.zeros(count, 4, dtype=dtype), torch.zeros(count, dtype=torch.bool)
    completions = Completions(prompt_ids, prompt_mask, ids, mask, zeros, truncated)
    old_logprob, old_value = (torch.where(mask, x, 0.0) for x in (-5 - uniform(count, 4), uniform(count, 4)))
    advantages, returns = (torch.where(mask, x, 0.0) for x in (uniform(count, 4) - 0.5, 2 * uniform(count, 4)))
    return PPO.Rollout(completions, advantages, returns, old_logprob, old_value)


class Recorder:
    """In place of the optimizer: keeps the gradients and leaves the parameters alone."""

    def __init__(self, parameters):
        self.parameters, self.grads = list(parameters), []

    def step(self, grads, learning_rate):
        self.grads = [grad.clone() for grad in grads]


# Credit, by hand


# Two completions of 3 and 2 tokens, β = 0.1, γ = 1, λ = 0.5, scores 1 and −0.5.
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
SCORES = torch.tensor([1.0, -0.5], dtype=torch.float64)
TOKEN_KL = torch.tensor([[0.2, -0.1, 0.5], [1.0, 0.4, 0.0]], dtype=torch.float64)
VALUES = torch.tensor([[0.5, 0.2, 0.4], [0.1, -0.3, 0.0]], dtype=torch.float64)
NO = torch.zeros(2, dtype=torch.bool)
SETTINGS = {"kl_coef": 0.1, "gamma": 1.0, "gae_lambda": 0.5}
# Rewards of the first:    −0.02              0.01                1 − 0.05 = 0.95
#   errors δ               −0.02 + 0.2 − 0.5  0.01 + 0.4 − 0.2    0.95 − 0.4
#                          = −0.32            = 0.21              = 0.55
#   advantages             −0.32 + 0.485/2    0.21 + 0.55/2       0.55
#                          = −0.0775          = 0.485             = 0.55
# Rewards of the second:   −0.1               −0.5 − 0.04 = −0.54, on its own last token, not in the last column
#   errors δ               −0.1 − 0.3 − 0.1   −0.54 + 0.3
#                          = −0.5             = −0.24
#   advantages             −0.5 − 0.24/2      −0.24
#                          = −0.62
ADVANTAGES = torch.tensor([[-0.0775, 0.485, 0.55], [-0.62, -0.24, 0.0]], dtype=torch.float64)
RETURNS = torch.tensor([[0.4225, 0.685, 0.95], [-0.52, -0.54, 0.0]], dtype=torch.float64)  # advantage + value


def whitened(advantages, mask):
    """By plain Python: minus the mean, over the deviation with divisor n − 1."""
    numbers = advantages[mask].tolist()
    mean = sum(numbers) / len(numbers)
    std = math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))
    return torch.where(mask, (advantages - mean) / (std + 1e-8), 0.0)


def test_advantages_and_returns_by_hand():
    advantages, returns = PPO.credit(SCORES, TOKEN_KL, VALUES, torch.zeros(2), NO, MASK, **SETTINGS)
    torch.testing.assert_close(returns, RETURNS, rtol=0, atol=1e-9)
    torch.testing.assert_close(advantages, whitened(ADVANTAGES, MASK), rtol=0, atol=1e-9)


def test_a_cut_completion_ends_at_its_own_last_token_or_bootstraps_there():
    final = torch.tensor([7.0, 2.0], dtype=torch.float64)
    # The second is cut; its last error becomes −0.54 + 2 + 0.3 = 1.76, and the one before −0.5 + 1.76/2 = 0.38. The
    # value of the first one's text (7) stays out.
    returns = torch.tensor([[0.4225, 0.685, 0.95], [0.48, 1.46, 0.0]], dtype=torch.float64)
    cut = torch.tensor([False, True])
    assert torch.allclose(PPO.credit(SCORES, TOKEN_KL, VALUES, final, cut, MASK, **SETTINGS)[1], returns, atol=1e-9)
    assert torch.allclose(PPO.credit(SCORES, TOKEN_KL, VALUES, final, NO, MASK, **SETTINGS)[1], RETURNS, atol=1e-9)


def test_padding_counts_nowhere():
    expected = PPO.credit(SCORES, TOKEN_KL, VALUES, torch.zeros(2), NO, MASK, **SETTINGS)

    def widened(x, value):
        wide = torch.full((2, 40), value, dtype=x.dtype)
        wide[:, :3] = torch.where(MASK, x, value)
        return wide

    for junk in (1e6, math.nan):
        mask = widened(MASK, False)
        found = PPO.credit(SCORES, widened(TOKEN_KL, junk), widened(VALUES, junk), torch.zeros(2), NO, mask, **SETTINGS)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[:, :3], other, rtol=0, atol=1e-12)
            assert not one[:, 3:].any()


def test_over_a_tools_text_the_successor_is_the_next_token_that_the_model_wrote():
    # The first of before with two columns of a tool's text put in, and one behind its last own token.
    mask = torch.tensor([[1, 1, 0, 0, 1, 0]], dtype=torch.bool)
    kl = torch.tensor([[0.2, -0.1, 9.0, 9.0, 0.5, 9.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.2, 9.0, 9.0, 0.4, 9.0]], dtype=torch.float64)
    _, returns = PPO.credit(SCORES[:1], kl, values, torch.zeros(1), NO[:1], mask, **SETTINGS)
    expected = torch.tensor([[0.4225, 0.685, 0, 0, 0.95, 0]], dtype=torch.float64)
    torch.testing.assert_close(returns, expected, rtol=0, atol=1e-9)


def test_the_penalty_has_the_gradient_of_the_exact_kl():
    """Two actions, one token: the surrogate weighted by each action's chance against the gradient of R − β KL(π‖ref).

    A KL that is averaged before it is masked, or differentiated through k1, would give another one (or none).
    """
    logits = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.9], dtype=torch.float64).log_softmax(0)
    scores, logprob = torch.tensor([1.0, 0.2], dtype=torch.float64), logits.log_softmax(0)
    kl = (logprob.exp() * (logprob - reference)).sum()
    exact = torch.autograd.grad((logprob.exp() * scores).sum() - 0.7 * kl, logits, retain_graph=True)[0]

    old, mask = logprob.detach().unsqueeze(1), torch.ones(2, 1, dtype=torch.bool)  # [2, 1]: a row for each action
    zeros = torch.zeros(2, 1, dtype=torch.float64)
    settings = {"kl_coef": 0.7, "gamma": 1.0, "gae_lambda": 0.95}
    _, returns = PPO.credit(scores, old - reference.unsqueeze(1), zeros, torch.zeros(2), NO, mask, **settings)
    loss = (old.exp() * clipped_surrogate(logprob.unsqueeze(1), old, returns)).sum()
    torch.testing.assert_close(torch.autograd.grad(-loss, logits)[0], exact, rtol=0, atol=1e-12)


def test_last_tokens():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    expected = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.bool)
    assert torch.equal(PPO.last_tokens(mask), expected)


# The models


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("separate", [False, True])
def test_before_the_first_update_ratios_are_1_and_the_kl_is_0(lora_rank, separate):
    """At another temperature, with dropout in the model, and with an adapter that is not zero."""
    args = flags("--temperature", 0.7, *(["--separate-critic"] if separate else []))
    agent, _, _ = tiny(not separate, lora_rank)
    agent.model.config.attention_dropout = 0.5
    for module in agent.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    with torch.no_grad():
        for name, weight in agent.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(0))
    state, source = start(args, agent, tiny()[0] if separate else None)
    rollout, metrics = rollout_of(args, state, source, agent.reference())
    assert torch.allclose(rollout.old_logprob, rollout.completions.logprob, atol=1e-5)
    assert abs(metrics["losses/sequence_kl"]) < 1e-5 and metrics["losses/ref_kl"] < 1e-9
    assert metrics["losses/sampler_kl"] < 1e-9
    recorder = Recorder(state.optimizer.parameters)
    stats, extremes = PPO.minibatch_step(agent, state.critic, recorder, rollout, torch.arange(16), RATE, args, World())
    assert extremes.abs().max() < 1e-5
    assert not stats[[PPO.STATS.index(f"losses/clipfrac_{side}") for side in ("low", "high")]].any()


@pytest.mark.parametrize("separate", [False, True])
def test_neither_the_micro_batch_nor_the_number_of_ranks_changes_the_gradient(separate):
    """Completions of 1 to 4 tokens: with a divisor of its own, each part would weigh its tokens differently."""
    agent, critic = tiny(not separate)[0].double(), tiny()[0].double() if separate else None
    holder = agent if critic is None else critic
    torch.nn.init.normal_(holder.value_head.weight, generator=torch.Generator().manual_seed(0))
    rollout, index = uneven(agent), torch.tensor([3, 0, 5, 1, 4])
    parameters = [*agent.trainable(), *(critic.trainable() if separate else [])]

    def gradient(micro_batch, world):
        args = flags("--micro-batch", micro_batch, "--max-grad-norm", 1e9, "--ent-coef", 0.1)
        recorder = Recorder(parameters)
        stats, _ = PPO.minibatch_step(agent, critic, recorder, rollout, index, RATE, args, world)
        return torch.cat([grad.flatten() for grad in recorder.grads]), stats[: len(PPO.STATS)]

    class Half(World):
        """One of two ranks, whose sum is left to the test."""

        def sum(self, tensors):
            return list(tensors)

        def gather(self, tensor):
            return tensor

    whole, stats = gradient(5, World())
    assert (whole != 0).float().mean() > 0.1 and (stats[:5].abs() > 1e-3).all()
    for micro_batch in (1, 2):
        grad, numbers = gradient(micro_batch, World())
        torch.testing.assert_close(grad, whole, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(numbers, stats, rtol=1e-5, atol=1e-6)
    halves = [gradient(2, Half(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(halves[0][1] + halves[1][1], stats, rtol=1e-5, atol=1e-6)


def test_the_losses_by_hand():
    """Policy and value loss of `minibatch_step` from its own outputs, by plain Python over the tokens."""
    agent = tiny()[0].double()
    torch.nn.init.normal_(agent.value_head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    rollout, args = uneven(agent), flags("--vf-coef", 0.7, "--ent-coef", 0.05)
    batch = rollout.completions
    with torch.no_grad():
        out = agent.completion(batch.tokens, batch.attention_mask, batch.mask, entropy=True, value=True)
    policy = value = entropy = 0.0
    for row, column in batch.mask.nonzero().tolist():
        at = (row, column)
        ratio, advantage = math.exp(out.logprob[at] - rollout.old_logprob[at]), float(rollout.advantages[at])
        policy -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        old, new, goal = (float(x[at]) for x in (rollout.old_value, out.value, rollout.returns))
        near = old + min(max(new - old, -0.2), 0.2)
        value += 0.5 * max((new - goal) ** 2, (near - goal) ** 2)
        entropy += float(out.entropy[at])
    policy, value, entropy = (x / int(batch.mask.sum()) for x in (policy, value, entropy))
    stats, _ = PPO.minibatch_step(
        agent, None, Recorder(agent.trainable()), rollout, torch.arange(6), RATE, args, World()
    )
    found = dict(zip(PPO.STATS, stats.tolist(), strict=False))
    assert found["losses/policy_loss"] == pytest.approx(policy, rel=1e-5)
    assert found["losses/value_loss"] == pytest.approx(value, rel=1e-5)
    assert found["losses/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert found["losses/loss"] == pytest.approx(policy + 0.7 * value - 0.05 * entropy, rel=1e-5)


def test_a_completion_without_a_score_takes_no_part():
    args = flags()
    state, source = start(args)
    completions, scores, _ = PPO.collect(state, source, None, args, World())
    scores = torch.linspace(-1, 1, 16, dtype=torch.float64)
    scores[[2, 9]] = math.nan
    others = torch.tensor([row for row in range(16) if row not in (2, 9)])
    pad_id = source.tokenizer.pad_token_id
    rollout, metrics = PPO.prepare(state, completions, scores, None, args, World(), pad_id)
    without, same = PPO.prepare(state, completions.rows(others), scores[others], None, args, World(), pad_id)
    assert not rollout.advantages[[2, 9]].any() and not rollout.completions.mask[[2, 9]].any()
    torch.testing.assert_close(rollout.advantages[others], without.advantages, rtol=0, atol=1e-5)
    for tag in metrics:
        assert float(metrics[tag]) == pytest.approx(float(same[tag]), abs=1e-5), tag
    grads = []
    for part, index in ((rollout, torch.arange(16)), (without, torch.arange(14))):
        recorder = Recorder(state.optimizer.parameters)
        PPO.minibatch_step(state.agent, None, recorder, part, index, RATE, args, World())
        grads.append(torch.cat([grad.flatten() for grad in recorder.grads]))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_completions_none_of_which_has_a_score_change_nothing():
    args = flags()
    state, source = start(args)
    completions, *_ = PPO.collect(state, source, None, args, World())
    scores = torch.full((16,), math.nan, dtype=torch.float64)
    rollout, metrics = PPO.prepare(state, completions, scores, None, args, World(), source.tokenizer.pad_token_id)
    assert not rollout.completions.mask.any() and not rollout.advantages.any()
    assert metrics["losses/explained_variance"] == 0


def test_the_penalty_follows_the_mean_kl_of_whole_completions():
    """β (1 + clip(KL/target − 1, ±0.2) · 16/160), after the rewards were made with β as it was.

    KL 0 lowers it by 2 %; a KL of 1.1 times the target raises it by 1 %.
    """
    args = flags("--kl-target", 0.5, "--kl-horizon", 160, "--kl-coef", 0.02)
    state, source = start(args)
    reference = state.agent.reference()
    _, metrics = rollout_of(args, state, source, reference)
    assert metrics["losses/kl_coef"] == 0.02 and state.kl_coef == pytest.approx(0.02 * 0.98, rel=1e-6)

    with torch.no_grad():
        state.agent.model.get_output_embeddings().weight.mul_(2.0)
    completions, scores, _ = PPO.collect(state, source, None, args, World())
    texts = (completions.tokens, completions.attention_mask, completions.mask)
    own, other = (model.completion(*texts).logprob.detach() for model in (state.agent, reference))
    args.kl_target = float((own - other).sum(1).mean()) / 1.1
    pad_id = source.tokenizer.pad_token_id
    rollout, metrics = PPO.prepare(state, completions, scores, reference, args, World(), pad_id)
    assert float(metrics["losses/sequence_kl"]) == pytest.approx(1.1 * args.kl_target, rel=1e-4)
    assert metrics["losses/kl_coef"] == pytest.approx(0.0196, rel=1e-6)
    assert state.kl_coef == pytest.approx(0.0196 * 1.01, rel=1e-5)
    # the scores of random bytes are 0 and so are the values: the penalty alone, summed with λ = 0.95 from the end
    expected, following = torch.zeros_like(own), torch.zeros(16)
    for t in reversed(range(4)):
        expected[:, t] = following = -0.0196 * (own - other)[:, t] + 0.95 * following
    torch.testing.assert_close(rollout.returns, expected, rtol=1e-4, atol=1e-6)


def test_a_reward_model_replaces_the_tasks_reward():
    """Its score is the value at the completion's own last token; the task still says what was right."""
    args = flags()
    state, source = start(args)
    judge = tiny(seed=5)[0]
    torch.nn.init.normal_(judge.value_head.weight, generator=torch.Generator().manual_seed(0))
    state.agent.model.lm_head.weight.data[list(source.stop_ids)] *= 6.0  # so that lengths differ
    completions, scores, metrics = PPO.collect(state, source, judge, args, World())
    assert completions.lengths.unique().numel() > 1
    for row in range(16):
        real = completions.attention_mask[row]
        hidden = judge.model.base_model(completions.tokens[row][real].unsqueeze(0)).last_hidden_state[0, -1]
        torch.testing.assert_close(scores[row].float(), judge.value_head(hidden)[0], rtol=1e-5, atol=1e-5)
    assert float(metrics["charts/reward_mean"]) == pytest.approx(float(scores.mean()), abs=1e-5)
    assert metrics["charts/success"] == metrics["rewards/correct"] == 0.0  # on random bytes


def test_a_separate_critic_leaves_the_policy_alone():
    """With only the value loss, the policy gets no gradient from a critic of its own, and one from a shared trunk."""
    args = flags("--vf-coef", 1e3, "--ent-coef", 0, "--separate-critic")
    agent, critic = tiny(False)[0].double(), tiny()[0].double()
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    rollout = uneven(agent)
    rollout.advantages.zero_()
    recorder = Recorder([*agent.trainable(), *critic.trainable()])
    PPO.minibatch_step(agent, critic, recorder, rollout, torch.arange(6), RATE, args, World())
    own, others = recorder.grads[: len(agent.trainable())], recorder.grads[len(agent.trainable()) :]
    assert not any(grad.any() for grad in own) and any(grad.any() for grad in others)


# The run


def test_the_clip_is_the_one_of_control_and_of_grpo(monkeypatch):
    assert PPO.clipped_surrogate is core.clipped_surrogate is load_algorithm("ppo_continuous").clipped_surrogate
    monkeypatch.setattr(core, "clipped_surrogate", lambda *a, **k: pytest.fail("called"))
    broken, args = load_algorithm("llm_ppo"), flags()
    state, source = start(args)
    rollout, _ = rollout_of(args, state, source)
    with pytest.raises(pytest.fail.Exception, match="called"):
        broken.update(state, rollout, args, World())


def test_the_policy_finds_the_reward(monkeypatch):
    """Reward: the share of bytes below 128, at first about a half; soon the policy writes hardly anything else."""
    args = flags("--num-prompts", 64, "--learning-rate", 1e-2, "--no-anneal-lr")
    state, source = start(args)
    seen = []

    def score(examples, completions, group_size=1):
        low = torch.where(completions.mask, completions.ids < 128, False).sum(1) / completions.lengths
        seen.append(low.double())
        return seen[-1].unsqueeze(1)

    monkeypatch.setattr(source, "score", score)
    reference = state.agent.reference()
    for _ in range(14):
        PPO.update(state, rollout_of(args, state, source, reference)[0], args, World())
    assert seen[0].mean() < 0.6 and torch.cat(seen[-3:]).mean() > 0.8, [float(share.mean()) for share in seen]


@pytest.mark.parametrize("separate", [False, True])
def test_where_every_completion_is_worth_1_so_is_every_token(monkeypatch, separate):
    """The value of each token becomes 1. The policy is not moved, so there is nothing else to be learned."""
    args = flags(
        "--learning-rate", 1e-2, "--no-anneal-lr", "--ent-coef", 0, *(["--separate-critic"] if separate else [])
    )
    state, source = start(args, critic=tiny()[0] if separate else None)
    ones = torch.ones(16, 1, dtype=torch.float64)
    monkeypatch.setattr(source, "score", lambda examples, completions, group_size=1: ones)
    errors = []
    for _ in range(9):
        rollout, _ = rollout_of(args, state, source)
        errors.append((rollout.old_value - 1)[rollout.completions.mask].abs().mean())
        rollout.advantages.zero_()
        PPO.update(state, rollout, args, World())
    assert errors[0] == 1.0 and errors[-1] < 0.15, errors


def test_the_learning_rate_falls_by_the_share_of_tokens_sampled_before():
    args = flags("--learning-rate", 0.001, "--total-tokens", 1000)
    state, source = start(args)
    rates, expected = [], []
    for _ in range(3):
        expected.append(0.001 * (1 - state.global_step / 1000))
        rollout, _ = rollout_of(args, state, source)
        rates.append(float(PPO.update(state, rollout, args, World())["charts/learning_rate"]))
    assert expected[0] == 0.001 > expected[1] > expected[2]
    assert rates == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "extra", [("--reward-model", "judge"), ("--separate-critic", "--kl-target", "0.1", "--lora-rank", "2")]
)
def test_a_resumed_run_is_bit_equal(in_tmp, extra):
    judge, tokenizer, _ = tiny()
    save_reward_model(judge, in_tmp / "judge", tokenizer)
    PPO.main(flags("--run-dir", "whole", *extra))
    shutil.copytree("whole", "cut")  # as if killed after the last checkpoint but one
    (in_tmp / "cut/summary.json").unlink()
    shutil.rmtree("cut/policy")
    shutil.rmtree(sorted((in_tmp / "cut/checkpoints").iterdir())[-1])
    PPO.main(parse_args(PPO.Args, PPO.PRESETS, ["--resume", "cut"]))
    assert rows_without_clock(in_tmp / "whole") == rows_without_clock(in_tmp / "cut")
    one, two = (final_checkpoint(in_tmp / name) for name in ("whole", "cut"))
    assert one.keys() == two.keys() and [key for key in one if repr(one[key]) != repr(two[key])] == []
    assert len({(in_tmp / name / "policy/model.safetensors").read_bytes() for name in ("whole", "cut")}) == 1


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--num-minibatches", "5"], ["--num-minibatches 5", "16 completions"]),
        (["--top-p", "0.9"], ["--top-p 0.9", "exact"]),
        (["--kl-coef", "0", "--kl-target", "1"], ["--kl-coef 0", "above 0"]),
        (["--kl-horizon", "1", "--kl-target", "1"], ["--kl-horizon 1", "more than a fifth"]),
        (["--gae-lambda", "1.5"], ["--gae-lambda 1.5", "at most 1"]),
        (["--model", "no/such/folder/here"], ["no/such/folder/here"]),
        (["--reward-model", "no/such/folder/here"], ["no/such/folder/here"]),
        (["--max-length", "300"], ["--max-length 300", "context"]),
    ],
    ids=lambda value: value[0],
)
def test_bad_input_is_one_line(in_tmp, capsys, words, expected):
    with pytest.raises(SystemExit) as stop:
        PPO.main(flags(*words))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and all(word in err for word in expected), err
