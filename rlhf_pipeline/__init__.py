"""The engine: people's feedback on a chat assistant in, a better and explainable model out."""
