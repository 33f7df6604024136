"""The pages: where people chat and vote, and where annotators review."""
