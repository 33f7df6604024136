"""The service: what people and other programs talk to. `app.create_app()` is all of it."""
