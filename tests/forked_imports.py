"""Imports of the server of forked.py, before it forks. Its programs do not draw curves, which take seconds."""

import torch

import infer  # noqa: F401
import runs.folder
import train  # noqa: F401

torch.set_num_threads(1)
runs.folder.draw_curves = lambda folder: None
