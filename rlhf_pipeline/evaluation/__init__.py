"""Is the candidate better? Comparison on prompts nobody trained on, and the gate's decision."""
