"""Which strategies a framework can run on a cluster, and why not."""
