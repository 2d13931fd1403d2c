"""Time and memory of the language models' parts here, in trl and in transformers, alternating on the same cores.

    python -m venv ~/trl && ~/trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.24.0
    python benchmarks/speed_llm.py --name llm --trl-python ~/trl/bin/python
    python benchmarks/speed_llm.py --name llm_rollouts --only rollouts --big

Every measurement is a process of its own: after a small run of the same code, which loads what it needs, the extra
memory is the highest resident memory above that before, and the times are those of calls, iterations or steps, without
set-up. Sides take turns, the median of the repeats counts, both have as many threads. Parts:

    logprobs    forward and backward of log-probs through a head of 152,000 tokens: of 88 completion tokens in 4 × 128,
                against what trl's GRPOTrainer calls, with the entropies that both ask for; of all 512 tokens, without
                entropies, against log-softmax
    rollouts    4 prompts of 192 tokens × 8 samples of ragged lengths, against generate of transformers
    grpo_step   an iteration of algos/grpo.py on the tiny model, sampling, scoring and 4 optimizer steps, against
                GRPOTrainer
    dpo_step    an optimizer step of algos/dpo.py on the same pairs, against DPOTrainer, with reference log-probs
                computed before on both sides; loss and gradient of the first step are compared

Writes `results/speed/<name>.json` (every single time) and `.md`.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers_trl import (
    PAIRS,
    PROMPTS,
    Clock,
    ExtraMemory,
    Sizes,
    head_inputs,
    head_model,
    measure,
    measure_logprobs,
    ragged_batch,
    write_computed,
)
from records import ROOT, Parser, write_text
from speed import IDLE_CORES, check_idle, disturbed, installed, thread_variables, timed
from torch import Tensor

from cleanrl_zoo.core import linear_logprobs
from cleanrl_zoo.run import torch_generator, usage_errors
from cleanrl_zoo.run.provenance import git_commit, machine, versions

MODEL = "results/zoo/addition_sft"  # of the whole steps
OWN_PAIRS = "own_pairs.jsonl"  # the pairs before they are put in the order in which our run takes them
SHORT = Sizes(
    rollouts=1,
    vocabulary=1000,
    width=16,
    prompt_length=8,
    max_length=16,
    mean_length=8,
    grpo_prompts=4,
    grpo_iterations=1,
    pairs=8,
    dpo_steps=2,
)
BIG = {  # SmolLM2-135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
BIG_VOCABULARY = 49_152


@dataclass(frozen=True)
class Case:
    """What is measured, against whom, and what is asked of it."""

    part: str  # of --only
    peer: str  # trl, in its own environment; plain, transformers in this one
    title: str
    faster: float | None = None  # at least so many times as fast
    memory: float | None = None  # at most this share of the peer's extra memory


CASES: dict[str, Case] = {
    "logprobs": Case("logprobs", "trl", "log-probs of 88 of 4 × 128 tokens", 5.0, 1 / 3),
    "logprobs_every": Case("logprobs", "plain", "log-probs of all 4 × 128 tokens", 1.0, 1 / 4),
    "rollouts": Case("rollouts", "transformers", "rollouts of a tiny model", 2.5),
    "rollouts_big": Case("rollouts", "transformers", "rollouts of a model of 135M parameters"),
    "grpo_step": Case("grpo_step", "trl", "a whole GRPO iteration, tiny model", 1.5),
    "dpo_step": Case("dpo_step", "trl", "a DPO step, tiny model", 1.3, 1.0),
}
PARTS = tuple(dict.fromkeys(case.part for case in CASES.values()))


@dataclass
class Measurement:
    """One process."""

    case: str
    who: str  # ours, or the case's peer
    repeat: int
    seconds: list[float]  # of each call, iteration or step
    tokens: list[int]  # sampled in each; none where nothing is sampled
    extra_mb: float  # at most, in 10⁶ bytes
    process_seconds: float
    cpu_seconds: float
    other_cores: float | None  # cores kept busy by other processes meanwhile; None where the system does not tell

    @property
    def value(self) -> float:
        """Rollouts: useful tokens per second, to be high. Otherwise the median of the seconds, to be low."""
        return sum(self.tokens) / sum(self.seconds) if is_rate(self.case) else median(self.seconds)


def is_rate(case: str) -> bool:
    return CASES[case].part == "rollouts"


# What runs in the measured processes on our side, and on the side of peers that this environment has


def logprobs(folder: Path, sizes: Sizes, seed: int) -> dict[str, Any]:
    """`LanguageModel.completion`, as algos/grpo.py calls it."""
    from cleanrl_zoo.llm import LanguageModel

    tokens, attention_mask, mask, weights = ragged_batch(sizes)

    def make(vocabulary: int) -> Callable[[], tuple[Tensor, ...]]:
        parameters = head_inputs(*tokens.shape, sizes.width, vocabulary)
        model, ids = LanguageModel(head_model(*parameters)), tokens % vocabulary

        def call() -> tuple[Tensor, ...]:
            logprob = model.completion(ids, attention_mask, mask, entropy=True).logprob
            return logprob.detach(), *torch.autograd.grad((logprob * weights).sum(), parameters)

        return call

    return measure_logprobs(make, folder, sizes, "ours")


def logprobs_every(folder: Path, sizes: Sizes, seed: int, plain: bool) -> dict[str, Any]:
    """Every token is one of a completion: `linear_logprobs` of all hidden states, or log-softmax of all logits."""
    shape = len(sizes.lengths), sizes.columns
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(shape, generator=generator)  # [B, L]

    def make(vocabulary: int) -> Callable[[], tuple[Tensor, ...]]:
        hidden, head = parameters = head_inputs(*shape, sizes.width, vocabulary)  # [B, L, H], [V, H]
        ids = torch.randint(vocabulary, shape, generator=generator)

        def call() -> tuple[Tensor, ...]:
            if plain:
                logprob = (hidden @ head.t()).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            else:
                logprob = linear_logprobs(hidden, head, ids)
            return logprob.detach(), *torch.autograd.grad((logprob * weights).sum(), parameters)

        return call

    return measure_logprobs(make, folder, sizes, "plain" if plain else "ours")


def rollout_model(big: bool, sizes: Sizes) -> tuple[Any, int]:
    """A Llama with random weights, and the size of its vocabulary without pad and end tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from cleanrl_zoo.llm.models import tiny_llama

    context = sizes.prompt_length + sizes.max_length
    if not big:
        generator = torch.Generator().manual_seed(3)
        return tiny_llama(258, generator, context=context, pad_id=256, eos_id=257), 256
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=BIG_VOCABULARY, max_position_embeddings=context, **BIG)
    return LlamaForCausalLM(config).eval(), BIG_VOCABULARY


def rollouts(folder: Path, sizes: Sizes, seed: int, ours: bool, big: bool = False) -> dict[str, Any]:
    """`sample`, or `generate` of transformers. Every `mean_length`th token stops, so that lengths are ragged.

    Tokens count up to the stop.
    """
    from cleanrl_zoo.llm import LanguageModel, sample

    model, vocabulary = rollout_model(big, sizes)
    stops = tuple(range(0, vocabulary, sizes.mean_length))
    pad_id, generator = vocabulary - 1, torch.Generator().manual_seed(seed)
    rows = sizes.prompts * sizes.group_size
    torch.manual_seed(seed)
    agent = LanguageModel(model)

    def roll(max_length: int) -> int:
        prompts = torch.randint(vocabulary, (sizes.prompts, sizes.prompt_length), generator=generator)  # [N, P]
        whole = torch.ones_like(prompts)
        if ours:
            noise = torch.rand(rows, max_length, generator=generator)
            return int(sample(agent, prompts, whole, sizes.group_size, max_length, stops, pad_id, noise).mask.sum())
        tokens = model.generate(
            prompts,
            attention_mask=whole,
            do_sample=True,
            num_return_sequences=sizes.group_size,
            max_new_tokens=max_length,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(stops),
            pad_token_id=pad_id,
        )
        return useful_tokens(tokens[:, sizes.prompt_length :], stops)

    roll(2)
    found = measure(lambda: roll(sizes.max_length), sizes.rollouts, int)
    tokens = found.pop("kept")
    return {**found, "tokens": tokens}


def useful_tokens(ids: Tensor, stops: tuple[int, ...]) -> int:
    """Tokens of [B, L] up to each row's first stop, which counts."""
    stopped = torch.isin(ids, torch.tensor(stops))
    return int((stopped.cumsum(1) - stopped.long() == 0).sum())


def grpo_step(folder: Path, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Iterations of algos/grpo.py."""
    from tabular import algorithm

    from cleanrl_zoo.llm import PromptSource, load_language_model, make_task
    from cleanrl_zoo.run.distributed import World

    grpo, world = algorithm("grpo"), World()

    def run(prompts: int, minibatches: int, iterations: int) -> tuple[Clock, list[int], float]:
        args = grpo.Args(
            model=MODEL,
            num_prompts=prompts,
            group_size=sizes.grpo_group_size,
            num_minibatches=minibatches,
            max_length=sizes.grpo_max_length,
            micro_batch=prompts * sizes.grpo_group_size // minibatches,
            learning_rate=2e-4,
            anneal_lr=False,
            seed=seed,
        )
        agent, tokenizer, stop_ids = load_language_model(args.model)
        limits = (args.max_length, agent.context, stop_ids, world)
        source = PromptSource(make_task(args.task), tokenizer, torch_generator(1, "prompts"), *limits)
        clock, ends = Clock(), [0]
        memory = ExtraMemory()
        state = grpo.TrainState.create(args, agent)
        for _ in range(iterations):
            groups, _ = grpo.collect(state, source, agent, args)
            rollout, _ = grpo.prepare(groups, source, agent, None, args)
            grpo.update(state, rollout, args, world, source.max_length)
            source.pop_episodes()
            clock.tick()
            ends.append(state.global_step)
        return clock, [after - before for before, after in zip(ends, ends[1:], strict=False)], memory.highest

    run(2, 1, 1)
    clock, tokens, extra = run(sizes.grpo_prompts, sizes.grpo_minibatches, sizes.warmup + sizes.grpo_iterations)
    return {"seconds": clock.seconds(sizes.warmup), "tokens": tokens[sizes.warmup :], "extra_mb": extra}


def dpo_step(folder: Path, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Steps of algos/dpo.py."""
    from tabular import algorithm

    from cleanrl_zoo.llm import load_language_model
    from cleanrl_zoo.llm.pairs import encode, read_pairs
    from cleanrl_zoo.nn import Adam
    from cleanrl_zoo.run.distributed import World

    dpo, world = algorithm("dpo"), World()
    pairs = read_pairs(str(folder / OWN_PAIRS))

    class Noting(Adam):
        first: list[Tensor] | None = None

        def step(self, grads: list[Tensor], learning_rate: Tensor) -> None:
            self.first = self.first or [grad.clone() for grad in grads]
            super().step(grads, learning_rate)

    def run(count: int, steps: int) -> tuple[Clock, list[Tensor], dict[str, Tensor], float]:
        args = dpo.Args(
            model=MODEL, batch_size=count, micro_batch=2 * count, learning_rate=1e-4, warmup=1, max_grad_norm=1e9
        )
        agent, tokenizer, stop_ids = load_language_model(args.model)
        data = encode(tokenizer, pairs[: count * steps], stop_ids[0], 0, agent.context)
        data.ref_logprob = dpo.summed_logprobs(agent, data, args, world)
        clock, losses = Clock(), []
        memory = ExtraMemory()
        state = dpo.TrainState.create(args, agent, len(data))
        state.optimizer = Noting(agent.trainable())
        for _ in range(steps):
            batch, _ = dpo.collect(state, None, data, None, args, world)
            losses.append(dpo.update(state, batch, None, args, world)["losses/loss"])
            clock.tick()
        names = [f"gradient of {name.removeprefix('model.')}" for name in agent.state_dict()]
        return clock, losses, dict(zip(names, state.optimizer.first, strict=True)), memory.highest

    run(2, 1)
    clock, losses, gradient, extra = run(sizes.pairs, sizes.warmup + sizes.dpo_steps)
    write_computed(folder, "ours", {"first loss": losses[0], "last loss": losses[-1], **gradient})
    return {"seconds": clock.seconds(sizes.warmup), "extra_mb": extra}


WORKERS: dict[tuple[str, str], Callable[[Path, Sizes, int], dict[str, Any]]] = {
    ("logprobs", "ours"): logprobs,
    ("logprobs_every", "ours"): lambda *inputs: logprobs_every(*inputs, plain=False),
    ("logprobs_every", "plain"): lambda *inputs: logprobs_every(*inputs, plain=True),
    ("rollouts", "ours"): lambda *inputs: rollouts(*inputs, ours=True),
    ("rollouts", "transformers"): lambda *inputs: rollouts(*inputs, ours=False),
    ("rollouts_big", "ours"): lambda *inputs: rollouts(*inputs, ours=True, big=True),
    ("rollouts_big", "transformers"): lambda *inputs: rollouts(*inputs, ours=False, big=True),
    ("grpo_step", "ours"): grpo_step,
    ("dpo_step", "ours"): dpo_step,
}


# What starts them


def write_inputs(folder: Path, sizes: Sizes, cases: list[str]) -> None:
    """The sizes, and the prompts and pairs of the whole steps: trl's in the order in which ours are learned from."""
    sizes.write(folder)
    if not {"grpo_step", "dpo_step"} & set(cases):
        return
    from cleanrl_zoo.llm import make_task
    from cleanrl_zoo.llm.pairs import task_pairs, write_pairs

    task = make_task("addition")
    count = sizes.grpo_prompts * (sizes.warmup + sizes.grpo_iterations)
    examples = task.draw(count, torch_generator(1, "prompts"))
    lines = [json.dumps({"prompt": example.prompt, "answer": example.columns["answer"]}) for example in examples]
    (folder / PROMPTS).write_text("".join(line + "\n" for line in lines))
    pairs = task_pairs(task, sizes.pairs * (sizes.warmup + sizes.dpo_steps), torch_generator(1, "prompts"))
    order = torch.randperm(len(pairs), generator=torch_generator(1, "minibatch"))
    write_pairs(folder / OWN_PAIRS, pairs)
    write_pairs(folder / PAIRS, [pairs[index] for index in order.tolist()])


def run_case(case: str, who: str, repeat: int, folder: Path, threads: int, trl_python: str | None) -> Measurement:
    """Measures one side in a process of its own, which leaves what it computed in the folder."""
    if who == "trl":
        command = [trl_python, str(Path(__file__).with_name("peers_trl.py")), "--case", case]
        command += ["--folder", str(folder), "--model", MODEL]
    else:
        command = [sys.executable, __file__, "--measure", case, who, str(folder), str(repeat)]
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "TQDM_DISABLE": "1"}
    output, *used = timed(command, {**variables, **thread_variables(threads)})
    found = json.loads(output.splitlines()[-1])
    return Measurement(case, who, repeat, found["seconds"], found.get("tokens", []), found["extra_mb"], *used)


def differences(folder: Path, peer: str) -> dict[str, float]:
    """How far apart is what both sides computed, relative to its norm; of the gradients in weights the farthest.

    Nothing where they sampled.
    """
    from safetensors.torch import load_file

    paths = [folder / f"{who}.safetensors" for who in ("ours", peer)]
    if not all(path.exists() for path in paths):
        return {}
    ours, theirs = map(load_file, paths)
    if ours.keys() != theirs.keys():
        raise ValueError(f"{peer} computed {' '.join(sorted(theirs))}, ours is {' '.join(sorted(ours))}")
    found: dict[str, float] = {}
    for name, tensor in theirs.items():
        key = "first gradient" if name.startswith("gradient of ") else name
        error = float((ours[name] - tensor).norm() / tensor.norm())
        found[key] = max(found.get(key, 0.0), error)
    return found


def ratios(times: list[Measurement]) -> list[dict[str, Any]]:
    """For each case that both sides have the medians, how many times as fast ours is, and its share of the memory."""
    found = []
    for name, case in CASES.items():
        sides = [[item for item in times if (item.case, item.who) == (name, who)] for who in ("ours", case.peer)]
        if not all(sides):
            continue
        ours, theirs = (median(item.value for item in side) for side in sides)
        ours_mb, theirs_mb = (median(item.extra_mb for item in side) for side in sides)
        row = {"case": name, "peer": case.peer, "ours": ours, "theirs": theirs}
        row["faster"] = ours / theirs if is_rate(name) else theirs / ours
        row |= {"ours_mb": ours_mb, "theirs_mb": theirs_mb}
        row["memory"] = ours_mb / theirs_mb if theirs_mb else None
        row["tokens"] = [median(median(item.tokens) for item in side) if side[0].tokens else None for side in sides]
        found.append(row)
    return found


def table(record: dict[str, Any]) -> str:
    """The medians as a Markdown table, with what is needed to judge them."""
    header = ["what", "ours", "theirs", "times as fast", "goal", "extra memory, ours", "theirs", "share", "goal"]
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    for row in record["ratios"]:
        case, rate = CASES[row["case"]], is_rate(row["case"])
        speeds = [f"{row[who]:,.0f} tokens/s" if rate else f"{row[who] * 1000:,.1f} ms" for who in ("ours", "theirs")]
        cells = [case.title, speeds[0], f"{speeds[1]} ({case.peer})", f"**{row['faster']:.2f}**"]
        cells += ["–" if case.faster is None else f"≥ {case.faster:g}"]
        cells += [f"{row['ours_mb']:,.1f} MB", f"{row['theirs_mb']:,.1f} MB"]
        cells += ["–" if row["memory"] is None else f"**{row['memory']:.0%}**"]
        cells += ["–" if case.memory is None else f"≤ {case.memory:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    sizes, where, code = record["sizes"], record["machine"], record["commit"] or "no commit"
    packages = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines.append(
        f"- Median of {record['repeats']} processes each, {record['threads']} thread(s), {where['cpu']} "
        f"({where['system']}), commit {code[:12]}{' (modified)' if record['dirty'] else ''}, {packages}."
    )
    cases = [row["case"] for row in record["ratios"]]
    parts = {CASES[case].part for case in cases}
    if "logprobs" in parts:
        completions = ", ".join(map(str, sizes["lengths"]))
        head = sizes["vocabulary"] * sizes["width"] * 4 / 1e6
        lines.append(
            f"- Log-probs: forward and backward through a head of {sizes['vocabulary']:,} × {sizes['width']} in "
            f"float32 ({head:,.0f} MB, and so is its gradient, which counts); completions of {completions} tokens in "
            f"rows of {sizes['columns']}, with entropies. trl: `GRPOTrainer._get_per_token_logps_and_entropies`. "
            "Plain: `log_softmax` and `gather` of all logits; no entropies on either side."
        )
    if "rollouts" in parts:
        lengths = {row["case"]: row["tokens"] for row in record["ratios"] if is_rate(row["case"])}
        each = sizes["prompts"] * sizes["group_size"]
        means = "; ".join(f"{name}: {a / each:.0f} and {b / each:.0f}" for name, (a, b) in lengths.items())
        lines.append(
            f"- Rollouts: {sizes['prompts']} prompts of {sizes['prompt_length']} tokens × {sizes['group_size']}, at "
            f"most {sizes['max_length']} new tokens, random weights, every {sizes['mean_length']}th token of the "
            f"vocabulary stops; tokens count up to the stop (mean lengths, ours and theirs: {means})."
        )
    if "grpo_step" in cases:
        row = next(row for row in record["ratios"] if row["case"] == "grpo_step")
        mine, their = row["tokens"]
        lines.append(
            f"- GRPO: {sizes['grpo_prompts']} prompts × {sizes['grpo_group_size']}, at most "
            f"{sizes['grpo_max_length']} tokens, {sizes['grpo_minibatches']} optimizer steps of an iteration, no KL, "
            f"no gradient checkpointing, from `{MODEL}`; tokens per iteration: ours {mine:,.0f}, theirs {their:,.0f}."
        )
    if "dpo_step" in cases:
        lines.append(
            f"- DPO: {sizes['pairs']} pairs per step, one forward pass, the same pairs in the same order, from "
            f"`{MODEL}`, reference log-probs computed before, no gradient checkpointing."
        )
    for case, errors in record["differences"].items():
        told = ", ".join(f"{name} {error:.1e}" for name, error in sorted(errors.items()))
        lines.append(f"- Relative differences between the sides, `{case}`: {told}.")
    lines += disturbed(record["times"])
    return "\n".join(lines) + "\n"


def measure_all(
    cases: list[str], sizes: Sizes, repeats: int, threads: int, out: Path, trl_python: str | None
) -> dict[str, Any]:
    """Measures every case `repeats` times, ours and the peer in turns; the record is written after each process."""
    commit, dirty = git_commit(ROOT)
    times: list[Measurement] = []
    record: dict[str, Any] = {
        "repeats": repeats,
        "threads": threads,
        "sizes": dataclasses.asdict(sizes),
        "machine": machine(),
        "commit": commit,
        "dirty": dirty,
        "versions": {**versions(), **installed(sys.executable, "transformers")},
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "load_before": os.getloadavg()[0],
        "differences": {},
    }
    if trl_python:
        record["versions"] |= {f"{name} (trl's)": version for name, version in peer_versions(trl_python).items()}

    def note(item: Measurement) -> None:
        times.append(item)
        record["times"] = [{**dataclasses.asdict(t), "value": t.value} for t in times]
        record["ratios"] = ratios(times)
        write_text(out, json.dumps(record, indent=1) + "\n")
        warning = "  DISTURBED by other processes" if (item.other_cores or 0) > IDLE_CORES else ""
        value = f"{item.value:10,.0f} tokens/s" if is_rate(item.case) else f"{item.value * 1000:10,.1f} ms"
        told = f"{item.extra_mb:8,.1f} MB  {item.process_seconds:5.1f} s in all"
        print(f"repeat {item.repeat}  {item.case:16} {item.who:12} {value:20} {told}{warning}")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, sizes, cases)
        for repeat in range(1, repeats + 1):
            for case in cases:
                peer = CASES[case].peer
                for who in ("ours", peer):
                    (folder / f"{who}.safetensors").unlink(missing_ok=True)
                    note(run_case(case, who, repeat, folder, threads, trl_python))
                errors, known = differences(folder, peer), record["differences"].get(case, {})
                if errors:
                    record["differences"][case] = {key: max(x, known.get(key, 0.0)) for key, x in errors.items()}
        write_text(out, json.dumps(record, indent=1) + "\n")
    return record


def peer_versions(python: str) -> dict[str, str]:
    """Versions in trl's environment. ValueError: one line, when it is none."""
    found = installed(python, "trl", "torch", "transformers")
    if "trl" not in found:
        raise ValueError(f"--trl-python {python}: that interpreter has no trl; pip install trl==1.16.0 there")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/speed_llm.py", description="Language models: time and memory here, in trl, ...")
    parser.add_argument("--name", default="llm", help="results/speed/<name>.json and .md; default llm")
    parser.add_argument("--only", nargs="+", default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--big", action="store_true", help="rollouts of a model of 135M parameters, too")
    parser.add_argument("--trl-python", help="interpreter that has trl 1.16.0 (not needed here)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both sides; default 1")
    parser.add_argument("--short", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="default results/")
    parser.add_argument("--force", action="store_true", help="measure even while something else runs")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # case, side, folder of inputs, seed
    args = parser.parse_args(argv)
    if args.measure:
        case, who, folder, seed = args.measure
        print(json.dumps(WORKERS[case, who](Path(folder), Sizes.read(Path(folder)), int(seed))))
        return 0
    with usage_errors():
        cases = chosen(args.only, args.big)
        if min(args.repeats, args.threads) < 1:
            raise ValueError("--repeats and --threads must be at least 1")
        if any(CASES[case].peer == "trl" for case in cases):
            if args.trl_python is None:
                raise ValueError(
                    f"--trl-python: {' '.join(args.only)} compare with trl; give an interpreter that has it, or "
                    "--only rollouts"
                )
            args.trl_python = str(Path(args.trl_python).expanduser().absolute())
            peer_versions(args.trl_python)
        else:
            args.trl_python = None
        check_idle(args.force)
        out = args.results / "speed" / f"{args.name}.json"
        sizes = SHORT if args.short else Sizes()
        record = measure_all(cases, sizes, args.repeats, args.threads, out, args.trl_python)
    text = table(record)
    write_text(out.with_suffix(".md"), text)
    print(text)
    return 0


def chosen(parts: list[str], big: bool) -> list[str]:
    """The cases of these parts."""
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise ValueError(f"--only {' '.join(unknown)}: known are {', '.join(PARTS)}")
    if big and "rollouts" not in parts:
        raise ValueError(f"--big: is a rollout, --only names {' '.join(parts)}; add rollouts or leave it out")
    return [name for name, case in CASES.items() if case.part in parts and (big or name != "rollouts_big")]


if __name__ == "__main__":
    sys.exit(main())
