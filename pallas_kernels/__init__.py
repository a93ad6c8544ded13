"""Kernels: one module an operation, each with a jnp reference that always works.

Kernels know arrays, never models. Every public function takes ``implementation=`` (see
:mod:`pallas_kernels.implementation`).
"""
