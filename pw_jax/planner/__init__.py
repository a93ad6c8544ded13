"""The planner: plain numpy, pure. It decides; the paging code moves pages."""
