"""The controller in simulated time: the real loop with its ends replaced, one seed for everything that happens.

world         what a seed means: the config, the schedule of faults
ends          environment, packer, policy, objective, tracker, hooks' absence
engine        engines whose tokens carry the version in force when each was sampled, with deaths and duplicates
fleet         engines in the process of the loop
bodies        engines in processes of their own: the real Replicas, lanes and bodies, and the messages between them
weights       lanes (the real receivers) and a publisher that move a name instead of bytes
disk          kills inside of a checkpoint's write
life          one process: from its start or a resume to its end or its death
laws          what must hold during and after
run           lives until the run is done, beside the run that nothing disturbs
"""
