"""What the server of forked.py does before it forks: imports, and one estimate, whose first one imports much."""

import matplotlib.figure  # noqa: F401
import torch
from config import Config
from runs.memory_estimate import describe_step

import infer  # noqa: F401
import train  # noqa: F401

torch.set_num_threads(1)
TINY = Config.of(use_grpo=True, generation_max_length=16, max_tokens_per_forward=2048)
describe_step(TINY, longest_prompt=8, shared_prompt=True, mesh={"replicate": 1, "fsdp": 1, "tp": 1}, memory=1.0)
