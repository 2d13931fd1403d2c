"""Direct Preference Optimization and its family: every loss against the formulas, where pairs come from, whole runs."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algo_helpers import args_for, load_algorithm, rows_without_clock
from language_helpers import assert_same_run, cut_short

from cleanrl_zoo import core
from cleanrl_zoo.llm import LanguageModel, PromptSource, load_language_model, make_task
from cleanrl_zoo.llm.pairs import Preferences, encode, save_reward_model, task_pairs, unpair
from cleanrl_zoo.llm.tokenizer import byte_tokenizer
from cleanrl_zoo.run import parse_args, torch_generator
from cleanrl_zoo.run.distributed import World

dpo = load_algorithm("dpo")
PAD, END = 256, 257
PAIRED = ("dpo", "ipo", "hinge", "odpo", "simpo", "orpo", "spin")


def gpt2(lora_rank=0, dropout=0.0):
    """A random model with learned positions, which padding on the left would move, and dropout in its config."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=258, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=END,
        pad_token_id=PAD, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.GPT2LMHeadModel(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.0, 0.2)
    return LanguageModel(model, lora_rank, generator=torch.Generator().manual_seed(4))


def pairs_of(count=6):
    """Pairs with texts of many lengths, and scores."""
    texts = [("1", "42"), ("one", "x"), ("seven", "hello"), ("a", "b"), ("quite long", "no"), ("", "")]
    return [
        dpo.Pair(f"{i}{'+' * (i % 4)}=", texts[i % 5][0] + str(i), texts[i % 5][1] + "?", 1.0 + i / 2, 0.5)
        for i in range(count)
    ]


def start(agent=None, count=6, reference=None, **changes):
    """Flags, state, one batch of all pairs, and the reference, whose log-probs the batch knows."""
    args = args_for(dpo, **changes)
    agent = agent or gpt2()
    items = unpair(pairs_of(count)) if args.loss == "kto" else pairs_of(count)
    data = encode(byte_tokenizer(), items, END, 0, 32)
    reference = reference or agent.reference()
    data.ref_logprob = dpo.summed_logprobs(reference.model, data, args, World())
    state = dpo.TrainState.create(args, agent, len(data))
    index = torch.arange(len(data))
    batch = dpo.Batch(data.batch(index), data.values, data.ref_logprob)
    return args, state, batch, reference


def step(state, batch, reference, args, monkeypatch, world=World()):  # noqa: B008
    """What `update` reports, and its gradient; the weights stay as they are."""
    found = []

    def note(grads, max_norm):
        found.extend(grads)
        return grads, torch.zeros(())

    with monkeypatch.context() as patch:
        patch.setattr(dpo, "clip_grad_norm", note)
        patch.setattr(state.optimizer, "step", lambda *_: None)
        metrics = dpo.update(state, batch, reference, args, world)
    return metrics, torch.cat([grad.flatten() for grad in found])


def moved(agent, scale=0.05):
    """The agent a little away from where it was."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in agent.trainable():
            weight += scale * torch.randn(weight.shape, generator=generator, dtype=torch.float32)
    return agent


# The start


@pytest.mark.parametrize("lora", ["none", "zero adapter", "adapter that is not zero"])
@pytest.mark.parametrize("left, right", [(0, 0), (5, 3)])
@pytest.mark.parametrize(
    "loss, first", [("dpo", math.log(2)), ("spin", math.log(2)), ("ipo", 25), ("hinge", 1), ("kto", 0.5)]
)
def test_step_0_prefers_nothing(monkeypatch, loss, first, lora, left, right):
    """Dropout ½ in the config, padding on either side: h = 0, so log 2; (0 − 1/(2 · 0.1))² = 25; 1; 1 − σ(0)."""
    if lora != "none":
        pytest.importorskip("peft")
    agent = gpt2(0 if lora == "none" else 4, dropout=0.5)
    if lora == "adapter that is not zero":
        moved(agent, 0.3)
    args, state, batch, reference = start(agent, loss=loss)
    batch.completions = batch.completions.widen(
        batch.completions.ids.shape[1] + right, PAD, batch.completions.prompt_ids.shape[1] + left
    )
    metrics, gradient = step(state, batch, reference, args, monkeypatch)
    assert metrics["losses/loss"].item() == pytest.approx(first, abs=1e-5)
    assert metrics["rewards/margin"].item() == pytest.approx(0, abs=1e-5)
    assert metrics["rewards/accuracy"].item() == 0.5
    assert gradient.norm() > 1e-3


# The losses


def plain_logprob(model, prompt, text):
    """Sum of a text's log-probs from the model's logits, alone and without padding."""
    logits = model.model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(text)), text].sum()


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def expected_loss(loss, policy, ref, lengths, values):
    """The formulas of the header once more, in Python, of one pair. β ½, α 3, γ ¼."""
    (w, lose), (rw, rl), (n, k) = policy, ref, lengths
    h = (w - rw) - (lose - rl)
    if loss in ("dpo", "spin"):
        return -(sigmoid(h / 2)).log()
    if loss == "odpo":
        return -(sigmoid(h / 2 - 3 * values)).log()
    if loss == "ipo":
        return (h - 1) ** 2
    if loss == "hinge":
        return (1 - h / 2).clamp(min=0)
    if loss == "simpo":
        return -(sigmoid((w / n - lose / k) / 2 - 0.25)).log()
    p, q = (w / n).exp(), (lose / k).exp()
    return -w / n - 0.5 * sigmoid((p / (1 - p)).log() - (q / (1 - q)).log()).log()


FLAGS = {"beta": 0.5, "offset_weight": 3, "gamma": 0.25}


@pytest.mark.parametrize("micro_batch", [2, 4, 64])
@pytest.mark.parametrize("loss", PAIRED)
def test_every_loss_and_gradient_equals_the_formula_pair_by_pair(monkeypatch, loss, micro_batch):
    """In float64, batched, padded and split against each text alone; the mean is over the pairs of the step."""
    agent = gpt2().double()
    reference = agent.reference()
    frozen = gpt2().double()
    moved(agent)
    args, state, batch, _ = start(agent, reference=reference, loss=loss, micro_batch=micro_batch, **FLAGS)
    batch.ref_logprob = None  # comes from the reference as it goes
    metrics, gradient = step(state, batch, reference, args, monkeypatch)

    total, rewards = 0, []
    for pair in pairs_of():
        prompt, texts = list(pair.prompt.encode()), [[*text.encode(), END] for text in (pair.chosen, pair.rejected)]
        policy = [plain_logprob(agent, prompt, text) for text in texts]
        with torch.no_grad():
            ref = [plain_logprob(frozen, prompt, text) for text in texts]
        lengths = [len(text) for text in texts]
        total = total + expected_loss(loss, policy, ref, lengths, pair.chosen_score - pair.rejected_score) / 6
        scaled = [p / n for p, n in zip(policy, lengths, strict=True)]
        both = scaled if loss in dpo.REFERENCE_FREE else [p - r for p, r in zip(policy, ref, strict=True)]
        rewards.append([0.5 * x.item() for x in both])
    grads = torch.autograd.grad(total, agent.trainable())
    expected = torch.cat([grad.flatten() for grad in grads])
    assert metrics["losses/loss"].item() == pytest.approx(total.item(), rel=1e-6)  # noted in float32
    assert (gradient - expected).norm() <= 1e-10 * expected.norm()
    chosen, rejected = np.mean(rewards, 0)
    assert metrics["rewards/chosen"].item() == pytest.approx(chosen, rel=1e-5, abs=1e-6)
    assert metrics["rewards/margin"].item() == pytest.approx(chosen - rejected, rel=1e-5, abs=1e-6)
    assert metrics["rewards/accuracy"].item() == pytest.approx(np.mean([w > x for w, x in rewards]))
    mean = np.mean([len(pair.chosen.encode()) + 1 for pair in pairs_of()])
    assert metrics["rewards/chosen_length"].item() == pytest.approx(mean)


def test_the_averaged_form_of_ipo(monkeypatch):
    """Each of the four log-probs is divided by its own length: (h̄ − 1)², β ½."""
    agent = gpt2().double()
    reference, frozen = agent.reference(), gpt2().double()
    moved(agent)
    args, state, batch, _ = start(agent, reference=reference, loss="ipo", average=True, beta=0.5)
    batch.ref_logprob = None
    metrics, _ = step(state, batch, reference, args, monkeypatch)
    total = 0.0
    for pair in pairs_of():
        h = 0.0
        for text, sign in ((pair.chosen, 1), (pair.rejected, -1)):
            ids = [*text.encode(), END]
            with torch.no_grad():
                both = [plain_logprob(model, list(pair.prompt.encode()), ids) for model in (agent, frozen)]
            h += sign * float(both[0] - both[1]) / len(ids)
        total += (h - 1) ** 2 / 6
    assert metrics["losses/loss"].item() == pytest.approx(total, rel=1e-6)


def test_kto_by_the_formula(monkeypatch):
    """z0: each completion after the prompt half the batch further on, unless that is its own prompt."""
    agent = gpt2().double()
    reference, frozen = agent.reference(), gpt2().double()
    moved(agent)
    flags = {"loss": "kto", "beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 0.5}
    args, state, batch, _ = start(agent, count=3, reference=reference, **flags)
    batch.ref_logprob = None
    rows = unpair(pairs_of(3))
    # rolled by 3: completion i meets the prompt of row i − 3: rows 0, 1 | 2, 3 | 4, 5 share prompts 0 | 1 | 2
    others = [(row, rows[i - 3].prompt) for i, row in enumerate(rows) if rows[i - 3].prompt != row.prompt]
    assert len(others) == 6

    def logratio(prompt, text, graph=False):
        ids = [*text.encode(), END]
        with torch.no_grad():
            ref = plain_logprob(frozen, list(prompt.encode()), ids)
        with torch.set_grad_enabled(graph):
            return plain_logprob(agent, list(prompt.encode()), ids) - ref

    z0 = max(0.0, np.mean([float(logratio(prompt, row.completion)) for row, prompt in others]))
    total = 0
    for row in rows:
        t = logratio(row.prompt, row.completion, graph=True)
        total = total + (2 * (1 - sigmoid((t - z0) / 2)) if row.label else 0.5 * (1 - sigmoid((z0 - t) / 2))) / 6
    expected = torch.cat([grad.flatten() for grad in torch.autograd.grad(total, agent.trainable())])
    for micro_batch in (1, 4, 64):
        args.micro_batch = micro_batch
        metrics, gradient = step(state, batch, reference, args, monkeypatch)
        assert metrics["rewards/kto_baseline"].item() == pytest.approx(z0, rel=1e-9)
        assert metrics["losses/loss"].item() == pytest.approx(total.item(), rel=1e-6)
        assert (gradient - expected).norm() <= 1e-10 * expected.norm()


def test_z0_leaves_out_what_is_not_mismatched(monkeypatch):
    """Four completions of one prompt: nothing is mismatched, z0 is 0. So it is where prompt and completion together
    would not fit into the context of 32."""
    agent = moved(gpt2())
    reference = gpt2().reference()
    one = [dpo.Judged("p", text, True) for text in "abcd"]
    long = [dpo.Judged("p" * 20, "a", True), dpo.Judged("q", "b" * 20, True)]
    args = args_for(dpo, loss="kto")
    found = []
    for items in (one, long):
        completions = encode(byte_tokenizer(), items, END, 0, 32).batch(torch.arange(len(items)))
        found.append(dpo.mismatched_kl(agent, reference, completions, args, World()).item())
    # only "a" after "q": "b" · 20 after "p" · 20 has no room
    row = encode(byte_tokenizer(), [dpo.Judged("q", "a", True)], END, 0, 32).batch(torch.tensor([0]))
    inputs = (row.tokens, row.attention_mask, row.mask)
    with torch.no_grad():
        t = (agent.completion(*inputs).logprob - reference.completion(*inputs).logprob).sum().item()
    assert t > 0.01  # so that the bound at 0 is not what is seen
    assert found == [0, pytest.approx(t, rel=1e-4)]


# What must not matter


@pytest.mark.parametrize("loss", [*PAIRED, "kto"])
def test_split_padding_and_order_do_not_matter(monkeypatch, loss):
    agent = gpt2()
    reference = agent.reference()
    moved(agent)
    args, state, batch, _ = start(agent, reference=gpt2().reference(), loss=loss)
    _, whole = step(state, batch, reference, args, monkeypatch)

    def differs(other):
        return ((whole - other).norm() / whole.norm()).item()

    args.micro_batch = 3
    assert differs(step(state, batch, reference, args, monkeypatch)[1]) < 1e-5
    args.micro_batch = 64
    wide = batch.completions.widen(20, PAD, 9)
    wide.ids[~wide.mask], wide.prompt_ids[~wide.prompt_mask] = 7, 9  # and what stands in the padding
    other = dpo.Batch(wide, batch.values, batch.ref_logprob)
    assert differs(step(state, other, reference, args, monkeypatch)[1]) < 1e-5
    if loss != "kto":
        items = torch.randperm(len(batch.values), generator=torch.Generator().manual_seed(0))
        rows = (2 * items.unsqueeze(1) + torch.arange(2)).flatten()
        other = dpo.Batch(batch.completions.rows(rows), batch.values[items], batch.ref_logprob[rows])
        assert differs(step(state, other, reference, args, monkeypatch)[1]) < 1e-5


def test_the_gradients_of_two_ranks_add_up_to_the_whole(monkeypatch):
    class Alone(World):
        def sum(self, tensors):
            return list(tensors)

    agent = moved(gpt2())
    args, state, batch, reference = start(agent, count=5, reference=gpt2().reference())
    whole, gradient = step(state, batch, reference, args, monkeypatch)
    parts = [step(state, batch, reference, args, monkeypatch, Alone(rank, 2)) for rank in (0, 1)]
    assert (parts[0][1] + parts[1][1] - gradient).norm() < 1e-6 * gradient.norm()
    for tag in ("losses/loss", "rewards/accuracy", "rewards/chosen_logprob"):
        assert (parts[0][0][tag] + parts[1][0][tag]).item() == pytest.approx(whole[tag].item(), rel=1e-5)


def test_an_offline_batch_is_the_same_in_any_order_of_drawing():
    """Within a step short pairs come first, equally long ones as in the file; each pass takes every pair once."""
    args, state, _, _ = start(count=7, batch_size=3)
    data = encode(byte_tokenizer(), pairs_of(7), END, 0, 32)
    data.values = torch.arange(7.0)
    for _ in range(2):
        seen = []
        for _ in range(3):
            batch, metrics = dpo.collect(state, None, data, None, args, World())
            places = [(int(data.total_lengths[int(number)]), number) for number in batch.values]
            assert places == sorted(places) and 2 <= len(places) <= 3
            assert metrics == {} and batch.ref_logprob is None
            seen += batch.values.tolist()
        assert sorted(seen) == list(range(7))
    assert state.global_step == 2 * int(data.lengths.sum()) and state.epoch == 2


@pytest.mark.parametrize("name", ["dpo", "ipo", "hinge", "simpo", "orpo", "kto", "aggregate", "preference_accuracy"])
def test_the_core_functions_are_the_ones_that_run(monkeypatch, name):
    assert getattr(dpo, name) is getattr(core, name)
    args, state, batch, reference = start(loss=name if name in (*PAIRED, "kto") else "dpo")

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(dpo, name, broken)
    with pytest.raises(ZeroDivisionError):
        dpo.update(state, batch, reference, args, World())


# Pairs that are sampled


def addition(args, agent=None):
    """A tiny model on the addition task."""
    agent, tokenizer, stops = load_language_model(
        "tiny", generator=torch_generator(1, "init"), width=16, layers=1, heads=2
    )
    generator = torch_generator(args.seed, "prompts")
    return agent, PromptSource(make_task("addition"), tokenizer, generator, 0, agent.context, stops, World())


def test_online_the_better_sample_is_chosen(monkeypatch):
    """Rewards 1, 0 | 0, 1 | 1, 1 | 0, 0 | NaN, 1 | 2, 5: three pairs, all of whose tokens count as sampled."""
    args = args_for(dpo, online=True, batch_size=6)
    agent, source = addition(args)
    state = dpo.TrainState.create(args, agent, 0)
    nan = float("nan")
    rewards = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [nan, 1], [2, 5]], dtype=torch.float64)
    complete, sampled = source.complete, []

    def judged(*inputs):
        completions, _ = complete(*inputs)
        sampled.append(completions)
        return completions, rewards.unsqueeze(-1)

    monkeypatch.setattr(source, "complete", judged)
    batch, metrics = dpo.collect(state, source, None, None, args, World())
    rows = [0, 1, 3, 2, 11, 10]
    width = batch.completions.ids.shape[1]
    assert torch.equal(batch.completions.ids, sampled[0].ids[rows, :width])
    assert batch.values.tolist() == [1, 1, 3] and batch.ref_logprob is None
    assert state.global_step == int(sampled[0].mask.sum())
    assert metrics["charts/zero_std_groups"].item() == 0.5 and metrics["charts/unscorable"].item() == 1
    assert metrics["charts/reward_mean"].item() == pytest.approx(12 / 11)  # of those that were scored
    assert len(source.pop_episodes()) == 11
    rewards[:] = 1
    batch, _ = dpo.collect(state, source, None, None, args, World())
    before = [weight.clone() for weight in agent.trainable()]
    assert len(batch.values) == 0 and dpo.update(state, batch, None, args, World()) == {}
    assert all(torch.equal(one, two) for one, two in zip(before, agent.trainable(), strict=True))


def test_online_a_reward_model_judges(monkeypatch):
    """Its scores of the 2P samples, micro-batch by micro-batch, decide; the task's rewards are still reported."""
    args = args_for(dpo, online=True, batch_size=4, micro_batch=3)
    agent, source = addition(args)
    scores = torch.tensor([0.0, 2, 5, 1, 3, 3, -1, -2])
    seen = []

    def value(model, completions, pad_id):
        first = sum(map(len, seen))
        seen.append(completions.ids)
        return scores[first : first + len(completions.ids)]

    monkeypatch.setattr(dpo, "final_values", value)
    state = dpo.TrainState.create(args, agent, 0)
    batch, _ = dpo.collect(state, source, None, agent, args, World())
    assert [len(ids) for ids in seen] == [3, 3, 2]
    assert batch.values.tolist() == [2, 4, 1]
    width = batch.completions.ids.shape[1]
    sampled = torch.cat([torch.nn.functional.pad(ids, (0, 8 - ids.shape[1]), value=PAD) for ids in seen])
    assert torch.equal(batch.completions.ids, sampled[[1, 0, 2, 3, 6, 7], :width])


def test_spin_learns_from_its_own_samples_of_the_iteration_before(monkeypatch):
    args = args_for(dpo, loss="spin", num_pairs=6, batch_size=3, spin_epochs=2, learning_rate=0.01)
    agent, source = addition(args)
    state = dpo.TrainState.create(args, agent, 6)
    pools = []
    for iteration in range(2):
        for number in range(4):  # two passes of two steps
            before = {name: value.clone() for name, value in agent.state_dict().items()}
            batch, _ = dpo.collect(state, source, None, None, args, World())
            if number == 0:
                start_of_iteration = before
            frozen = agent.reference()
            frozen.weights = start_of_iteration
            few = batch.completions
            out = frozen.completion(few.tokens, few.attention_mask, few.mask)
            torch.testing.assert_close(batch.ref_logprob, out.logprob.sum(1), rtol=0, atol=1e-5)
            metrics = dpo.update(state, batch, None, args, World())
            assert (abs(metrics["losses/loss"].item() - math.log(2)) < 1e-5) == (number == 0)
        pools.append({name: value.clone() for name, value in state.pool.items()})
        assert len(state.pool["prompt_ends"]) == 6 and state.epoch == 2 * (iteration + 1)
    assert not torch.equal(pools[0]["prompts"], pools[1]["prompts"])
    # the chosen ones are the task's answers
    pool = Preferences(**pools[0], pad_id=PAD)
    rows = pool.batch(torch.arange(6))
    for number in range(6):
        prompt = bytes(rows.prompt_ids[2 * number][rows.prompt_mask[2 * number]].tolist()).decode()
        text = bytes(rows.ids[2 * number][rows.mask[2 * number]].tolist()[:-1]).decode()
        assert text == str(sum(map(int, prompt.rstrip("=").split("+"))))[::-1]


# Learning, whole runs, resume


def run(folder, *flags):
    dpo.main(parse_args(dpo.Args, dpo.PRESETS, ["--preset", "debug", *flags, "--run-dir", folder]))
    return rows_without_clock(Path(folder))


KINDS = {
    "dpo": ["--loss", "dpo"],
    "lora": ["--loss", "dpo", "--lora-rank", "2"],
    "ipo": ["--loss", "ipo", "--average"],
    "hinge": ["--loss", "hinge"],
    "odpo": ["--loss", "odpo", "--offset-scale", "log"],
    "simpo": ["--loss", "simpo"],
    "orpo": ["--loss", "orpo"],
    "kto": ["--loss", "kto"],
    "spin": ["--loss", "spin", "--num-pairs", "16"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_which_is_better_and_resumes_bit_equal(in_tmp, kind):
    """Task pairs, right against random answers. The run is cut at its first checkpoint and goes on from there."""
    flags = [*KINDS[kind], "--learning-rate", "0.003", "--eval-every", "256"]
    rows = run("whole", *flags)
    assert rows[-1]["rewards/accuracy"] > 0.6 and "losses/ref_kl" in rows[-1] and rows[-1]["losses/ref_kl"] > 0
    assert rows[-1]["losses/loss"] < rows[0]["losses/loss"]
    assert (in_tmp / "whole/policy/model.safetensors").exists() and not (in_tmp / "whole/pairs.jsonl").exists()
    assert len(list((in_tmp / "whole/checkpoints").iterdir())) == 2
    cut_short(in_tmp / "whole", in_tmp / "cut")
    dpo.main(parse_args(dpo.Args, dpo.PRESETS, ["--resume", "cut"]))
    assert_same_run(in_tmp / "whole", in_tmp / "cut")


def save_model_that_stops(folder):
    """One that ends a text after about three bytes: all hidden states share a direction, which the stop token likes."""
    model, tokenizer, _ = load_language_model("tiny", generator=torch_generator(1, "init"))
    with torch.no_grad():
        model.model.model.embed_tokens.weight += 1
        model.model.lm_head.weight[END] += 5 / 64  # hidden states are about 1 in all 64 places
    model.save(folder, tokenizer)


def test_sampled_pairs_are_kept_and_online_runs_resume(in_tmp, monkeypatch):
    """Pairs of the model's own samples, judged by a reward of the working directory; then the same reward online."""
    (in_tmp / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}:"}) + "\n" for i in range(40)))
    (in_tmp / "rewards_here.py").write_text("def odd(prompt, completion):\n    return len(completion.encode()) % 3\n")
    monkeypatch.syspath_prepend(in_tmp)
    save_model_that_stops(in_tmp / "model")
    task = [
        "--model",
        "model",
        "--task",
        "thirds",
        "--prompts",
        "prompts.jsonl",
        "--reward",
        "rewards_here:odd",
        "--max-length",
        "6",
    ]
    sampled = [*task, "--pairs-from", "model", "--num-pairs", "24", "--pair-samples", "4"]
    for name, flags in (("pairs", sampled), ("online", [*task, "--online"])):
        rows = run(f"{name}-whole", *flags)
        cut_short(in_tmp / f"{name}-whole", in_tmp / f"{name}-cut")
        dpo.main(parse_args(dpo.Args, dpo.PRESETS, ["--resume", f"{name}-cut"]))
        assert_same_run(in_tmp / f"{name}-whole", in_tmp / f"{name}-cut")
        assert (in_tmp / f"{name}-whole/pairs.jsonl").exists() == (name == "pairs")
    made = [json.loads(line) for line in (in_tmp / "pairs-whole/pairs.jsonl").read_text().splitlines()]
    assert len(made) == 24
    for row in made:
        scores = [len(row[name].encode()) % 3 for name in ("chosen", "rejected")]
        assert scores == [row["chosen_score"], row["rejected_score"]] and scores[0] > scores[1]
    assert "charts/reward_mean" in rows[-1] and "charts/episodic_return" in rows[-1]


def test_pairs_from_a_file_judged_by_held_out_pairs(in_tmp, capsys):
    """Prefer "y" to "n" after any prompt: 40 pairs, one without use, one too long, which is among the 8 held out."""
    rows = [{"prompt": f"{i}?", "chosen": "y", "rejected": "n"} for i in range(40)]
    rows += [{"prompt": "a", "chosen": "same", "rejected": "same"}, {"prompt": "b", "chosen": "y" * 9, "rejected": "n"}]
    (in_tmp / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--pairs", "answers.jsonl", "--evaluate", "pairs", "--held-out-pairs", "0.2", "--max-length", "4"]
    for loss in ("dpo", "kto", "simpo"):
        logged = run(loss, *flags, "--loss", loss, "--learning-rate", "0.01")
        assert logged[-1]["eval/episodic_return"] > 0.9
        summary = json.loads((in_tmp / loss / "summary.json").read_text())
        assert summary["env"] == "answers" and len(summary["final_eval"]["returns"]) == (15 if loss == "kto" else 7)
    err = capsys.readouterr().err
    assert err.count("note: pairs answers.jsonl: 1 of 42 pairs have the same text") == 3
    assert err.count("were too long") == 3 and "agreement, held-out pairs" in err


def test_online_with_a_reward_model(in_tmp):
    generator = torch.Generator().manual_seed(1)
    model, tokenizer, _ = load_language_model("tiny", value_head=True, generator=generator)
    torch.nn.init.normal_(model.value_head.weight, generator=generator)
    save_reward_model(model, in_tmp / "judge", tokenizer)
    rows = run("online", "--online", "--reward-model", "judge", "--learning-rate", "0.001")
    assert rows[-1]["charts/zero_std_groups"] < 0.5 and rows[0]["rewards/accuracy"] >= 0.4


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            ["--loss", "kto", "--batch-size", "1"],
            ["--batch-size 1", "kto compares with completions after other prompts"],
        ),
        (["--loss", "cpo"], ["--loss", "cpo"]),
        (["--micro-batch", "1"], ["--micro-batch 1", "both completions of a pair"]),
        (["--beta", "0"], ["--beta 0", "above 0"]),
        (["--label-smoothing", "0.7"], ["--label-smoothing 0.7", "at most 0.5"]),
        (["--label-smoothing", "0.1", "--loss", "ipo"], ["--label-smoothing 0.1", "--loss ipo has none"]),
        (["--average"], ["--average", "is a form of ipo"]),
        (["--online", "--loss", "kto"], ["--online", "learns without pairs"]),
        (["--online", "--loss", "spin"], ["--online", "samples what it rejects by itself"]),
        (["--online", "--pairs", "x.jsonl"], ["--pairs x.jsonl", "with --online the pairs are sampled"]),
        (["--loss", "spin", "--pairs", "x.jsonl"], ["--pairs x.jsonl", "with --loss spin the pairs are sampled"]),
        (["--online", "--evaluate", "pairs"], ["--evaluate pairs", "give task"]),
        (["--evaluate", "pairs", "--show-samples", "2"], ["--show-samples 2", "samples nothing"]),
        (["--reward-model", "x"], ["--reward-model x", "add --online"]),
        (["--online", "--top-p", "0.9"], ["--top-p 0.9", "exact log-probs"]),
        (["--online", "--reward-model", "nowhere"], ["nowhere", "no such folder"]),
        (["--pairs", "nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
        (["--pair-samples", "1"], ["--pair-samples 1", "at least 2"]),
        (["--pairs-from", "model"], ["0 of 32 pairs were found", "nearly always right, or wrong"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_bad_input_is_one_line(in_tmp, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        run("never", *flags)
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    if "found" not in words[0]:
        assert stop.value.code == 2 and err.count("\n") == 1 and list(in_tmp.iterdir()) == []


def test_a_bad_row_names_its_line(in_tmp, capsys):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (in_tmp / "x.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    with pytest.raises(SystemExit) as stop:
        run("never", "--pairs", "x.jsonl")
    assert stop.value.code == 2
    assert (
        capsys.readouterr().err
        == "error: pairs x.jsonl line 2: has no column rejected; a row here has prompt, chosen and rejected\n"
    )


def test_the_fields_of_the_batch_are_used(monkeypatch):
    """Cached reference log-probs are taken as they are: 1 nat more for every chosen one moves h by −1."""
    args, state, batch, reference = start()
    batch.ref_logprob = batch.ref_logprob + torch.tensor([1.0, 0.0]).repeat(6)
    metrics, _ = step(state, batch, None, args, monkeypatch)
    assert metrics["losses/loss"].item() == pytest.approx(math.log(1 + math.exp(0.1)), abs=1e-5)
    assert metrics["rewards/margin"].item() == pytest.approx(-0.1, abs=1e-5)
    assert metrics["rewards/accuracy"].item() == 0


def test_the_learning_rate_rises_over_the_first_steps(monkeypatch):
    args, state, batch, reference = start(warmup=2, learning_rate=0.01)
    rates = [dpo.update(state, batch, reference, args, World())["charts/learning_rate"] for _ in range(3)]
    assert rates == [0.005, 0.01, 0.01]


def test_task_pairs_do_not_move_the_sources_own_generator():
    args = args_for(dpo)
    agent, source = addition(args)
    before = source.generator.get_state()
    dpo.make_items(agent, source, args, SimpleNamespace(), World())
    assert torch.equal(source.generator.get_state(), before)
    assert (
        task_pairs(source.task, 3, torch_generator(args.seed, "prompts"))[0].prompt
        == source.task.draw(3, torch_generator(args.seed, "prompts"))[0].prompt
    )
