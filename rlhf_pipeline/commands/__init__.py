"""The commands of `rlhf`, one module per subject; cli.py puts them together."""
