"""Where data comes from: readers of files and hubs, built-in tasks."""
