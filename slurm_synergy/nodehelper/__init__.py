"""The optional helper on a compute node (``slurm-synergyd --node``): root where root is needed.

Where Slurm confines jobs to cores and memory by cgroups, nobody but root can move these limits
while a job runs. The helper does, to what the controller's signed word says of a lease, and back to
what Slurm itself had set when the lease ends, when nobody has confirmed it in time, and when the
helper stops or dies. See ``docs/adr/033-*.md``.
"""
