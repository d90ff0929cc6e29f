"""The plugin host: finding plugins by their entry points, loading each inside a guard, and naming what they offer."""
