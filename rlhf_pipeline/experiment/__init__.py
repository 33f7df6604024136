"""Live A/B: who sees which model, what their feedback says, and when that is enough to act."""
