"""Reward functions by kind, calling them safely, and the sandbox for programs."""
