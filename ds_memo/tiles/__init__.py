"""Token tiles: a layer's forward and backward tile by tile, cut at attention, so that its working set does not grow with the
length."""
