"""Key factors of a job: what resources buy by searches on changed machines, and what optimisations bring."""
