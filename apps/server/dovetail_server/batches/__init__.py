"""Batches: files of requests that are answered when there is room. `store` keeps them on disk,
`worker` has them answered."""
