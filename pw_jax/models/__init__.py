"""Language models: configuration, shared layers, one short file a family, and a registry."""
