"""Language models: loading, tokens, sampling, tasks with verifiable rewards."""

from cleanrl_zoo.llm.loading import load_language_model
from cleanrl_zoo.llm.models import LanguageModel, Reference
from cleanrl_zoo.llm.sampler import Completions, sample
from cleanrl_zoo.llm.source import PromptSource
from cleanrl_zoo.llm.tasks import Example, RewardError, Task, make_task

__all__ = [
    "Completions",
    "Example",
    "LanguageModel",
    "PromptSource",
    "Reference",
    "RewardError",
    "Task",
    "load_language_model",
    "make_task",
    "sample",
]
