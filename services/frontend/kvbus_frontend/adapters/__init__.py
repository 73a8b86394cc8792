"""The frontend's I/O: workers and routers on the bus, models from the object store, HTTP bodies and event streams."""
