"""What kvbm decides, without any I/O: who owns which slot, until when, and what is evicted."""
