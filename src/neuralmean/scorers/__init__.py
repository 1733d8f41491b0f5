"""Scorers: from discrepancy vectors to one number per input."""
