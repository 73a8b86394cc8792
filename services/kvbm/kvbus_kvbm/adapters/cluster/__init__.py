"""G4: the store of the cluster, a shared directory or S3."""
