"""Imports of the server of forked.py, before it forks. Its programs neither estimate memory nor draw curves, which take seconds."""

import torch

import infer  # noqa: F401
import runs.folder
import train  # noqa: F401
from runs import memory_estimate

torch.set_num_threads(1)
memory_estimate.memory_of_process = lambda *arguments: {"in all": 0.0}
runs.folder.draw_curves = lambda folder: None
