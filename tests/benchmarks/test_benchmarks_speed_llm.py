"""The comparison of the language models' parts: what is counted, what stands beside what, when it refuses to measure.

trl is not needed: its process is replaced by one that answers at once.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import peers_trl
import pytest
import report
import speed_llm
import torch
from peers_trl import PAIRS, PROMPTS, Clock, Sizes
from records import ROOT
from safetensors.torch import load_file, save_file
from speed_llm import CASES, SHORT, WORKERS, Measurement

LINUX = Path("/proc/self/clear_refs").exists()


def measured(case: str, who: str, seconds: list[float], extra_mb: float, tokens: list[int] | None = None, repeat=1):
    return Measurement(case, who, repeat, seconds, tokens or [], extra_mb, 9.0, 8.0, 0.0)


def test_medians_of_both_sides_and_how_many_times_as_fast_ours_is():
    # ours: processes of median 2 s, 1 s and 4 s → 2 s; theirs 6 s → 3 times as fast; memory (10, 30, 20) / 80 = 1/4
    times = [measured("dpo_step", "ours", [9.0, 1.0, 2.0], 10.0), measured("dpo_step", "ours", [1.0, 1.0], 30.0)]
    times += [measured("dpo_step", "ours", [4.0], 20.0), measured("dpo_step", "trl", [6.0], 80.0)]
    # 60 tokens in 6 s against 8 tokens in 2 s: neither the mean of the calls' rates nor that of a middle call
    times += [measured("rollouts", "ours", [1.0, 1.0, 4.0], 0.0, [10, 20, 30])]
    times += [measured("rollouts", "transformers", [1.0, 1.0], 0.0, [8, 0])]
    times += [measured("grpo_step", "ours", [1.0], 1.0, [5])]  # the other side is not there yet
    rollouts, dpo = speed_llm.ratios(times)
    assert (dpo["ours"], dpo["theirs"], dpo["faster"]) == (2.0, 6.0, 3.0)
    assert (dpo["ours_mb"], dpo["theirs_mb"], dpo["memory"]) == (20.0, 80.0, 0.25)
    assert (rollouts["ours"], rollouts["theirs"], rollouts["faster"]) == (10.0, 4.0, 2.5)
    assert rollouts["memory"] is None and rollouts["tokens"] == [20, 4]


def test_time_runs_from_the_end_of_one_iteration_to_that_of_the_next():
    clock = Clock()
    clock.moments = [1.0, 2.0, 4.0, 7.0, 11.0, 16.0]
    assert clock.seconds(skip=2) == [2.0, 3.0, 4.0, 5.0]  # the end of the second is where the third begins
    assert clock.seconds(skip=1, every=2) == [5.0, 9.0]  # iterations of two steps end at 2, 7 and 16


MEMORY = """
from peers_trl import ExtraMemory
block = bytearray(b"x") * 200_000_000
del block
memory = ExtraMemory()
print(memory.highest)
block = bytearray(b"x") * 50_000_000
del block
print(memory.highest)
"""


@pytest.mark.skipif(not LINUX, reason="this system does not tell a process's highest memory")
def test_memory_that_was_given_back_counts_and_earlier_memory_does_not():
    """In a process of its own: of a large one the system may take pages back meanwhile."""
    place = {**os.environ, "PYTHONPATH": str(Path(peers_trl.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", MEMORY], env=place, capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert before < 30
    assert 45 < after < 130  # bytearray may build it in two pieces


def test_the_completions_have_88_tokens_and_the_rows_128():
    sizes = Sizes()
    assert sum(sizes.lengths) == 88 and sizes.grpo_prompts * sizes.grpo_group_size % sizes.grpo_minibatches == 0
    tokens, attention_mask, mask, weights = peers_trl.ragged_batch(sizes)
    assert tokens.shape == attention_mask.shape == (4, 128) and int(tokens.max()) < sizes.vocabulary
    assert mask.sum(1).tolist() == list(sizes.lengths) and attention_mask.sum(1).tolist() == [128, 112, 104, 96]
    assert torch.equal(weights != 0, mask)


def test_the_processes_read_the_sizes_that_were_written(tmp_path):
    SHORT.write(tmp_path)
    assert Sizes.read(tmp_path) == SHORT != Sizes()


def test_tokens_count_up_to_the_first_stop():
    ids = torch.tensor([[5, 7, 5, 5], [7, 5, 5, 8], [5, 5, 5, 5]])
    assert speed_llm.useful_tokens(ids, (7, 8)) == 2 + 1 + 4


def test_differences_are_relative_and_of_all_weights_the_largest_counts(tmp_path):
    assert speed_llm.differences(tmp_path, "trl") == {}
    ours = {"first loss": torch.tensor(2.02), "gradient of a": torch.tensor([3.0, 4.0])}
    ours["gradient of b"] = torch.tensor([0.0, 1.5])
    theirs = {"first loss": torch.tensor(2.0), "gradient of a": torch.tensor([3.0, 4.1])}
    theirs["gradient of b"] = torch.tensor([0.0, 1.0])
    save_file(ours, tmp_path / "ours.safetensors")
    assert speed_llm.differences(tmp_path, "trl") == {}  # sampled by the other side
    save_file(theirs, tmp_path / "trl.safetensors")
    assert speed_llm.differences(tmp_path, "trl") == pytest.approx({"first loss": 0.01, "first gradient": 0.5})
    save_file({"first loss": torch.tensor(2.0)}, tmp_path / "trl.safetensors")
    with pytest.raises(ValueError, match="trl computed first loss, ours is first loss gradient of a"):
        speed_llm.differences(tmp_path, "trl")


@pytest.mark.skipif(not LINUX, reason="this system does not tell a process's highest memory")
def test_log_probs_are_measured_where_they_are_those_of_all_logits(tmp_path):
    found = WORKERS["logprobs", "ours"](tmp_path, SHORT, 1)
    assert len(found["seconds"]) == 1 and found["seconds"][0] > 0 and found["extra_mb"] >= 0
    computed = load_file(tmp_path / "ours.safetensors")
    tokens, _, mask, weights = peers_trl.ragged_batch(SHORT)
    hidden, head = peers_trl.head_inputs(*tokens.shape, SHORT.width, SHORT.vocabulary)
    start = tokens.shape[1] - mask.shape[1]
    logits = hidden[:, start - 1 : -1] @ head.t()  # [B, L, V] one before the token
    logprob = logits.log_softmax(-1).gather(-1, tokens[:, start:, None]).squeeze(-1) * mask
    of_hidden, of_head = torch.autograd.grad((logprob * weights).sum(), (hidden, head))
    wanted = {"log-probs": logprob.detach(), "hidden gradient": of_hidden, "head gradient": of_head[::100]}
    for name, tensor in wanted.items():
        torch.testing.assert_close(computed[name], tensor, atol=1e-5, rtol=1e-4)
    for who in ("ours", "plain"):
        WORKERS["logprobs_every", who](tmp_path, SHORT, 1)
    errors = speed_llm.differences(tmp_path, "plain")
    assert errors.keys() == computed.keys() and max(errors.values()) < 1e-5


@pytest.mark.skipif(not LINUX, reason="this system does not tell a process's highest memory")
def test_rollouts_of_both_sides_are_ragged_and_counted(tmp_path):
    rows = SHORT.prompts * SHORT.group_size
    for who in ("ours", "transformers"):
        found = WORKERS["rollouts", who](tmp_path, SHORT, 1)
        assert len(found["seconds"]) == len(found["tokens"]) == SHORT.rollouts
        # a token stops with a probability of about 1/8: 1 … 16 tokens, 7.1 in the mean
        assert 3 * rows < found["tokens"][0] < 12 * rows, who


@pytest.mark.skipif(not LINUX, reason="this system does not tell a process's highest memory")
def test_whole_steps_of_ours_learn_from_the_prompts_and_pairs_that_the_peer_gets(tmp_path, monkeypatch):
    from tabular import algorithm

    monkeypatch.chdir(ROOT)
    speed_llm.write_inputs(tmp_path, SHORT, ["grpo_step", "dpo_step"])
    grpo, dpo = algorithm("grpo"), algorithm("dpo")
    prompts, batches = [], []

    def collect(state, source, *rest):
        groups, metrics = inner(state, source, *rest)
        texts = source.tokenizer.batch_decode(groups.completions.prompt_ids, skip_special_tokens=True)
        prompts.append(texts[:: SHORT.grpo_group_size])
        return groups, metrics

    def update(state, batch, *rest):
        batches.append(batch.completions)
        return learn(state, batch, *rest)

    inner, learn = grpo.collect, dpo.update
    monkeypatch.setattr(grpo, "collect", collect)
    monkeypatch.setattr(dpo, "update", update)
    found = WORKERS["grpo_step", "ours"](tmp_path, SHORT, 1)
    assert len(found["seconds"]) == len(found["tokens"]) == 1
    rows = [json.loads(line) for line in (tmp_path / PROMPTS).read_text().splitlines()]
    assert [text for texts in prompts[1:] for text in texts] == [row["prompt"] for row in rows]
    a, b = map(int, rows[0]["prompt"].removesuffix("=").split("+"))
    assert rows[0]["answer"] == str(a + b)[::-1]

    found = WORKERS["dpo_step", "ours"](tmp_path, SHORT, 1)
    assert len(found["seconds"]) == SHORT.dpo_steps
    pairs = [json.loads(line) for line in (tmp_path / PAIRS).read_text().splitlines()]
    assert len(pairs) == SHORT.pairs * (SHORT.warmup + SHORT.dpo_steps) and len(batches) == 1 + 4
    for number, batch in enumerate(batches[1:]):  # byte by byte: the tokens are those of the text
        mine = [
            bytes(row[mask].tolist()).decode() for row, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)
        ]
        theirs = [pair["prompt"] for pair in pairs[number * SHORT.pairs : (number + 1) * SHORT.pairs]]
        assert sorted(mine[::2]) == sorted(theirs)
    computed = load_file(tmp_path / "ours.safetensors")
    assert float(computed["first loss"]) == pytest.approx(math.log(2), abs=1e-6)
    assert float(computed["last loss"]) < math.log(2)
    assert "gradient of model.layers.0.self_attn.q_proj.weight" in computed and "gradient of lm_head.weight" in computed
    assert all(bool(tensor.any()) for tensor in computed.values())


def answer(order: list[str]):
    """A process that answers at once: ours in 1 s, the peers in 4 s, one of these disturbed."""

    def timed(command, variables, cores=None):
        if command[1].endswith("peers_trl.py"):
            asked = peers_trl.parse(command[2:])
            case, who, folder = asked.case, "trl", asked.folder
            assert command[0] == "/trl/python" and asked.model == speed_llm.MODEL
        else:
            assert command[:3] == [sys.executable, speed_llm.__file__, "--measure"]
            case, who, folder = command[3], command[4], Path(command[5])
            assert (case, who) in WORKERS
        assert variables["HF_HUB_OFFLINE"] == "1" and variables["OMP_NUM_THREADS"] == "2"
        assert Sizes.read(folder) == SHORT and not (folder / f"{who}.safetensors").exists()
        order.append(f"{case} {who}")
        if CASES[case].part != "rollouts":
            theirs = 1.25 if order.count(f"{case} {who}") == 1 else 1.125  # the second time they differ less
            save_file({"first loss": torch.tensor(1.0 if who == "ours" else theirs)}, folder / f"{who}.safetensors")
        seconds = 1.0 if who == "ours" else 4.0
        found = {"seconds": [seconds], "tokens": [64], "extra_mb": 10.0 * seconds}
        return f"a warning\n{json.dumps(found)}\n", 9.0, 8.0, 0.5 if who == "plain" else 0.0

    return timed


def test_sides_take_turns_and_the_table_says_what_was_measured(tmp_path, monkeypatch, capsys):
    order = []
    monkeypatch.setattr(speed_llm, "timed", answer(order))
    monkeypatch.setattr(speed_llm, "installed", lambda python, *packages: {name: "1.0" for name in packages})
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    words = ["--name", "own", "--results", str(tmp_path), "--trl-python", "/trl/python", "--short", "--repeats", "2"]
    assert speed_llm.main([*words, "--threads", "2", "--big"]) == 0
    assert order == [f"{name} {who}" for name, case in CASES.items() for who in ("ours", case.peer)] * 2
    record = json.loads((tmp_path / "speed" / "own.json").read_text())
    assert len(record["times"]) == len(order) and record["sizes"]["lengths"] == [40, 24, 16, 8]
    assert record["versions"]["trl (trl's)"] == "1.0" and record["differences"]["dpo_step"][
        "first loss"
    ] == pytest.approx(0.2)
    text = (tmp_path / "speed" / "own.md").read_text()
    assert text in capsys.readouterr().out
    for line in (
        "| a DPO step, tiny model | 1,000.0 ms | 4,000.0 ms (trl) | **4.00** | ≥ 1.3 | 10.0 MB | 40.0 MB | **25%** "
        "| ≤ 100% |",
        "| rollouts of a tiny model | 64 tokens/s | 16 tokens/s (transformers) | **4.00** | ≥ 2.5 | 10.0 MB | 40.0 MB "
        "| **25%** | – |",
    ):
        assert line in text.splitlines()
    assert "`dpo_step`: first loss 2.0e-01." in text and "completions of 40, 24, 16, 8 tokens" in text
    assert "(mean lengths, ours and theirs: rollouts: 2 and 2; rollouts_big: 2 and 2)" in text
    assert f"**2 of {len(order)} measurements were disturbed by other processes.**" in text
    assert "](speed/" in report.speed_block(tmp_path / "speed", tmp_path / "README.md")  # on the front page: a link


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "rollouts", "speed"], "--only speed: known are logprobs, rollouts, grpo_step, dpo_step"),
        (["--only", "rollouts", "--repeats", "0"], "at least 1"),
        (["--only", "rollouts", "--threads", "0"], "at least 1"),
        (["--only", "dpo_step"], "--trl-python: dpo_step compare with trl"),
        (["--only", "grpo_step", "--big"], "add rollouts or leave it out"),
        (["--trl-python", "/no/python"], "/no/python: is not a Python interpreter that works"),
        (["--trl-python", sys.executable], "has no trl; pip install trl==1.16.0 there"),
        (["--fast"], "--fast"),
    ],
)
def test_bad_command_lines_are_one_line_and_exit_code_2(capsys, monkeypatch, words, told):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(speed_llm, "measure_all", None)
    with pytest.raises(SystemExit) as stop:
        speed_llm.main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1


def test_nothing_is_measured_while_something_else_runs_unless_forced(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    order = []
    monkeypatch.setattr(speed_llm, "timed", answer(order))
    words = ["--only", "rollouts", "--short", "--repeats", "1", "--threads", "2", "--results", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        speed_llm.main(words)
    assert stop.value.code == 2 and "load average 1.50: something else runs here" in capsys.readouterr().err
    assert order == [] and list(tmp_path.iterdir()) == []
    speed_llm.main([*words, "--force"])
    assert order == ["rollouts ours", "rollouts transformers"]
    assert sorted(path.name for path in (tmp_path / "speed").iterdir()) == ["llm.json", "llm.md"]


def test_every_case_has_both_sides_and_only_sizes_differ_in_a_trial():
    sides = {(name, who) for name, case in CASES.items() for who in ("ours", case.peer) if who != "trl"}
    assert sides == set(WORKERS)
    same = ("lengths", "columns", "prompts", "group_size", "grpo_group_size", "grpo_minibatches", "warmup")
    assert all(getattr(SHORT, name) == getattr(Sizes(), name) for name in same)
    assert all(getattr(SHORT, field.name) <= getattr(Sizes(), field.name) for field in dataclasses.fields(Sizes))
