"""The policy: loading it, the tiny one, the one decode loop, supervised fine-tuning."""
