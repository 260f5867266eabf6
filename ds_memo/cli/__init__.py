"""The `ds-memo` command: one file per verb."""
