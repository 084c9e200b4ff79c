"""Conversations with environments: tools, games, functions of your own."""
