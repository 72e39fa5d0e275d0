"""Pictures of predictions and of fits."""
