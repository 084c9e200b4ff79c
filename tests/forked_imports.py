"""Imports of the server of forked.py, before it forks. Its programs do not draw curves, which take seconds."""

import torch

import analysis.report
import infer  # noqa: F401
import train  # noqa: F401

torch.set_num_threads(1)
analysis.report.draw_curves = lambda runs: b""
