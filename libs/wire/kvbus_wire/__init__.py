"""What crosses the bus: subjects and messages, one module per receiver. Pure structs, no I/O."""
