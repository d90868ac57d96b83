"""A run on several hosts: an agent on each tells a collector what its ranks do, and the collector judges them all."""
