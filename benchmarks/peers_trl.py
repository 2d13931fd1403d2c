"""What `speed_llm.py` measures of trl, in an environment that has it, and what both sides share.

    python benchmarks/peers_trl.py --case grpo_step --folder FOLDER

Runs one case with the inputs that `speed_llm.py` wrote into the folder; the last line printed is a JSON object: seconds
of every call, tokens where they count, and the extra memory in MB (10⁶ bytes). What was computed goes into the folder,
to be compared with ours.

Only what the measured process needs is imported at the top: trl has an environment of its own, without this package.
"""

import argparse
import contextlib
import gc
import inspect
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

PROMPTS, PAIRS, SIZES = "prompts.jsonl", "pairs.jsonl", "sizes.json"  # in the folder of inputs


@dataclass(frozen=True)
class Sizes:
    """How much is computed in each case, the same for both sides."""

    calls: int = 1  # of log-probs that are timed, after one whose memory is measured
    vocabulary: int = 152_000
    width: int = 256  # of the hidden states
    columns: int = 128  # of prompt and completion together
    lengths: tuple[int, ...] = (40, 24, 16, 8)  # of the completions: 88 tokens in all
    prompts: int = 4  # of a rollout
    group_size: int = 8  # of a rollout
    prompt_length: int = 192
    max_length: int = 256  # of a completion
    rollouts: int = 12  # that are timed, likewise; their lengths are random, and the mean of three moves by a fifth
    mean_length: int = 64  # every 64th token of the vocabulary ends a completion
    grpo_prompts: int = 32
    grpo_group_size: int = 8
    grpo_max_length: int = 8
    grpo_minibatches: int = 4
    grpo_iterations: int = 10  # that are timed
    pairs: int = 64  # of one optimizer step
    dpo_steps: int = 12  # that are timed
    warmup: int = 2  # iterations or steps before those

    @classmethod
    def read(cls, folder: Path) -> "Sizes":
        values = json.loads((folder / SIZES).read_text())
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    def write(self, folder: Path) -> None:
        (folder / SIZES).write_text(json.dumps(asdict(self)))


class ExtraMemory:
    """Resident memory above what this process had when this was made, in MB at its highest."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
        self.before = resident("VmRSS")

    @property
    def highest(self) -> float:
        return max(resident("VmHWM") - self.before, 0.0)


def resident(field: str) -> float:
    """VmRSS (now) or VmHWM (at its highest) of this process in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024 / 1e6
    raise OSError(f"/proc/self/status has no {field}; memory is measured on Linux")


def measure(call: Callable[[], Any], count: int, keep: Callable[[Any], Any]) -> dict[str, Any]:
    """Extra memory of a first call, seconds of each of `count` more, and what `keep` makes of their results."""
    memory = ExtraMemory()
    result = call()
    extra, seconds, kept = memory.highest, [], []
    for _ in range(count):
        del result  # before the next is computed
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
        kept.append(keep(result))
    return {"seconds": seconds, "extra_mb": extra, "kept": kept}


def measure_logprobs(
    make: Callable[[int], Callable[[], tuple[Tensor, ...]]], folder: Path, sizes: Sizes, name: str
) -> dict[str, Any]:
    """Measures a call that gives log-probs and the gradients in hidden states and head, for the whole vocabulary.

    `make` gives the call for a vocabulary; one for a small vocabulary comes first. Writes what was computed: of the
    head's gradient every hundredth row.
    """
    make(64)()
    found = measure(make(sizes.vocabulary), sizes.calls, lambda result: result[:2] + (result[2][::100].clone(),))
    kept = found.pop("kept")[-1]
    write_computed(folder, name, dict(zip(("log-probs", "hidden gradient", "head gradient"), kept, strict=True)))
    return found


def write_computed(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Leaves what one side computed, for comparison."""
    from safetensors.torch import save_file

    save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, folder / f"{name}.safetensors")


def head_inputs(batch: int, columns: int, width: int, vocabulary: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Hidden states [B, S, H] and the head's weight [V, H], always the same."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.empty(batch, columns, width), torch.empty(vocabulary, width)
    hidden.normal_(generator=generator)
    weight.normal_(0.0, width**-0.5, generator=generator)
    return nn.Parameter(hidden), nn.Parameter(weight)


class Trunk(nn.Module):
    """Stands for the layers below the head: gives hidden states that do not depend on the tokens."""

    def __init__(self, hidden: nn.Parameter) -> None:
        super().__init__()
        self.hidden = hidden
        self.embed_tokens = nn.Embedding(1, 1)  # not used, but asked for

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        rows, columns = input_ids.shape
        return BaseModelOutputWithPast(last_hidden_state=self.hidden[:rows, :columns])


def head_model(hidden: nn.Parameter, weight: nn.Parameter) -> Any:
    """A causal model that is nothing but a head over given hidden states."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = hidden.shape[-1]
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=width, intermediate_size=8, **heads))
    model.model = Trunk(hidden)
    model.lm_head.weight = weight
    model.config.vocab_size = model.lm_head.out_features = len(weight)
    return model.eval()


def ragged_batch(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [B, P+L], attention mask, completion mask [B, L], and a gradient for each log-prob [B, L]."""
    generator = torch.Generator().manual_seed(2)
    batch, length = len(sizes.lengths), max(sizes.lengths)
    tokens = torch.randint(sizes.vocabulary, (batch, sizes.columns), generator=generator)
    mask = torch.arange(length) < torch.tensor(sizes.lengths).unsqueeze(1)
    attention_mask = torch.cat([torch.ones(batch, sizes.columns - length, dtype=torch.bool), mask], 1)
    return tokens, attention_mask, mask, torch.randn(mask.shape, generator=generator) * mask


def logprobs(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The very method by which `GRPOTrainer` scores, on the model as it prepares it; it asks for entropies, too."""
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    tokens, attention_mask, mask, weights = ragged_batch(sizes)
    score = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=contextlib.nullcontext))

    def make(vocabulary: int) -> Callable[[], tuple[Tensor, ...]]:
        parameters = head_inputs(*tokens.shape, sizes.width, vocabulary)
        model, ids = head_model(*parameters), tokens % vocabulary
        add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))

        def call() -> tuple[Tensor, ...]:
            logprob, *_ = score(trainer, model, ids, attention_mask.long(), mask.shape[1], compute_entropy=True)
            return logprob.detach(), *torch.autograd.grad((logprob * weights).sum(), parameters)

        return call

    return measure_logprobs(make, folder, sizes, "trl")


class Clock:
    """Moments at which iterations ended; the differences after the first `skip` are what is timed."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def tick(self) -> None:
        self.moments.append(time.perf_counter())

    def seconds(self, skip: int, every: int = 1) -> list[float]:
        """Seconds from one `every`th tick to the next, without the first `skip` of them, at least 1."""
        moments = self.moments[every - 1 :: every]
        return [after - before for before, after in zip(moments[skip - 1 :], moments[skip:], strict=False)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(folder: str, batch_size: int, steps: int) -> dict[str, Any]:
    """Settings of every trainer: those of our runs, and nothing written or shown."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": batch_size,
        "max_steps": steps,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "bf16": False,  # trl's defaults are bfloat16, and to compute activations twice
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }


def load(folder: str) -> tuple[Any, Any]:
    """Model and tokenizer; text such as <eos> is a token, as trl needs it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, split_special_tokens=False)


@contextlib.contextmanager
def quiet() -> Iterator[str]:
    """A folder that is gone afterwards; no warnings, no bars."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield folder


def ticking(clock: Clock, before_optimizer: Callable[[nn.Module], None] | None = None) -> Any:
    """A callback of transformers' trainer that ticks after every optimizer step."""
    from transformers import TrainerCallback

    class Ticking(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **other: Any) -> None:
            if before_optimizer is not None and state.global_step == 0:
                before_optimizer(model)

        def on_step_end(self, args: Any, state: Any, control: Any, **other: Any) -> None:
            clock.tick()

    return Ticking()


def grpo_step(folder: Path, sizes: Sizes, model_folder: str) -> dict[str, Any]:
    """`GRPOTrainer`: iterations of sampling, scoring and some optimizer steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = read_rows(folder / PROMPTS)
    tokens: list[int] = []

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **other: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    def run(prompts: int, minibatches: int, iterations: int) -> tuple[Clock, float]:
        clock = Clock()
        model, tokenizer = load(model_folder)
        with quiet() as output:
            args = GRPOConfig(
                **settings(output, prompts * sizes.grpo_group_size // minibatches, iterations * minibatches),
                num_generations=sizes.grpo_group_size,
                steps_per_generation=minibatches,
                max_completion_length=sizes.grpo_max_length,
                learning_rate=2e-4,
                max_grad_norm=1.0,
                beta=0.0,
                loss_type="grpo",
                shuffle_dataset=False,
            )
            trainer = GRPOTrainer(
                model,
                reward,
                args,
                train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer,
                callbacks=[ticking(clock)],
            )
            memory = ExtraMemory()
            trainer.train()
            return clock, memory.highest

    run(2, 1, 1)
    tokens.clear()
    clock, extra = run(sizes.grpo_prompts, sizes.grpo_minibatches, sizes.warmup + sizes.grpo_iterations)
    seconds = clock.seconds(sizes.warmup, sizes.grpo_minibatches)
    return {"seconds": seconds, "tokens": tokens[sizes.warmup :], "extra_mb": extra}


def dpo_step(folder: Path, sizes: Sizes, model_folder: str) -> dict[str, Any]:
    """`DPOTrainer`: optimizer steps on given pairs, the reference's log-probs computed before."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in read_rows(folder / PAIRS)]

    gradient: dict[str, Tensor] = {}

    class Noting(DPOTrainer):
        losses: list[Tensor] = []

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.losses.append(loss.detach())
            return loss

    def note_gradient(model: nn.Module) -> None:
        gradient.update({f"gradient of {name}": x.grad.clone() for name, x in model.named_parameters()})

    def run(pairs: int, steps: int) -> tuple[Clock, float]:
        clock = Clock()
        model, tokenizer = load(model_folder)
        with quiet() as output:
            args = DPOConfig(
                **settings(output, pairs, steps),
                learning_rate=1e-4,
                max_grad_norm=1e9,  # the norm is computed, as ours is, and nothing is clipped
                beta=0.1,
                max_length=None,
                precompute_ref_log_probs=True,
                train_sampling_strategy="sequential",
            )
            trainer = Noting(
                model,
                args=args,
                train_dataset=Dataset.from_list(rows[: pairs * steps]),
                processing_class=tokenizer,
                callbacks=[ticking(clock, note_gradient)],
            )
            memory = ExtraMemory()
            trainer.train()
            return clock, memory.highest

    run(2, 1)
    Noting.losses.clear()
    clock, extra = run(sizes.pairs, sizes.warmup + sizes.dpo_steps)
    first, *_, last = Noting.losses
    write_computed(folder, "trl", {"first loss": first, "last loss": last, **gradient})
    return {"seconds": clock.seconds(sizes.warmup), "extra_mb": extra}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--case", choices=("logprobs", "grpo_step", "dpo_step"), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of inputs and of what was computed")
    parser.add_argument("--model", required=True, help="folder of the model that the steps train")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    sizes = Sizes.read(args.folder)
    if args.case == "grpo_step":
        result = grpo_step(args.folder, sizes, args.model)
    elif args.case == "dpo_step":
        result = dpo_step(args.folder, sizes, args.model)
    else:
        result = logprobs(args.folder, sizes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
