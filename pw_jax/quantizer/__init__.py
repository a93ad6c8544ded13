"""The any-precision quantizer: nested codes of every width from one pass over a matrix."""
