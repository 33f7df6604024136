"""Feedback from the door to the data sets: rules, sources, store, snapshots, validation."""
