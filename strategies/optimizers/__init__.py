"""How an optimizer may step (on shards, on whole parameters, or not at all); its param groups."""
