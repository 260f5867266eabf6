"""The check of a layer class before its first run in tiles: where its tokens lie, and if tiles compute what the whole does."""
