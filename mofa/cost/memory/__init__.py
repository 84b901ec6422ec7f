"""Device memory of every pipeline stage in closed form: what is alive at the peak, and what is reserved."""
