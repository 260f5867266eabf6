"""Alpha and the placement of every layer call, solved from what is known of a run. Nothing here imports torch."""
