"""Token scheduling over expert replicas, with OR-tools: linear programs, whole tokens, the density that bounds them."""
