"""Simulated people with a hidden preference: the demo's and the tests' users."""
