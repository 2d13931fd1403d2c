"""Supervised fine-tuning: its loss by hand, the schedule, the data, and a run that can be resumed."""

import json
import math

import pytest
import torch
from algo_helpers import ROOT, assert_as_recorded, load_algorithm, rows_without_clock
from language_helpers import (
    Half,
    LogprobTable,
    Recorder,
    assert_finite,
    assert_same_run,
    cut_short,
    is_defined,
    prompt_source,
    tiny,
    tiny_with_dropout,
    uneven,
)
from language_helpers import flags as flags_of

from cleanrl_zoo.llm import load_language_model
from cleanrl_zoo.run import parse_args
from cleanrl_zoo.run.checkpoint import list_checkpoints
from cleanrl_zoo.run.distributed import World

sft = load_algorithm("llm_sft")


def flags(*words):
    return flags_of(sft, *words)


def state_of(agent, recorder):
    return sft.TrainState(agent, recorder, torch.Generator().manual_seed(0))


def gradient(agent, batch, world=None, **changes):
    """The gradient of one optimizer step, not clipped, and its numbers."""
    args = flags("--max-grad-norm", 1e12, "--warmup", 0)
    for name, value in changes.items():
        setattr(args, name, value)
    recorder = Recorder(agent.trainable())
    numbers = sft.update(state_of(agent, recorder), batch, args, world or World())
    return torch.cat([grad.flatten() for grad in recorder.grads]), numbers


# The loss


@pytest.mark.parametrize("micro_batch", [2, 1])
def test_the_loss_is_the_mean_over_all_tokens_of_the_step(micro_batch):
    """One token of −ℓ = 1 and three of 0: ¼, not ½, and a slope of −¼ at each, however it is cut (bug kind 5)."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    table = LogprobTable(torch.where(mask, torch.tensor([[-1.0], [0.0]], dtype=torch.float64), 0.0))
    grad, numbers = gradient(table, table.rows_of(mask), micro_batch=micro_batch)
    assert float(numbers["losses/policy_loss"]) == pytest.approx(0.25, abs=1e-7)
    assert float(numbers["losses/grad_norm"]) == pytest.approx(0.5, abs=1e-9)  # √(4/16)
    torch.testing.assert_close(grad.view(2, 3), mask.double() / -4, rtol=0, atol=1e-12)


def test_the_loss_of_a_model_is_that_of_plain_log_softmaxes():
    """Row by row and without padding: −mean over the completions' tokens, prompts left out."""
    agent, batch = tiny()[0].double(), uneven()
    found, numbers = gradient(agent, batch)
    total = 0.0
    for row in range(6):
        real, length = batch.attention_mask[row], int(batch.lengths[row])
        tokens = batch.tokens[row][real]
        logits = agent.model(tokens.unsqueeze(0)).logits[0, -length - 1 : -1]
        total = total + logits.log_softmax(-1).gather(1, tokens[-length:].unsqueeze(1)).sum()
    loss = total / -int(batch.mask.sum())
    expected = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, agent.trainable())])
    assert float(numbers["losses/policy_loss"]) == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_neither_the_micro_batch_nor_padding_nor_the_number_of_ranks_changes_the_gradient():
    agent, batch = tiny()[0].double(), uneven()
    whole, numbers = gradient(agent, batch, micro_batch=6)
    halves = [gradient(agent, batch, Half(rank, 2), micro_batch=2) for rank in range(2)]
    junk = uneven()
    junk.ids[~junk.mask], junk.prompt_ids[~junk.prompt_mask] = 77, 99
    alike = [
        gradient(agent, batch, micro_batch=1),
        gradient(agent, batch, micro_batch=4),
        gradient(agent, junk),
        gradient(agent, batch.widen(9, 65, prompt_length=11)),
        (halves[0][0] + halves[1][0], {tag: halves[0][1][tag] + halves[1][1][tag] for tag in numbers}),
    ]
    for grad, others in alike:
        torch.testing.assert_close(grad, whole, rtol=1e-10, atol=1e-13)
        for tag in ("losses/policy_loss", "losses/entropy"):
            assert float(others[tag]) == pytest.approx(float(numbers[tag]), rel=1e-5)


def test_the_schedule_by_hand():
    """10 of 100 tokens per step, rising over the first tenth; ½ (1 + cos π d) with d the share done before the step.

    First step: 1/100 of 10/100 of the way up, so that it is not lost. Then the whole rate times the cosine.
    """
    mask = torch.ones(5, 2, dtype=torch.bool)
    table = LogprobTable(torch.full((5, 2), -1.0, dtype=torch.float64))
    args = flags("--total-tokens", 100, "--warmup", 0.1, "--learning-rate", 1e-2)
    state, rates = state_of(table, Recorder(table.trainable())), []
    for _ in range(10):
        rates.append(sft.update(state, table.rows_of(mask), args, World())["charts/learning_rate"])
    expected = [1e-2 * 0.1, *(1e-2 * 0.5 * (1 + math.cos(math.pi * d / 10)) for d in range(1, 10))]
    assert rates == pytest.approx(expected, rel=1e-6) and state.global_step == 100


def test_it_learns():
    """40 steps on answers without noise: from more than ln 258 = 5.6 nats to about ln 11, digits or the end."""
    args = flags("--learning-rate", 3e-2, "--total-tokens", 4 * 16 * 40)
    agent, tokenizer, stop_ids = tiny()
    source, state = prompt_source(tokenizer, stop_ids), sft.TrainState.create(args, agent)
    losses = [float(sft.update(state, sft.collect(state, source, args), args, World())["losses/policy_loss"])
              for _ in range(40)]  # fmt: skip
    assert losses[0] > 5.5 and sum(losses[-5:]) / 5 < 1.1 * math.log(11)


# Data


def test_demonstrations_end_with_the_stop_token_which_is_learned():
    args = flags("--batch-size", 5)
    agent, tokenizer, stop_ids = tiny()
    state = sft.TrainState.create(args, agent)
    batch = sft.collect(state, prompt_source(tokenizer, stop_ids), args)
    assert len(batch.ids) == 5
    for row in range(5):
        ids = batch.ids[row][batch.mask[row]].tolist()
        a, b = (int(x) for x in tokenizer.decode(batch.prompt_ids[row][batch.prompt_mask[row]]).rstrip("=").split("+"))
        assert ids[-1] == stop_ids[0] and tokenizer.decode(ids[:-1]) == str(a + b)[::-1]


def test_all_answers_may_be_noise():
    args = flags("--batch-size", 64, "--noise", 1)
    agent, tokenizer, stop_ids = tiny()
    batch = sft.collect(sft.TrainState.create(args, agent), prompt_source(tokenizer, stop_ids), args)
    right = 0
    for row in range(64):
        prompt = tokenizer.decode(batch.prompt_ids[row][batch.prompt_mask[row]])
        answer = tokenizer.decode(batch.ids[row][batch.mask[row]][:-1])
        right += answer[::-1] == str(sum(map(int, prompt.rstrip("=").split("+"))))
    assert right <= 5  # one in about 150 by chance


# From the command line


def demonstrations(folder, count=24, **changes):
    """A JSONL file of `count` prompts with completions."""
    rows = [{"prompt": f"{n}:", "completion": f"{n}!", **changes} for n in range(count)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "data.jsonl"


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--model", "no/such/folder/here"], ["no/such/folder/here"]),
        (["--task", "additoin"], ["additoin", "nearest: addition"]),
        (["--max-length", "300"], ["--max-length 300", "context of 256"]),
        (["--compile"], ["--compile", "leave it out"]),
        (["--noise", "1.5"], ["--noise 1.5", "at most 1"]),
        (["--warmup", "-1"], ["--warmup -1", "at least 0"]),
        (["--batch-size", "0"], ["--batch-size 0", "at least 1"]),
        (["--width", "60", "--heads", "8"], ["--width 60", "--heads 8"]),
        (["--top-p", "0"], ["--top-p 0", "above 0"]),
        (["--prompts", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--task", "reasoning_gym:no_such_data"], ["no_such_data"]),
    ],
    ids=lambda value: value[0],
)
def test_bad_input_is_one_line_and_exit_code_2(in_tmp, capsys, words, expected):
    with pytest.raises(SystemExit) as stop:
        sft.main(flags(*words))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "Traceback" not in err
    assert all(word in err for word in expected), err
    assert list(in_tmp.iterdir()) == []


def test_prompts_without_completions_are_refused_in_one_line(in_tmp, capsys):
    (in_tmp / "data.jsonl").write_text('{"prompt": "1:"}\n{"prompt": "2:"}\n')
    with pytest.raises(SystemExit) as stop:
        sft.main(flags("--prompts", "data.jsonl", "--reward", "language_helpers:all_alike"))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "no column completion" in err


def test_a_demonstration_too_long_for_the_context_is_told_when_it_comes(in_tmp, capsys):
    """One of ten prompts has 300 bytes: sooner or later it is drawn."""
    rows = [{"prompt": f"{n}:", "completion": "1"} for n in range(9)] + [{"prompt": "7" * 300, "completion": "1"}]
    (in_tmp / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (in_tmp / "held.jsonl").write_text('{"prompt": "a:", "completion": "1"}\n')
    words = ["--prompts", "data.jsonl", "--held-out", "held.jsonl", "--max-length", 4, "--run-dir", "a",
             "--reward", "language_helpers:all_alike"]  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        sft.main(flags(*words))
    err = capsys.readouterr().err
    assert "Traceback" not in err and "'7777" in err.splitlines()[-1] and "300 tokens" in err
    assert stop.value.code == 1


def test_a_file_of_demonstrations_is_learned_from(in_tmp, capsys):
    sft.main(flags("--prompts", demonstrations(in_tmp), "--run-dir", "a", "--max-length", 8, "--show-samples", 2))
    table = rows_without_clock(in_tmp / "a")
    assert table[-1]["losses/policy_loss"] < table[0]["losses/policy_loss"]
    assert len(list((in_tmp / "a/samples").iterdir())) == 1


def test_the_log_and_the_saved_model(in_tmp, capsys):
    """What is saved is the model that was evaluated: it samples the same completions from the same draws."""
    from cleanrl_zoo.llm.evaluation import evaluate_held_out
    from cleanrl_zoo.run.seeding import stream_seed

    args = flags("--run-dir", "a", "--reward", "language_helpers:ascii_share", "--temperature", 0.8, "--top-p", 0.9)
    sft.main(args)
    table = rows_without_clock(in_tmp / "a")
    for row in table:
        assert all(is_defined(tag) for tag in row)
        assert_finite(row)
        assert {"losses/policy_loss", "losses/entropy", "losses/grad_norm", "charts/learning_rate"} <= row.keys()
    agent, tokenizer, stop_ids = load_language_model(str(in_tmp / "a/policy"))
    source = prompt_source(tokenizer, stop_ids, "ascii_share")
    held_out = evaluate_held_out(agent, source, 8, stream_seed(1, "evaluation"), 0.8, 0.9)
    returns = json.loads((in_tmp / "a/summary.json").read_text())["final_eval"]["returns"]
    assert held_out.total.tolist() == returns and len(set(returns)) > 1


# Resume


@pytest.mark.parametrize(
    "words", [("--show-samples", "2"), ("--lora-rank", "2"), ("--noise", "0.5", "--batch-size", "7")]
)
def test_a_resumed_run_is_bit_equal(in_tmp, words):
    sft.main(flags("--run-dir", "whole", "--eval-every", 200, *words))
    cut_short(in_tmp / "whole", in_tmp / "cut")
    sft.main(parse_args(sft.Args, sft.PRESETS, ["--resume", "cut"]))
    assert_same_run(in_tmp / "whole", in_tmp / "cut")
    assert len(list_checkpoints(in_tmp / "cut/checkpoints")) == 2


def test_dropout_is_on_while_training_off_while_evaluating_and_resumed_bit_equal(in_tmp):
    agent, tokenizer, _ = tiny_with_dropout()
    agent.save(in_tmp / "dropped", tokenizer)
    agent.config.attention_dropout = 0.0
    agent.save(in_tmp / "kept", tokenizer)
    for folder, model, every in (("whole", "dropped", 0), ("often", "dropped", 64), ("without", "kept", 0)):
        sft.main(flags("--run-dir", folder, "--model", model, "--eval-every", every))
    cut_short(in_tmp / "whole", in_tmp / "cut")
    sft.main(parse_args(sft.Args, sft.PRESETS, ["--resume", "cut"]))
    assert_same_run(in_tmp / "whole", in_tmp / "cut")
    whole, often, without = (
        (in_tmp / name / "policy/model.safetensors").read_bytes() for name in ("whole", "often", "without")
    )
    assert whole != without  # it drops something while it trains
    assert whole == often  # and nothing while it is evaluated, for which it would draw numbers


# Fingerprint


def test_fingerprint_of_twenty_updates():
    """Losses and gradient norms of 20 steps. A change needs a reason; this writes the file anew:

    python -c "import sys; sys.path[:0] = ['.', 'tests/algos']; import test_llm_sft as t; t.write_fingerprint()"
    """
    assert_as_recorded(FINGERPRINT, fingerprint(), rtol=2e-3, atol=2e-5)


FINGERPRINT = ROOT / "tests/algos/fingerprints/llm_sft.json"


def fingerprint() -> dict[str, list[float]]:
    args = flags("--noise", 0.5, "--total-tokens", 2000)
    agent, tokenizer, stop_ids = tiny()
    source, state = prompt_source(tokenizer, stop_ids), sft.TrainState.create(args, agent)
    table = [sft.update(state, sft.collect(state, source, args), args, World()) for _ in range(20)]
    return {tag: [round(float(row[tag]), 7) for row in table] for tag in table[0]}


def write_fingerprint() -> None:
    FINGERPRINT.write_text(json.dumps(fingerprint(), indent=1) + "\n")
