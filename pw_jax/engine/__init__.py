"""The engine: fixed slots, two compiled steps, continuous batching over one page pool."""
