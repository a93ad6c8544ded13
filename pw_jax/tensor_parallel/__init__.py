"""Whole models over a mesh of devices, factored or not."""
