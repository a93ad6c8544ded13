"""Linear layers as products of two thin matrices: how to find them, and how to run them."""
