"""Metric trackers for molt: JSON lines and TensorBoard."""
