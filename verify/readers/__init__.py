"""Evidence of a stuck job, of any kind, read into one form (`verify.readers.found`)."""
