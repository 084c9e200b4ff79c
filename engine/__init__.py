"""How tokens go through a model: prefix attention, key-value cache, chunked head, devices, sharding."""
