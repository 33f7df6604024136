"""Which model is champion, since when, why, and where its files are."""
