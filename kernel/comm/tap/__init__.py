"""What `turnstile.record.install` puts around torch.distributed: each call goes to the ring of this rank.

    notes     the ring, and what is known of groups, threads, call sites and numbers of calls
    patches   replaces attributes, and puts them back
    shapes    the arguments of each method of a process group -> what of it is noted
    quick     the same for the calls that a training step repeats, at little cost
    groups    wrappers of process groups and their Work
    futures   wrappers of the futures that a Work gives, and of any other
    life      wrappers of stores, and of making and destroying groups
    device    wrappers of device synchronisation and of CUDA graphs
    below     calls that C++ makes: DistributedDataParallel's reducer, functional collectives
    deep_ep   wrappers of DeepEP's buffers
    watch     the thread that notes completions, and exceptions that nobody catches
    tap       all of it together

Nothing here raises into the program, changes what it returns, or keeps its tensors alive. It sees what goes through
Python, and the two users in C++ named above. It does not see: `tensor.item()` and other implicit waits for a device;
collectives of libraries that call NCCL, MPI or NVSHMEM themselves; streams that events tie together (that they are is
noted); methods of a backend object called directly; names imported before from modules that are not loaded as such.
"""
