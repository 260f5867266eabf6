"""Lazy logits: a tensor with the shape of the logits that holds hidden states; logits exist for a tile of rows at a time."""
