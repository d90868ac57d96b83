"""Expert exchange without tensors: states, shapes, sizes, and which substrate to use. Pure; paper section 5.

Each phase owns its buffers, counters, workspace, stream and queue pairs. P's dispatch is split behind its notification,
which is P's safe boundary: counts travel, the boundary is published when they are there, the turnstile permits, and
only then is data submitted. `kernel.comm.exchange` moves tensors by these rules.
"""
