"""Policy losses for molt."""
