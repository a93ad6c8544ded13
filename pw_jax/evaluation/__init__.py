"""Quality of a model: scored tasks, perplexity, divergence from a reference, long contexts."""
