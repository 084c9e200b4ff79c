"""Conversations with environments: tools, games, and functions of users."""
