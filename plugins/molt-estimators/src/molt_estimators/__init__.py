"""Advantage estimators for molt."""
