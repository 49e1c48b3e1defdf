"""An arithmetic environment for molt, with its data."""
