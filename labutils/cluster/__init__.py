"""The real job: what a training run needs on several machines, under Slurm or over plain ssh.

``address`` finds an address and a port at which the nodes can meet, ``preflight`` looks at every
node before training starts, ``job`` holds what is to be run and the lines that each node executes,
``slurm`` writes the batch script and ``ssh`` does the same without a batch system.
"""
