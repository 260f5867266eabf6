"""Layers that torch.compile compiles: the recipe becomes a partition of AOTAutograd's joint graph."""
