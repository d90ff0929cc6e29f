"""Keys of `engine.yaml`: their model, their limits, and the components that they name."""
