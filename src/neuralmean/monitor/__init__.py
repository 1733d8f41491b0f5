"""Monitoring: a stream of decisions, watched for drift."""
