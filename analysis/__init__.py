"""Evaluation, explanation and reports of models, runs and reward functions."""
