"""Running tokens through a model: prefix attention, key-value cache, chunked head, devices, sharding."""
