"""Evaluation, explanation, replay and reports of models, runs and reward functions."""
