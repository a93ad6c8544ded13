"""One pool of pages for expert weights and the KV cache, and who owns which page."""
