"""From a costed row to the plan that is shown."""
