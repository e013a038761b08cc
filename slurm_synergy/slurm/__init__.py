"""Everything that knows Slurm: commands, parsers, facts, the client, the cluster adapter."""
