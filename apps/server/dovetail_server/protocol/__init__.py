"""Bodies of requests as msgspec structs, one file an API, and what all of them have in common."""
