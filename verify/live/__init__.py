"""Watching a run while it goes on: its rings are followed, and a fault that is certain is told as soon as it is one."""
