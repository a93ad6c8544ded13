"""Meshes, shardings and where arrays live."""
