"""Distillation: the three losses against plain log-softmaxes, by enumeration, and a run that can be resumed."""

import shutil

import pytest
import torch
from algo_helpers import final_checkpoint, load_algorithm, rows_without_clock

from cleanrl_zoo.llm import Completions, PromptSource, load_language_model, make_task
from cleanrl_zoo.run import parse_args
from cleanrl_zoo.run.distributed import World

DISTILL = load_algorithm("llm_distill")
DEBUG = ["--preset", "debug"]
RATE = torch.tensor(1e-3)
FORMS = ("full", "sampled", "forward")


def flags(*words):
    return parse_args(DISTILL.Args, DISTILL.PRESETS, [*DEBUG, *map(str, words)])


def tiny(seed=0, width=16):
    generator = torch.Generator().manual_seed(seed)
    return load_language_model("tiny", generator=generator, width=width, layers=1, heads=2)


def start(args):
    """State, source of prompts and teacher as main makes them, with smaller models; the teacher is the wider one."""
    agent, tokenizer, stop_ids = tiny()
    generator = torch.Generator().manual_seed(1)
    source = PromptSource(make_task("addition"), tokenizer, generator, 0, agent.context, stop_ids, World())
    return DISTILL.TrainState.create(args, agent), source, tiny(7, 24)[0].requires_grad_(False)


def uneven(dtype=torch.float64, count=6):
    """Completions of 1 to 4 tokens after prompts of 2 to 4, with log-probs that some sampler may have had."""
    generator = torch.Generator().manual_seed(3)
    lengths, prompts = torch.arange(count) % 4 + 1, torch.arange(count) % 3 + 2
    mask = torch.arange(4) < lengths.unsqueeze(1)
    prompt_mask = torch.arange(4) >= 4 - prompts.unsqueeze(1)
    prompt_ids, ids = (torch.randint(256, (count, 4), generator=generator) for _ in range(2))
    logprob = torch.where(mask, -5 - torch.rand(count, 4, generator=generator, dtype=dtype), 0.0)
    return Completions(prompt_ids, prompt_mask, ids, mask, logprob, torch.zeros(count, dtype=torch.bool))


def distributions(model, completions, temperature):
    """Log-probs [n, V] of all tokens where the n completion tokens stand, row by row and without padding."""
    found = []
    for row in range(len(completions.ids)):
        real, length = completions.attention_mask[row], int(completions.lengths[row])
        logits = model.model(completions.tokens[row][real].unsqueeze(0)).logits[0]
        found.append((logits[-length - 1 : -1] / temperature).log_softmax(-1))
    return torch.cat(found)


class Recorder:
    """In place of the optimizer: keeps the gradients and leaves the parameters alone."""

    def __init__(self, parameters):
        self.parameters, self.grads = list(parameters), []

    def step(self, grads, learning_rate):
        self.grads = [grad.clone() for grad in grads]


def gradient(args, agent, teacher, completions, index, world=None):
    recorder = Recorder(agent.trainable())
    world = World() if world is None else world
    stats = DISTILL.minibatch_step(agent, teacher, recorder, completions, index, RATE, args, world)
    return torch.cat([grad.flatten() for grad in recorder.grads]), dict(zip(DISTILL.STATS, stats, strict=False))


# The losses


@pytest.mark.parametrize("linear", [True, False], ids=["head", "logits"])
def test_the_full_form_is_the_exact_kl_and_its_gradient(monkeypatch, linear):
    """Σ_v π(v) (log π(v) − log π_T(v)), mean over the 13 tokens, at a temperature, in pieces of two rows."""
    monkeypatch.setattr(DISTILL, "PIECE", 2 * 258)
    agent, teacher, completions = tiny()[0].double(), tiny(7, 24)[0].double(), uneven()
    agent.linear_head = teacher.linear_head = linear
    logp, logq = (distributions(model, completions, 0.7) for model in (agent, teacher))
    expected = (logp.exp() * (logp - logq)).sum(-1)
    grads = torch.autograd.grad(expected.mean(), agent.trainable())
    args = flags("--temperature", 0.7, "--max-grad-norm", 1e9)
    found, stats = gradient(args, agent, teacher, completions, torch.arange(6))
    torch.testing.assert_close(found, torch.cat([grad.flatten() for grad in grads]), rtol=1e-9, atol=1e-12)
    assert float(stats["losses/loss"]) == pytest.approx(float(expected.mean().detach()), rel=1e-5)
    assert float(stats["losses/teacher_kl"]) == float(stats["losses/loss"])
    entropy = float(-(logp.exp() * logp).sum(-1).mean().detach())
    assert float(stats["losses/entropy"]) == pytest.approx(entropy, rel=1e-5)


def test_the_sampled_form_has_the_gradient_of_the_full_one_on_average():
    """One token, every token of the vocabulary as a sample weighted by its chance: E[∇ sampled] = ∇ KL(π‖π_T)."""
    agent, teacher = tiny()[0].double(), tiny(7, 24)[0].double()
    one = uneven().rows(torch.tensor([0]))  # a completion of one token
    everything = one.rows(torch.zeros(258, dtype=torch.long))
    everything.ids = torch.arange(258).unsqueeze(1)
    logp = distributions(agent, one, 1.0).detach()  # [1, 258]
    everything.logprob = logp.T.clone()
    loss, kl, _, _ = DISTILL.token_losses(agent, teacher, everything, flags("--form", "sampled"))
    sampled = torch.autograd.grad((logp.exp().T * loss).sum(), agent.trainable())
    exact, _ = DISTILL.token_kl(agent, teacher, one, 1.0)
    full = torch.autograd.grad(exact.sum(), agent.trainable())
    flat = [torch.cat([grad.flatten() for grad in grads]) for grads in (sampled, full)]
    torch.testing.assert_close(*flat, rtol=1e-4, atol=1e-6)  # Llama's norms pass gradients on in float32
    assert float((logp.exp().T * kl).sum()) == pytest.approx(float(exact.detach()), rel=1e-5)  # k3 is unbiased


def test_the_sampled_advantage_by_hand():
    """ℓ° = log ½, ℓ^T = log ⅛: A = −log 4; ratio 0.9 is inside the clip, 0.7 is not: losses −0.9 A and −0.8 A."""
    batch = uneven(torch.float32).rows(torch.tensor([1]))  # two tokens
    batch.logprob = torch.full((1, 2), 0.5).log()

    class Fixed:
        def __init__(self, probabilities):
            self.logprob = torch.tensor([probabilities]).log()

        def completion(self, *texts, **options):
            return self

    student, teacher = Fixed([0.45, 0.35]), Fixed([0.125, 0.125])
    student.entropy = torch.zeros(1, 2)
    loss, kl, _, logratio = DISTILL.token_losses(student, teacher, batch, flags("--form", "sampled"))
    log4 = 1.3862944
    torch.testing.assert_close(loss, torch.tensor([[0.9 * log4, 0.8 * log4]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(kl, torch.full((1, 2), 0.25 - 1 + log4), rtol=0, atol=1e-6)  # e^d − 1 − d, d = −log 4
    torch.testing.assert_close(logratio.exp(), torch.tensor([[0.9, 0.7]]), rtol=0, atol=1e-6)


def test_the_forward_form_is_supervised_learning_on_the_samples():
    agent, teacher, completions = tiny()[0].double(), tiny(7, 24)[0].double(), uneven()
    logp = distributions(agent, completions, 1.0).gather(1, completions.ids[completions.mask].unsqueeze(1))
    grads = torch.autograd.grad(-logp.mean(), agent.trainable())
    args = flags("--form", "forward", "--max-grad-norm", 1e9)
    found, stats = gradient(args, agent, teacher, completions, torch.arange(6))
    torch.testing.assert_close(found, torch.cat([grad.flatten() for grad in grads]), rtol=1e-9, atol=1e-12)
    assert float(stats["losses/loss"]) == pytest.approx(float(-logp.mean().detach()), rel=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_who_is_the_teacher_already_has_nothing_to_learn(form):
    """Teacher = student: KL 0; no gradient from the reverse KL. The forward form's is that of chance."""
    args = flags("--form", form)
    state, source, _ = start(args)
    teacher = tiny()[0].requires_grad_(False)
    completions, _ = DISTILL.collect(state, source, teacher, args)
    grad, stats = gradient(args, state.agent, teacher, completions, torch.arange(16))
    assert abs(stats["losses/teacher_kl"]) < 1e-6
    assert (grad.abs().max() < 1e-5) == (form != "forward")
    assert DISTILL.held_out_kl(state.agent, teacher, source, args) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_neither_the_micro_batch_nor_padding_nor_the_number_of_ranks_changes_the_gradient(form):
    agent, teacher, completions = tiny()[0].double(), tiny(7, 24)[0].double(), uneven()
    index = torch.tensor([3, 0, 5, 1, 4])

    def of(micro_batch, completions=completions, world=None):
        args = flags("--form", form, "--micro-batch", micro_batch, "--max-grad-norm", 1e9)
        return gradient(args, agent, teacher, completions, index, world)

    class Half(World):
        """One of two ranks, whose sum is left to the test."""

        def sum(self, tensors):
            return list(tensors)

    whole, stats = of(5)
    padded = completions.widen(9, 65, prompt_length=7)
    halves = [of(2, world=Half(rank, 2)) for rank in range(2)]
    sums = halves[0][0] + halves[1][0], {tag: halves[0][1][tag] + halves[1][1][tag] for tag in stats}
    for grad, numbers in (of(1), of(2), of(5, padded), sums):
        torch.testing.assert_close(grad, whole, rtol=1e-10, atol=1e-12)
        for tag in stats:
            assert float(numbers[tag]) == pytest.approx(float(stats[tag]), rel=1e-4, abs=1e-6)


def test_heads_that_are_padded_beyond_the_vocabulary_are_compared_where_both_have_tokens():
    rows, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64)
    teacher_rows, teacher_weight = torch.randn(3, 5, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    expected = DISTILL.piece_kl(rows, weight, teacher_rows, teacher_weight[:10], 1.0)
    for one, other in zip(DISTILL.piece_kl(rows, weight, teacher_rows, teacher_weight, 1.0), expected, strict=True):
        torch.testing.assert_close(one, other)


# The run


def test_who_samples():
    """The student, for the reverse KL; the teacher, for the forward one."""
    for form in FORMS:
        args = flags("--form", form)
        state, source, teacher = start(args)
        completions, metrics = DISTILL.collect(state, source, teacher, args)
        sampler = teacher if form == "forward" else state.agent
        out = sampler.completion(completions.tokens, completions.attention_mask, completions.mask)
        torch.testing.assert_close(completions.logprob, out.logprob.detach(), rtol=0, atol=1e-5)
        assert state.global_step == int(completions.mask.sum()) and metrics["charts/unscorable"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_the_student_comes_nearer_to_the_teacher(form):
    args = flags("--form", form, "--learning-rate", 1e-2, "--no-anneal-lr", "--num-prompts", 16)
    state, source, teacher = start(args)
    before = DISTILL.held_out_kl(state.agent, teacher, source, args)
    for _ in range(8):
        completions, _ = DISTILL.collect(state, source, teacher, args)
        metrics = DISTILL.update(state, completions, teacher, args, World())
    assert DISTILL.held_out_kl(state.agent, teacher, source, args) < 0.8 * before
    assert ("losses/forward_kl" in metrics) == (form == "forward")
    assert ("losses/approx_kl" in metrics) == (form == "sampled")


@pytest.mark.parametrize("form", ["full", "sampled"])
def test_a_resumed_run_is_bit_equal(in_tmp, form):
    DISTILL.main(flags("--run-dir", "whole", "--form", form))
    shutil.copytree("whole", "cut")  # as if killed after the last checkpoint but one
    (in_tmp / "cut/summary.json").unlink()
    shutil.rmtree("cut/policy")
    shutil.rmtree(sorted((in_tmp / "cut/checkpoints").iterdir())[-1])
    DISTILL.main(parse_args(DISTILL.Args, DISTILL.PRESETS, ["--resume", "cut"]))
    assert rows_without_clock(in_tmp / "whole") == rows_without_clock(in_tmp / "cut")
    assert "eval/teacher_kl" in rows_without_clock(in_tmp / "cut")[-1]
    one, two = (final_checkpoint(in_tmp / name) for name in ("whole", "cut"))
    assert one.keys() == two.keys() and [key for key in one if repr(one[key]) != repr(two[key])] == []
    assert len({(in_tmp / name / "policy/model.safetensors").read_bytes() for name in ("whole", "cut")}) == 1


def test_a_teacher_with_other_tokens_is_refused_in_one_line(in_tmp, capsys):
    agent, tokenizer, _ = tiny()
    tokenizer.add_tokens(["<more>"])
    agent.save(in_tmp / "other", tokenizer)
    with pytest.raises(SystemExit) as stop:
        DISTILL.main(flags("--teacher", "other"))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert all(word in err for word in ("--teacher other", "259 tokens", "258", "--model tiny")), err


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--num-minibatches", "5"], ["--num-minibatches 5", "16 completions"]),
        (["--top-p", "0.9"], ["--top-p 0.9", "exact"]),
        (["--teacher", "no/such/folder/here"], ["no/such/folder/here"]),
        (["--teacher", "None"], ["--teacher"]),
        (["--form", "both"], ["form", "both"]),
    ],
    ids=lambda value: value[0],
)
def test_bad_input_is_one_line(in_tmp, capsys, words, expected):
    with pytest.raises(SystemExit) as stop:
        DISTILL.main(flags(*words))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and all(word in err for word in expected), err
