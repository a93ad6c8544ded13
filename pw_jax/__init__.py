"""Paged any-precision MoE experts beside a paged KV cache: models, quantizer, planner, engine."""
