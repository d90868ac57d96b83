"""Traces of trajectories: formats, and cutting one to a machine's size."""
