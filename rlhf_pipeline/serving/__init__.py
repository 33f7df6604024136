"""The service: what people and other programs talk to. `create_app()` is all of it."""

from rlhf_pipeline.serving.app import create_app

__all__ = ["create_app"]
