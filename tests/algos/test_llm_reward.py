"""The reward model: its loss pair by pair, what must not matter, whole runs, and the folder that it leaves."""

import json
import math

import pytest
import torch
from algo_helpers import load_algorithm, rows_without_clock
from language_helpers import DEBUG, Half, Recorder, assert_same_run, cut_short, tiny

from cleanrl_zoo import core
from cleanrl_zoo.llm.pairs import Pair, PairSource, encode, final_values, load_reward_model, task_pairs
from cleanrl_zoo.llm.tasks import make_task
from cleanrl_zoo.llm.tokenizer import byte_tokenizer
from cleanrl_zoo.run import parse_args, torch_generator
from cleanrl_zoo.run.distributed import World

reward = load_algorithm("llm_reward")
PAD, END = 256, 257
PAIRS = [
    Pair("1+1=", "2", "three", 2.0, 1.0),
    Pair("a", "long text", "b", 0.5, 0.0),
    Pair("12345", "y", "n", 4.0, 1.0),
    Pair("?", "no", "yes!", 1.0, 0.25),
]


def start(random_head=True, dtype=torch.float64, **changes):
    """Flags, state with a head that is not zero, and all pairs as one batch."""
    words = [word for name, value in changes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    args = parse_args(reward.Args, reward.PRESETS, [*DEBUG, *words])
    agent, *_ = tiny(value_head=True)
    if random_head:
        torch.nn.init.normal_(agent.value_head.weight, generator=torch.Generator().manual_seed(5))
    agent = agent.to(dtype)
    state = reward.TrainState.create(args, agent, len(PAIRS))
    state.optimizer = Recorder(agent.trainable())
    data = encode(byte_tokenizer(), PAIRS, END, 0, 64)
    return args, state, data.batch(torch.arange(len(PAIRS))), data.values.to(dtype)


def gradient_of(args, state, completions, difference, monkeypatch, world=World()):  # noqa: B008
    monkeypatch.setattr(reward, "clip_grad_norm", lambda grads, _: (grads, torch.zeros(())))
    source = PairSource("pairs")
    metrics = reward.update(state, completions, difference, source, args, world, PAD)
    return metrics, torch.cat([grad.flatten() for grad in state.optimizer.grads]), source


def plain_scores(agent):
    """Scores [4, 2] from the last hidden state of each text alone, without padding."""
    rows = []
    for pair in PAIRS:
        for text in (pair.chosen, pair.rejected):
            ids = torch.tensor([[*pair.prompt.encode(), *text.encode(), END]])
            hidden = agent.model.model(ids).last_hidden_state[0, -1]
            rows.append(agent.value_head(hidden).squeeze())
    return torch.stack(rows).view(-1, 2)


@pytest.mark.parametrize("micro_batch", [2, 5, 64])
@pytest.mark.parametrize("margin, center", [(False, 0.0), (True, 0.0), (False, 0.5), (True, 0.01)])
def test_loss_and_gradient_equal_the_formula_pair_by_pair(monkeypatch, margin, center, micro_batch):
    """−log σ(r_w − r_l − m) + c (r_w + r_l)², the mean over 4 pairs, in float64. m: 1, ½, 3, ¾."""
    args, state, completions, difference = start(center_coef=center, micro_batch=micro_batch)
    args.margin = margin
    metrics, gradient, source = gradient_of(args, state, completions, difference, monkeypatch)
    scores = plain_scores(state.agent)
    offsets = torch.tensor([1, 0.5, 3, 0.75], dtype=torch.float64) if margin else 0.0
    z = scores[:, 0] - scores[:, 1] - offsets
    loss = ((1 + (-z).exp()).log() + center * scores.sum(1) ** 2).mean()
    grads = torch.autograd.grad(loss, state.agent.trainable(), materialize_grads=True)
    expected = torch.cat([grad.flatten() for grad in grads])
    assert metrics["losses/loss"].item() == pytest.approx(loss.item(), rel=1e-6)
    assert (gradient - expected).norm() <= 1e-10 * expected.norm()
    right = (scores[:, 0] > scores[:, 1]).double()
    assert metrics["rewards/accuracy"].item() == right.mean()
    assert metrics["rewards/margin"].item() == pytest.approx((scores[:, 0] - scores[:, 1]).mean().item(), rel=1e-5)
    # each pair was counted with its tokens: 2 + 6, 10 + 2, 2 + 2, 3 + 5
    assert source.pop_episodes() == list(zip(right.tolist(), [8, 12, 4, 8], strict=True))


def test_at_the_start_all_scores_are_0_and_every_pair_a_tie(monkeypatch):
    args, state, completions, difference = start(random_head=False)
    metrics, gradient, _ = gradient_of(args, state, completions, difference, monkeypatch)
    assert metrics["losses/loss"].item() == pytest.approx(math.log(2), rel=1e-6)
    assert metrics["rewards/accuracy"].item() == 0.5 and metrics["rewards/margin"].item() == 0
    assert gradient.norm() > 0


def test_padding_order_and_ranks_do_not_matter(monkeypatch):
    args, state, completions, difference = start()
    args.margin = True
    whole = gradient_of(args, state, completions, difference, monkeypatch)[1]
    wide = completions.widen(20, PAD, 9)
    wide.ids[~wide.mask], wide.prompt_ids[~wide.prompt_mask] = 7, 9
    assert (gradient_of(args, state, wide, difference, monkeypatch)[1] - whole).norm() < 1e-10 * whole.norm()
    order = torch.tensor([2, 0, 3, 1])
    turned = completions.rows((2 * order.unsqueeze(1) + torch.arange(2)).flatten())
    other = gradient_of(args, state, turned, difference[order], monkeypatch)[1]
    assert (other - whole).norm() < 1e-10 * whole.norm()
    parts = [gradient_of(args, state, completions, difference, monkeypatch, Half(rank, 2))[1] for rank in (0, 1)]
    assert (parts[0] + parts[1] - whole).norm() < 1e-10 * whole.norm()


@pytest.mark.parametrize("name", ["bradley_terry", "preference_accuracy", "aggregate"])
def test_the_core_functions_are_the_ones_that_run(monkeypatch, name):
    assert getattr(reward, name) is getattr(core, name)

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(reward, name, broken)
    args, state, completions, difference = start()
    with pytest.raises(ZeroDivisionError):
        gradient_of(args, state, completions, difference, monkeypatch)


def test_every_pass_takes_every_pair_once():
    args, state, *_ = start(batch_size=3)
    data = encode(byte_tokenizer(), PAIRS, END, 0, 64)
    seen = []
    for _ in range(2):
        completions, difference = reward.collect(state, data, args)
        assert len(completions.ids) == 2 * len(difference) == 4
        seen += difference.tolist()
    assert sorted(seen) == [0.5, 0.75, 1, 3] and state.position == 0
    assert state.global_step == int(data.lengths.sum())


# Whole runs


def run(folder, *flags):
    reward.main(parse_args(reward.Args, reward.PRESETS, [*DEBUG, *flags, "--run-dir", str(folder)]))
    return rows_without_clock(folder)


@pytest.mark.parametrize("lora", [[], ["--lora-rank", "2"]], ids=["full", "lora"])
def test_a_run_learns_saves_its_head_and_resumes_bit_equal(in_tmp, capsys, lora):
    """Numbers that end in 0 are preferred: held-out pairs are scored the right way round."""
    rows = [{"prompt": f"{i}:", "chosen": f"{i % 7}0", "rejected": f"{i % 5}{1 + i % 3}"} for i in range(60)]
    (in_tmp / "tens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--pairs", "tens.jsonl", "--learning-rate", "0.003", "--total-tokens", "1500", *lora]
    logged = run(in_tmp / "whole", *flags)
    assert logged[-1]["eval/episodic_return"] == 1 and logged[-1]["rewards/margin"] > 0.5
    assert logged[0]["charts/episodic_return"] < logged[-1]["charts/episodic_return"] == 1
    err = capsys.readouterr().err
    assert "llm_reward tens seed 1" in err and "accuracy, held-out pairs" in err
    cut_short(in_tmp / "whole", in_tmp / "cut")
    reward.main(parse_args(reward.Args, reward.PRESETS, ["--resume", str(in_tmp / "cut")]))
    assert_same_run(in_tmp / "whole", in_tmp / "cut")
    names = {path.name for path in (in_tmp / "whole/policy").iterdir()}
    assert {"config.json", "model.safetensors", "value_head.safetensors", "tokenizer.json"} <= names
    model = load_reward_model(str(in_tmp / "whole/policy"), byte_tokenizer())
    pair = encode(byte_tokenizer(), [Pair("9:", "40", "33")], END, 0, 64).batch(torch.tensor([0]))
    with torch.no_grad():
        chosen, rejected = final_values(model, pair, PAD).tolist()
    assert chosen > rejected + 0.5


def test_pairs_of_the_task(in_tmp):
    rows = run(in_tmp / "run", "--num-pairs", "40")
    assert not (in_tmp / "run/pairs.jsonl").exists() and "eval/episodic_return" in rows[-1]
    summary = json.loads((in_tmp / "run/summary.json").read_text())
    held = len({pair.prompt for pair in task_pairs(make_task("addition"), 40, torch_generator(1, "prompts"))}) // 10
    assert len(summary["final_eval"]["returns"]) == held == 4 and summary["env"] == "addition"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--micro-batch", "1"], ["--micro-batch 1", "at least 2"]),
        (["--center-coef", "-1"], ["--center-coef -1", "at least 0"]),
        (["--eval-episodes", "7"], ["--eval-episodes 7", "judges all held-out pairs"]),
        (["--show-samples", "3"], ["--show-samples 3", "leave it out"]),
        (["--pairs", "y.jsonl", "--top-p", "0.9"], ["--top-p 0.9", "leave it out"]),
        (["--pairs", "nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
        (["--pairs", "x.jsonl"], ["x.jsonl line 2: has no column rejected"]),
        (["--pairs", "y.jsonl", "--margin"], ["y.jsonl line 1: has no column chosen_score"]),
        (["--pairs", "y.jsonl"], ["there is one prompt only"]),
        (["--held-out-pairs", "2"], ["held_out is 2.0"]),
        (["--pairs", "z.jsonl", "--max-length", "1"], ["longer than 1 tokens"]),
        (["--model", "nowhere/at/all"], ["nowhere/at/all"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_bad_input_is_one_line(in_tmp, capsys, flags, words):
    good, other = ({"prompt": prompt, "chosen": "b", "rejected": "c"} for prompt in "ad")
    files = {"x": [good, {"prompt": "a", "chosen": "b"}], "y": [good, good], "z": [good, other]}
    for name, rows in files.items():
        (in_tmp / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as stop:
        run(in_tmp / "never", *flags)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and all(word in err for word in words), err
    assert not (in_tmp / "never").exists()
