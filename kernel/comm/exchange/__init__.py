"""Expert exchange of tensors, by the rules of `kernel.exchange`: one port, a substrate for each way to move rows.

    routing     which rows go where, and how a message is packed
    normal      P: counts, then exactly the rows, over any wire
    latency     D: a fixed number of rows a rank, over any wire
    wires       what moves bytes between peers, in host memory: `local`, `shared`, `gloo`
    nccl, symm  the same port on a GPU

P and D have wires of their own, so nothing that one phase's operation changes is seen by the other's.
"""
