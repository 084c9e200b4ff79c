"""Readers of files and hubs, and built-in tasks."""
