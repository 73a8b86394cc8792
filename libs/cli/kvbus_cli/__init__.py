"""The `kvbus` command. Services are imported by name when their verb is used, never statically."""
