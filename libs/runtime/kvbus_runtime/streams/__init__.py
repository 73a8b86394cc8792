"""Step frames: numbered, replayable, watched streams from workers to frontends."""
