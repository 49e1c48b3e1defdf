"""Names of the trackers. Imports nothing heavy."""

from molt_core import hookimpl


@hookimpl
def molt_register_trackers(register):
    """Offer the trackers of this package; JSON lines are written by every run."""
    register("jsonl", "molt_trackers.jsonl:Jsonl", always=True)
    register("tensorboard", "molt_trackers.tensorboard:TensorBoard")
