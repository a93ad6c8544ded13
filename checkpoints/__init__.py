"""Checkpoints: Hugging Face folders in, our any-precision orbax folders out and in."""
