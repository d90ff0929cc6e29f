"""The plugin host: it finds plugins by their entry points, loads each inside a guard, and finds
components by name."""
