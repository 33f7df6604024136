"""Dagster resources: the only place that builds clients, and the worker that training runs in."""
