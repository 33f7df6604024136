"""The service: what people and other programs talk to."""
